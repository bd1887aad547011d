package ports

import (
	"net"
	"testing"
)

// No port is returned twice, and a process can listen on each.
func TestTake(t *testing.T) {
	given := map[string]bool{}
	for range 20 {
		address := Address(t)
		if given[address] {
			t.Errorf("%s was returned twice", address)
		}
		given[address] = true
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close()
	}
}

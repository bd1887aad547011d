package ports

import (
	"net"
	"testing"
)

// No port is given twice, and each can be listened on.
func TestTake(t *testing.T) {
	given := map[string]bool{}
	for range 20 {
		address := Address(t)
		if given[address] {
			t.Errorf("%s was given twice", address)
		}
		given[address] = true
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close()
	}
}

// Package ports reserves TCP ports for tests.
package ports

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// The ports are below the range of outgoing connections of Linux (32768 and up), so a restarted server finds its port
// free. Planes use ports from 24000 to 29999 (internal/embedded).
const (
	first = 30000
	last  = 32767
)

// claims contains the names of the ports that this process has taken. They are released with the process.
var (
	mu     sync.Mutex
	claims []net.Listener
)

// Take returns a free port of 127.0.0.1 that no other test gets while this process runs, also in other packages that are
// tested at the same time.
func Take() (int, error) {
	mu.Lock()
	defer mu.Unlock()
	for _, n := range rand.Perm(last - first + 1) {
		port := first + n
		claim, err := net.Listen("unix", "@capstan-test-port-"+strconv.Itoa(port))
		if err != nil {
			continue
		}
		if free(port) {
			claims = append(claims, claim)
			return port, nil
		}
		_ = claim.Close()
	}
	return 0, fmt.Errorf("no TCP port is free on 127.0.0.1 between %d and %d", first, last)
}

func free(port int) bool {
	for _, host := range []string{"127.0.0.1", ""} {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			return false
		}
		_ = l.Close()
	}
	return true
}

// Address returns 127.0.0.1 with a port from Take.
func Address(t testing.TB) string {
	t.Helper()
	port, err := Take()
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

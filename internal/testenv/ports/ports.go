// Package ports gives tests TCP ports that stay theirs.
package ports

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// The ports lie below the range from which Linux takes the ports of outgoing connections (32768 and up): whoever
// closes a listener and opens it again, as every server does that is restarted, finds its port free. Planes take
// theirs from 20000 to 29999 (internal/embedded).
const (
	first = 30000
	last  = 32767
)

// claims are the names of the ports that this process has taken. They go with it.
var (
	mu     sync.Mutex
	claims []net.Listener
)

// Take returns a port of 127.0.0.1 that nobody listens on and that no other test is given while this process runs,
// whichever package it is of: packages are tested at the same time.
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

// Address is 127.0.0.1 with a port of Take's.
func Address(t testing.TB) string {
	t.Helper()
	port, err := Take()
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

package embedded

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"
)

// Ports are chosen below the range from which Linux takes the ports of outgoing connections
// (32768 and up), so that none of them is taken by chance while a component restarts. An installation
// has a block of them, which it keeps.
const (
	firstPort = 20000
	lastPort  = 29999
	blockSize = 20
)

// port of the installation by its name.
func (s State) port(name string) int { return s.PortBase + slices.Index(portNames, name) }

// takePorts takes a block of ports: the one that the installation had, or the first one that nobody
// has claimed and whose ports are free. claim must fail while another plane has the block: before
// its components listen, its ports look free.
func takePorts(ctx context.Context, kept int, claim func(base int) (release func(), ok bool), free func(int) bool) (base int, release func(), err error) {
	if kept != 0 {
		if release, ok := claim(kept); ok {
			if awaitFree(ctx, kept, free) {
				return kept, release, nil
			}
			release()
		}
	}
	for base := firstPort; base+blockSize-1 <= lastPort; base += blockSize {
		release, ok := claim(base)
		if !ok {
			continue
		}
		if blockFree(base, free) {
			return base, release, nil
		}
		release()
	}
	return 0, nil, fmt.Errorf("wanted %d free TCP ports in a row on 127.0.0.1 between %d and %d, found none: end what listens there (ss -ltnp)", len(portNames), firstPort, lastPort)
}

// awaitFree gives components that were just killed a moment to let go of their ports.
func awaitFree(ctx context.Context, base int, free func(int) bool) bool {
	ctx, cancel := context.WithTimeout(ctx, portPatience)
	defer cancel()
	for !blockFree(base, free) {
		// The kernel does not tell when a port becomes free.
		select {
		case <-ctx.Done():
			return false
		case <-time.After(probeInterval):
		}
	}
	return true
}

var portPatience = 3 * time.Second

func blockFree(base int, free func(int) bool) bool {
	for i := range portNames {
		if !free(base + i) {
			return false
		}
	}
	return true
}

// claimPorts claims a block among the planes of this box by a name in the kernel that goes with the
// process. Like the ports, it belongs to the network namespace.
func claimPorts(base int) (release func(), ok bool) {
	l, err := net.Listen("unix", "@capstan-ports-"+strconv.Itoa(base))
	if err != nil {
		return nil, false
	}
	return func() { _ = l.Close() }, true
}

// portFree reports whether nothing listens on the port, on loopback or on all addresses.
func portFree(port int) bool {
	for _, host := range []string{"127.0.0.1", ""} {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			return false
		}
		_ = l.Close()
	}
	return true
}

// FreePorts counts the free ports of the plane's range, up to a limit.
func FreePorts(limit int) int {
	count := 0
	for port := firstPort; port <= lastPort && count < limit; port++ {
		if portFree(port) {
			count++
		}
	}
	return count
}

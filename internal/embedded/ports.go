package embedded

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// The ports are below the range of outgoing connections of Linux (from 32768), so that no connection takes a port while a
// component restarts, and above those of the manager's --endpoint-port-range, on which load balancers listen. An installation has a block
// of ports and keeps it.
const (
	firstPort = 24000
	lastPort  = 29999
	blockSize = 20
)

// port returns a port of the installation by its name.
func (s State) port(name string) int {
	if name == portAPIServer && s.APIAddress != "" {
		if _, port, err := splitAddress(s.APIAddress); err == nil {
			return port
		}
	}
	return s.PortBase + slices.Index(portNames, name)
}

// takePorts takes a block of ports: the former block of the installation, or the first unclaimed block with free ports. claim
// must fail while another plane has the block: the ports of that plane seem free until its components listen.
func takePorts(ctx context.Context, kept int, claim func(base int) (release func(), ok bool), free func(name string, port int) bool) (base int, release func(), err error) {
	if kept != 0 {
		if release, ok := claim(kept); ok {
			if awaitFree(ctx, func() bool { return blockFree(kept, free) }) {
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
	return 0, nil, fmt.Errorf("expected %d free TCP ports in a row on 127.0.0.1 between %d and %d, found none: stop programs that listen there (`ss -ltnp` lists them)", len(portNames), firstPort, lastPort)
}

// awaitFree waits until the ports of killed components are free.
func awaitFree(ctx context.Context, free func() bool) bool {
	ctx, cancel := context.WithTimeout(ctx, portPatience)
	defer cancel()
	for !free() {
		// The kernel has no event for a port that becomes free.
		select {
		case <-ctx.Done():
			return false
		case <-time.After(probeInterval):
		}
	}
	return true
}

var portPatience = 3 * time.Second

func blockFree(base int, free func(name string, port int) bool) bool {
	for i, name := range portNames {
		if !free(name, base+i) {
			return false
		}
	}
	return true
}

// hostMetrics returns the address for the metrics of a host, by its index, or "". It is behind the ports of the components in the
// block. The plane does not need these ports: it keeps its block if another program has one of them, and the host has no metrics then.
func (s State) hostMetrics(ctx context.Context, host int, free func(int) bool) string {
	port := s.PortBase + len(portNames) + host
	if port >= s.PortBase+blockSize || !awaitFree(ctx, func() bool { return free(port) }) {
		return ""
	}
	return hostPort(port)
}

// componentPortFree reports whether a component can listen on its port. A load balancer on another address than loopback is no obstacle:
// tenants choose its port. Only the webhooks of Cluster API core listen on all addresses.
func componentPortFree(name string, port int) bool {
	if name == portCoreWebhook {
		return portFree(port)
	}
	return loopbackFree(port)
}

// loopbackFree reports whether no program listens on the port of 127.0.0.1. Load balancers can have it on other addresses.
func loopbackFree(port int) bool {
	return tryListen(hostPort(port)) == nil
}

// claimPorts claims a block for this plane with an abstract socket, which disappears with the process. Like the ports, it
// belongs to the network namespace.
func claimPorts(base int) (release func(), ok bool) {
	l, err := net.Listen("unix", "@capstan-ports-"+strconv.Itoa(base))
	if err != nil {
		return nil, false
	}
	return func() { _ = l.Close() }, true
}

// portFree reports whether no program listens on the port, on loopback or on all addresses.
func portFree(port int) bool {
	return loopbackFree(port) && tryListen(net.JoinHostPort("", strconv.Itoa(port))) == nil
}

// checkAPIPort returns an error if another program has the port of --api-address, on any address of the box. served is the URL of the API
// server that runs, which has its port itself; empty for none.
func checkAPIPort(ctx context.Context, s State, served string, free func(int) bool) error {
	port := s.port(portAPIServer)
	if s.APIAddress == "" || served == loopback("https", port) || awaitFree(ctx, func() bool { return free(port) }) {
		return nil
	}
	return invalid("expected a free port for --api-address %s: the API server listens on all addresses of this box, and another program has port %d on one of them (`ss -ltnp` lists it; load balancers of clusters have 6443): choose another port, for example 7442", s.APIAddress, port)
}

// checkListens returns an error if the manager or capstand cannot listen on an address of the options: the process would end again and
// again. running are the settings of the plane that runs, which listens on its own addresses itself.
func checkListens(ctx context.Context, s, running Settings) error {
	for _, l := range s.listeners() {
		if l.flag == apiAddressFlag { // checkAPIPort
			continue
		}
		if err := l.check(ctx, slices.ContainsFunc(running.listeners(), l.mayOverlap)); err != nil {
			return err
		}
	}
	return nil
}

// check returns an error if a process of this box cannot listen on the address. own: the running plane may have the port.
func (l listener) check(ctx context.Context, own bool) error {
	var err error
	awaitFree(ctx, func() bool {
		err = tryListen(l.address())
		return own || !errors.Is(err, syscall.EADDRINUSE)
	})
	switch {
	case err == nil || own && errors.Is(err, syscall.EADDRINUSE):
		return nil
	case errors.Is(err, syscall.EADDRINUSE):
		return invalid("expected a free port for %s %s, found one that another program has (`ss -ltnp` lists it): choose another port", l.flag, l.address())
	}
	return invalid("expected an address of this box for %s, found %s: %w: use :%d for all addresses of this box, or one of them", l.flag, l.address(), err, l.port)
}

// tryListen returns an error if a process cannot listen on the address now.
func tryListen(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	return l.Close()
}

// FreePorts counts the free ports in the range of the plane, up to a limit.
func FreePorts(limit int) int {
	count := 0
	for port := firstPort; port <= lastPort && count < limit; port++ {
		if portFree(port) {
			count++
		}
	}
	return count
}

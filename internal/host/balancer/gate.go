package balancer

import (
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// maxConnections bounds the connections of a balancer, parked ones included.
	maxConnections = 16384
	// filesPerConnection: two sockets, and two pipes through which the kernel moves the bytes.
	filesPerConnection = 6
	// spareFiles are for everything else.
	spareFiles = 64
)

// gate lets connections in. A source gets as many as there are free places left, so one source alone has half of
// them at most, two a third each, and a new source always finds room. A source is an IPv4 address or an IPv6 /64,
// the smallest network that a site gets: one machine has all its addresses.
type gate struct {
	mu      sync.Mutex
	most    int
	open    int
	sources map[netip.Prefix]int
	// empty is closed, and made anew, when the last connection leaves.
	empty chan struct{}
}

func newGate(most int) *gate {
	return &gate{most: most, sources: map[netip.Prefix]int{}, empty: make(chan struct{})}
}

// connectionLimit is maxConnections, or what the process's limit of files allows.
func connectionLimit() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur > maxConnections*filesPerConnection+spareFiles {
		return maxConnections
	}
	return max(int(limit.Cur)-spareFiles, 0) / filesPerConnection
}

// enter returns a function that gives the place back, or nil if the source has its share.
func (g *gate) enter(source netip.Prefix) (leave func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.sources[source] >= g.most-g.open {
		return nil
	}
	g.open++
	g.sources[source]++
	return func() { g.leave(source) }
}

func (g *gate) leave(source netip.Prefix) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open--
	if g.sources[source]--; g.sources[source] == 0 {
		delete(g.sources, source)
	}
	if g.open == 0 {
		close(g.empty)
		g.empty = make(chan struct{})
	}
}

// load returns the number of connections and of sources, and a channel that is closed when the last connection leaves.
func (g *gate) load() (open, sources int, empty <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open, len(g.sources), g.empty
}

// sourceOf is whom a connection counts for.
func sourceOf(remote net.Addr) netip.Prefix {
	address, _ := netip.ParseAddrPort(remote.String())
	ip, bits := address.Addr().Unmap().WithZone(""), 32
	if ip.Is6() {
		bits = 64
	}
	prefix, _ := ip.Prefix(bits)
	return prefix
}

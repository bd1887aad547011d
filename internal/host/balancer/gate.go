package balancer

import (
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// maxConnections limits the connections of a balancer, including those that wait for a backend.
	maxConnections = 16384
	// filesPerConnection: two sockets, and two pipes through which the kernel moves the bytes.
	filesPerConnection = 6
	// spareFiles remain for everything else.
	spareFiles = 64
)

// gate admits connections. A source can have as many connections as there are free places, so one source alone gets at most
// half of them, two get a third each, and there is always room for a new source. A source is an IPv4 address or an IPv6 /64,
// the smallest network that a site gets, because one machine can use all of its addresses.
type gate struct {
	mu      sync.Mutex
	most    int
	open    int
	sources map[netip.Prefix]int
	// empty is closed and replaced when the last connection ends.
	empty chan struct{}
}

func newGate(most int) *gate {
	return &gate{most: most, sources: map[netip.Prefix]int{}, empty: make(chan struct{})}
}

// connectionLimit is maxConnections, or less if the process may open fewer files.
func connectionLimit() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur > maxConnections*filesPerConnection+spareFiles {
		return maxConnections
	}
	return max(int(limit.Cur)-spareFiles, 0) / filesPerConnection
}

// enter returns a function that releases the place, or nil if the source has reached its share.
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

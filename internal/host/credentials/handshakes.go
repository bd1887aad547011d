package credentials

import (
	"net"
	"net/netip"
	"slices"
	"sync"

	"capstan.dev/capstan/internal/cidr"
)

// handshakes are the peers that have not authenticated yet. The zero value is usable.
type handshakes struct {
	mu       sync.Mutex
	began    uint64
	current  int
	bySource map[netip.Prefix][]*handshake // the oldest first
}

type handshake struct {
	conn   net.Conn
	source netip.Prefix
	number uint64
	done   chan struct{}
}

// begin counts the handshake of a new peer. It waits until there is a place, for which it closes the connection of another peer. There
// is one caller.
func (h *handshakes) begin(conn net.Conn) *handshake {
	for {
		displaced := h.crowd()
		if displaced == nil {
			break
		}
		_ = displaced.conn.Close()
		<-displaced.done
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.bySource == nil {
		h.bySource = map[netip.Prefix][]*handshake{}
	}
	h.began++
	h.current++
	added := &handshake{conn, cidr.OfPeer(conn.RemoteAddr()), h.began, make(chan struct{})}
	h.bySource[added.source] = append(h.bySource[added.source], added)
	return added
}

// crowd returns the oldest handshake of the source with most handshakes, if all places are taken, or nil.
func (h *handshakes) crowd() (found *handshake) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.current < MaxHandshakes {
		return nil
	}
	most := 0
	for _, all := range h.bySource {
		if len(all) > most || len(all) == most && all[0].number < found.number {
			found, most = all[0], len(all)
		}
	}
	return found
}

func (h *handshakes) end(ended *handshake) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.current--
	left := slices.DeleteFunc(h.bySource[ended.source], func(other *handshake) bool { return other == ended })
	if h.bySource[ended.source] = left; len(left) == 0 {
		delete(h.bySource, ended.source)
	}
	close(ended.done)
}

package infrastructure_test

import (
	"net"
	"sync"
	"testing"
)

// apiRelay is the network between the manager and the API server of a workload cluster. While it is blocked it accepts connections and
// requests, and delivers no answer.
type apiRelay struct {
	net.Listener
	blocked sync.RWMutex
}

func newAPIRelay(t *testing.T, to string) *apiRelay {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	r := &apiRelay{Listener: listener}
	go func() {
		var open []net.Conn
		// Otherwise the cluster would stay connected, and manage the Services of later tests.
		defer func() {
			for _, c := range open {
				_ = c.Close()
			}
		}()
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				_ = client.Close()
				continue
			}
			open = append(open, client, server)
			go r.carry(server, client)
			go r.carry(client, server)
		}
	}()
	return r
}

func (r *apiRelay) carry(to, from net.Conn) {
	defer to.Close()
	data := make([]byte, 32<<10)
	for {
		n, err := from.Read(data)
		r.blocked.RLock()
		_, writeErr := to.Write(data[:n])
		r.blocked.RUnlock()
		if err != nil || writeErr != nil {
			return
		}
	}
}

// while blocks the relay during f.
func (r *apiRelay) while(f func()) {
	r.blocked.Lock()
	defer r.blocked.Unlock()
	f()
}

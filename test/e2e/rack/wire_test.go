//go:build e2e && rack

package rack_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/rack"
)

// wire carries the connections of a manager to the capstand of a box. While it is cut, it carries nothing and closes no connection. What
// was sent meanwhile arrives after the repair, as with TCP.
type wire struct {
	path, to    string
	connections atomic.Int32
	cut         sync.RWMutex
}

// newWire returns a wire to a box, until the test ends. Its socket is path.
func newWire(t *testing.T, b *rack.Box) *wire {
	t.Helper()
	w := &wire{path: filepath.Join(b.Root, "wire.sock"), to: b.Socket()}
	listener, err := net.Listen("unix", w.path)
	expect.NoError(t, err)
	expect.NoError(t, os.Chmod(w.path, 0o666))
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			manager, err := listener.Accept()
			if err != nil {
				return
			}
			go w.connect(manager)
		}
	}()
	return w
}

func (w *wire) connect(manager net.Conn) {
	defer func() { _ = manager.Close() }()
	box, err := net.Dial("unix", w.to)
	if err != nil {
		return
	}
	w.connections.Add(1)
	var carrying sync.WaitGroup
	carrying.Go(func() { w.carry(box, manager) })
	carrying.Go(func() { w.carry(manager, box) })
	carrying.Wait()
}

func (w *wire) carry(to, from net.Conn) {
	data := make([]byte, 32<<10)
	for {
		n, err := from.Read(data)
		w.cut.RLock()
		_, failed := to.Write(data[:n])
		w.cut.RUnlock()
		if errors.Join(err, failed) != nil {
			_, _ = to.Close(), from.Close()
			return
		}
	}
}

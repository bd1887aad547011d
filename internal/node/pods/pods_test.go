package pods

import (
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// TestUnusableRuntime: a runtime that does not answer, and one that does not run, delay the end of a machine only shortly.
func TestUnusableRuntime(t *testing.T) {
	for name, tt := range map[string]struct {
		listens bool
		limit   time.Duration
	}{
		"hangs":        {true, 2 * callTimeout},
		"does not run": {false, callTimeout / 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			socket := filepath.Join(t.TempDir(), "s")
			listener, err := net.Listen("unix", socket) // Nobody accepts a connection.
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			if !tt.listens {
				_ = listener.Close()
			}
			r, err := Connect(socket, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = r.Close() }()
			begun := time.Now()
			running, err := r.Running(t.Context())
			if after := time.Since(begun); err == nil || after > tt.limit {
				t.Errorf("%v, %v after %s, want an error within %s", running, err, after, tt.limit)
			}
		})
	}
}

package pods

import (
	"log/slog"
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestUnusableRuntime: a runtime that does not answer, and one that does not run, delay the end of a machine only shortly.
func TestUnusableRuntime(t *testing.T) {
	for name, tt := range map[string]struct {
		listens bool
		want    codes.Code
	}{
		"hangs":        {true, codes.DeadlineExceeded}, // of the call: the test has none
		"does not run": {false, codes.Unavailable},     // without a wait for the deadline
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
			if running, err := r.Running(t.Context()); status.Code(err) != tt.want {
				t.Errorf("%v, %v, want %s", running, err, tt.want)
			}
		})
	}
}

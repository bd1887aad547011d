package host

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
)

// The folder is the machine's, too: a link in the place of its socket leads capstand nowhere.
func TestInitSocket(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	listener, err := net.Listen("unix", filepath.Join(dir, "init.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"bootstrap":"Succeeded"}` + "\n"))
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	if err := os.Symlink(filepath.Join(dir, "init.sock"), filepath.Join(other, "init.sock")); err != nil {
		t.Fatal(err)
	}
	for from, want := range map[string]int{dir: 1, other: 0} {
		heard := 0
		err := streamInit(context.Background(), from, func(initStatus) { heard++ })
		if heard != want || (err == nil) != (want == 1) {
			t.Errorf("%s: heard %d, want %d, %v", from, heard, want, err)
		}
	}
}

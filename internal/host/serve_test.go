package host

import (
	"os"
	"path/filepath"
	"testing"
)

// No other user can connect to the socket before it has its owner and mode.
func TestListenPrivately(t *testing.T) {
	path := filepath.Join(t.TempDir(), "capstand.sock")
	listener, err := listenPrivately(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	info, err := os.Stat(path)
	if err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("the socket is %v, %v, want %v", info.Mode(), err, os.ModeSocket|0o600)
	}
}

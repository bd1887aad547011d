package host

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The rules name the files of block volumes. A host without udev gets none.
func TestUdevRules(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		writeUdevRules(dir, slog.New(slog.DiscardHandler))
	}
	got, err := os.ReadFile(filepath.Join(dir, "rules.d", "59-capstan.rules"))
	if want := `ATTR{loop/backing_file}=="/var/lib/capstan/block-volumes/pvc-*"`; err != nil || !strings.Contains(string(got), want) {
		t.Errorf("the rules are %q, %v, want %s", got, err, want)
	}
	none := filepath.Join(dir, "none")
	writeUdevRules(none, slog.New(slog.DiscardHandler))
	if _, err := os.Stat(none); !os.IsNotExist(err) {
		t.Errorf("a host without udev has a folder of udev: %v", err)
	}
}

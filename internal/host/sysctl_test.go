package host

import (
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

func TestSysctls(t *testing.T) {
	dir := t.TempDir()
	values := map[string][2]string{ // before, after
		"vm/overcommit_memory":          {"0\n", "1"},
		"kernel/panic":                  {"10\n", "10\n"},       // already correct: not written
		"fs/inotify/max_user_instances": {"99999\n", "99999\n"}, // larger values stay
		"fs/inotify/max_user_watches":   {"100\n", "524288"},
	}
	for name, value := range values {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(value[0]), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	setSysctls(dir, slog.New(slog.NewTextHandler(io.Discard, nil))) // missing settings are ignored
	for name, value := range values {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != value[1] {
			t.Errorf("%s is %q, %v; want %q", name, got, err, value[1])
		}
	}
}

package bundle

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDir(t *testing.T) {
	for args, want := range map[string]string{
		"--root /r --log /l --log-format json create --bundle /b --pid-file /p id": "/b",
		"create --bundle=/b id": "/b", "create -b /b id": "/b", "create id": ".", "create --bundle": ".",
		"--root /r exec --process /p id": "", "delete --force id": "", "features": "", "": "",
	} {
		if got := Dir(strings.Fields(args)); got != want {
			t.Errorf("%s: bundle %q, want %q", args, got, want)
		}
	}
}

func TestChange(t *testing.T) {
	change := func(spec []byte) ([]byte, error) {
		var fields map[string]any
		return append(spec, ' '), json.Unmarshal(spec, &fields)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "config.json")
	if err := Change(dir, change); err == nil {
		t.Error("a bundle without a specification was accepted")
	}
	for _, content := range []string{"", "{", "[]"} {
		if err := os.WriteFile(path, []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
		if err := Change(dir, change); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: %v", content, err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != content {
			t.Errorf("%q was changed to %q, %v", content, got, err)
		}
	}
	if err := os.WriteFile(path, []byte("{}"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := Change(dir, change); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", info, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("files %v, %v", entries, err)
	}
}

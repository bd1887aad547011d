package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for _, content := range []string{"old", "new"} {
		if err := WriteFile(path, []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(path)
		info, _ := os.Stat(path)
		if err != nil || string(data) != content || info.Mode().Perm() != 0o640 {
			t.Errorf("read %q %v, %v", data, info.Mode(), err)
		}
	}
	// What cannot be written leaves the old content and nothing else.
	if err := WriteJSON(path, func() {}, 0o600); err == nil {
		t.Error("wrote a function")
	}
	if err := WriteFile(filepath.Join(dir, "none", "f"), nil, 0o600); err == nil {
		t.Error("wrote into a folder that is not there")
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("left %v", entries)
	}
}

// Remove accepts that there is no file, and nothing else.
func TestRemove(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "folder", "file")
	if err := errors.Join(os.Mkdir(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := Remove(filepath.Dir(path)); err == nil {
		t.Error("a folder with a file was removed")
	}
	for range 2 {
		if err := Remove(path); err != nil || Exists(path) {
			t.Errorf("the file exists: %v, %v", Exists(path), err)
		}
	}
}

package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
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

// WriteFileAs gives a file its owner.
func TestWriteFileAs(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root gives files away")
	}
	path := filepath.Join(t.TempDir(), "f")
	if err := WriteFileAs(path, nil, 0o600, 12, 34); err != nil {
		t.Fatal(err)
	}
	var info syscall.Stat_t
	if err := syscall.Stat(path, &info); err != nil || info.Uid != 12 || info.Gid != 34 {
		t.Errorf("owner %d:%d, %v", info.Uid, info.Gid, err)
	}
}

// RemoveTemporary removes what WriteFile leaves when it is killed, and nothing else.
func TestRemoveTemporary(t *testing.T) {
	dir := t.TempDir()
	if err := RemoveTemporary(filepath.Join(dir, "none")); err != nil {
		t.Errorf("a folder that does not exist: %v", err)
	}
	f, err := os.CreateTemp(dir, temporary+"*") // as WriteFile does
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString("a secret")
	for name, content := range map[string]string{"kept": "x", ".newer": "x", temporary + "mark": ""} {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	if err = errors.Join(err, f.Close(), os.Mkdir(filepath.Join(dir, temporary+"folder"), 0o700), RemoveTemporary(dir)); err != nil {
		t.Fatal(err)
	}
	var names []string
	entries, _ := os.ReadDir(dir)
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	if want := []string{temporary + "folder", temporary + "mark", ".newer", "kept"}; !slices.Equal(names, want) {
		t.Errorf("left %v, want %v", names, want)
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

// The functions run at the same time, and the error does not depend on which one ends first.
func TestTogether(t *testing.T) {
	first, second := errors.New("first"), errors.New("second")
	ended := make(chan struct{})
	err := Together(
		func() error { return nil },
		func() error { <-ended; return first },
		func() error { defer close(ended); return second },
	)
	if err != first { //nolint:errorlint // the error itself
		t.Error(err)
	}
	if err := Together(); err != nil {
		t.Error(err)
	}
}

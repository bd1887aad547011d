package update

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/testenv/expect"
)

// A snapshot restores links, also one that a file has replaced, and removes new ones.
func TestSnapshotOfLinks(t *testing.T) {
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	for _, name := range []string{"replaced", "moved", "dir/removed", "same"} {
		expect.NoError(t, os.MkdirAll(filepath.Dir(at(name)), 0o755))
		expect.NoError(t, os.Symlink("target", at(name)))
	}
	expect.NoError(t, os.WriteFile(at("target"), []byte("precious"), 0o600))
	s := snapshot{root: root, dir: at("copies")}
	expect.NoError(t, s.take([]string{"/replaced", "/moved", "/dir", "/same", "/new"}))
	for _, name := range []string{"replaced", "moved", "dir/removed"} {
		expect.NoError(t, os.Remove(at(name)))
	}
	expect.NoError(t, os.WriteFile(at("replaced"), []byte("new"), 0o600))
	expect.NoError(t, os.Symlink("/etc", at("moved")))
	expect.NoError(t, os.Symlink("/etc", at("new")))
	expect.NoError(t, os.Symlink("/etc", at("replaced.capstan-link"))) // left by a process that was killed
	for range 2 {
		expect.NoError(t, s.restore())
	}
	for _, name := range []string{"replaced", "moved", "dir/removed", "same"} {
		if target, err := os.Readlink(at(name)); err != nil || target != "target" {
			t.Errorf("%s leads to %q: %v", name, target, err)
		}
	}
	if _, err := os.Lstat(at("new")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the new link remains: %v", err)
	}
	if data, err := os.ReadFile(at("target")); err != nil || string(data) != "precious" {
		t.Errorf("the target has %q: %v", data, err)
	}
}

// A snapshot restores content, modes and missing files, and removes new ones.
func TestSnapshot(t *testing.T) {
	root := t.TempDir()
	write := func(path, text string, mode fs.FileMode) {
		t.Helper()
		full := filepath.Join(root, path)
		expect.NoError(t, os.MkdirAll(filepath.Dir(full), 0o755))
		expect.NoError(t, os.WriteFile(full, []byte(text), mode))
	}
	read := func(path string) string {
		data, err := os.ReadFile(filepath.Join(root, path))
		if errors.Is(err, fs.ErrNotExist) {
			return "missing"
		}
		expect.NoError(t, err)
		return string(data)
	}
	write("etc/changed", "old", 0o640)
	write("etc/removed", "old", 0o600)
	write("etc/mode", "old", 0o600)
	write("etc/dir/a", "old", 0o600)
	write("etc/dir/sub/b", "old", 0o600)
	s := snapshot{root: root, dir: filepath.Join(root, "copies")}
	expect.NoError(t, os.MkdirAll(s.dir+".new", 0o700)) // left by a process that was killed
	expect.NoError(t, s.take([]string{"/etc/changed", "/etc/mode", "/etc/removed", "/etc/new", "/etc/dir", "/etc/nothing"}))
	write("etc/changed", "new", 0o600)
	write("etc/new", "new", 0o600)
	write("etc/dir/a", "new", 0o600)
	write("etc/dir/sub/c", "new", 0o600)
	expect.NoError(t, os.Chmod(filepath.Join(root, "etc/mode"), 0o644))
	expect.NoError(t, os.Remove(filepath.Join(root, "etc/removed")))
	expect.NoError(t, os.RemoveAll(filepath.Join(root, "etc/dir/sub/b")))
	for range 2 {
		expect.NoError(t, s.restore())
	}
	for path, want := range map[string]string{
		"etc/changed": "old", "etc/removed": "old", "etc/new": "missing", "etc/dir/a": "old", "etc/dir/sub/b": "old", "etc/dir/sub/c": "missing",
	} {
		if got := read(path); got != want {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
	}
	if info, err := os.Stat(filepath.Join(root, "etc/changed")); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if info, err := os.Stat(filepath.Join(root, "etc/mode")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("a file with the same content and another mode: %v, %v", info.Mode(), err)
	}
	if info, err := os.Stat(s.dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the copies: %v, %v", info.Mode(), err)
	}
	expect.NoError(t, s.remove())
	if err := s.restore(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a removed snapshot was restored: %v", err)
	}
}

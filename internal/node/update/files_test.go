package update

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
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

// A rollback gives a user of the machine no file to which a planted link leads, neither its content nor the file itself. It restores all
// other files.
func TestSnapshotAvoidsLinks(t *testing.T) {
	for name, tt := range map[string]struct {
		plant func(home, etc string) error
		ok    bool
	}{
		"file":          {func(home, etc string) error { return replace(home+"/file", etc+"/victim") }, true},
		"folder":        {func(home, etc string) error { return replace(home+"/dir", etc) }, false},
		"new folder":    {func(home, etc string) error { return os.Symlink(etc, home+"/new") }, false},
		"temporary":     {func(home, etc string) error { return os.Symlink(etc+"/victim", home+"/file.capstan-tmp0") }, true},
		"nothing":       {func(string, string) error { return nil }, true},
		"only the mode": {func(home, _ string) error { return os.Chmod(home+"/file", 0o600) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			home, etc := filepath.Join(root, "home/ann"), filepath.Join(root, "etc")
			expect.NoError(t, errors.Join(os.MkdirAll(home+"/dir", 0o755), os.MkdirAll(etc, 0o755), os.Chown(home, 1000, 1000)))
			for _, path := range []string{home + "/file", home + "/dir/victim"} {
				expect.NoError(t, errors.Join(os.WriteFile(path, []byte("old"), 0o640), os.Chown(path, 1000, 1000)))
			}
			kubelet, added := filepath.Join(root, "kubelet"), filepath.Join(root, "new")
			expect.NoError(t, errors.Join(os.WriteFile(etc+"/victim", []byte("secret"), 0o600), os.WriteFile(kubelet, []byte("old"), 0o600)))
			s := snapshot{root: root, dir: filepath.Join(root, "copies")}
			expect.NoError(t, s.take([]string{"/home/ann/file", "/home/ann/dir/victim", "/home/ann/new/victim", "/kubelet", "/new"}))
			expect.NoError(t, errors.Join(tt.plant(home, etc), os.WriteFile(kubelet, []byte("new"), 0o600), os.WriteFile(added, nil, 0o600)))
			if err := s.restore(); (err == nil) != tt.ok {
				t.Errorf("restored: %v", err)
			}
			for path, want := range map[string]string{home + "/file": "-rw-r----- 1000 old", etc + "/victim": "-rw------- 0 secret", kubelet: "-rw------- 0 old"} {
				if got := describe(t, path); got != want {
					t.Errorf("%s is %q, want %q", path, got, want)
				}
			}
			if _, err := os.Lstat(added); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the new file remains: %v", err)
			}
		})
	}
}

func replace(path, target string) error {
	return errors.Join(os.RemoveAll(path), os.Symlink(target, path))
}

func describe(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Lstat(path)
	expect.NoError(t, err)
	data, err := os.ReadFile(path)
	expect.NoError(t, err)
	return fmt.Sprintf("%s %d %s", info.Mode(), info.Sys().(*syscall.Stat_t).Uid, data)
}

// A link that replaced a file after it was found is not copied.
func TestSaveAvoidsLinks(t *testing.T) {
	dir := t.TempDir()
	folder, err := os.OpenRoot(dir)
	expect.NoError(t, err)
	defer func() { _ = folder.Close() }()
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "secret"), nil, 0o600))
	expect.NoError(t, os.Symlink("secret", filepath.Join(dir, "file")))
	if _, err := (found{folder: folder, name: "file", path: "/file"}).saveTo(dir, "copy"); err == nil {
		t.Error("the target of a link was copied")
	}
	if _, err := os.Lstat(filepath.Join(dir, "copy")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
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

package hostmount

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// A mount never leads out of the folder that its path names. The cases are what a machine can create in a writable mount, and what
// an administrator may get wrong.
func TestOpen(t *testing.T) {
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "state")
	allowed := filepath.Join(dir, "allowed")
	for _, folder := range []string{filepath.Join(allowed, "models"), filepath.Join(dir, "secret"), filepath.Join(state, "machines")} {
		if err := os.MkdirAll(folder, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(allowed, "file"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{
		"absolute": filepath.Join(dir, "secret"), "relative": "../secret", "root": "/", "inside": "models", "alias": state, "proc": "/proc/self/root",
	} {
		if err := os.Symlink(target, filepath.Join(allowed, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(allowed, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for source, want := range map[string]string{
		"allowed/models":          "",
		"allowed/file":            "",
		"allowed/absolute":        "symbolic link",
		"allowed/relative":        "symbolic link",
		"allowed/inside":          "symbolic link",
		"allowed/root/etc":        "symbolic link",
		"allowed/proc/etc":        "symbolic link",
		"allowed/alias/machines":  "symbolic link",
		"allowed/missing":         "expected a folder or file",
		"allowed/file/below":      "expected a folder or file",
		"allowed/pipe":            "expected a folder or a regular file",
		"../" + inDir(dir, state): "files of capstand",
		"../" + inDir(dir, filepath.Join(state, "machines")): "files of capstand",
		"../" + inDir(dir, filepath.Dir(state)):              "files of capstand",
	} {
		file, err := Open(filepath.Join(dir, source), filepath.Join(allowed, "alias"), "")
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", source, err, want)
		}
		if file != nil {
			_ = file.Close()
		}
	}
}

// inDir returns a path relative to the parent of dir.
func inDir(dir, path string) string {
	out, err := filepath.Rel(filepath.Dir(dir), path)
	if err != nil {
		panic(err)
	}
	return out
}

// A staged mount is the folder that was opened, also if its path has become a link since. It is read-only, and its removal keeps the
// content.
func TestStage(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	dir := t.TempDir()
	folder, staging := filepath.Join(dir, "models"), filepath.Join(dir, "staging")
	for _, path := range []string{folder, folder + "/sub"} {
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	file, err := Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if err := os.Rename(folder, folder+".old"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc", folder); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = Unstage(staging) })
	for range 2 { // as after a crash
		if err := Stage(file, filepath.Join(staging, "0")); err != nil {
			t.Fatal(err)
		}
	}
	if entries, err := os.ReadDir(filepath.Join(staging, "0")); err != nil || len(entries) != 1 || entries[0].Name() != "sub" {
		t.Errorf("staged: %v, %v", entries, err)
	}
	if err := os.RemoveAll(filepath.Join(staging, "0", "sub")); !errors.Is(err, unix.EROFS) {
		t.Errorf("removal of staged files: %v", err)
	}
	if err := Unstage(staging); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(folder + ".old/sub"); err != nil {
		t.Errorf("the content is lost: %v", err)
	}
	if _, err := os.Stat(staging); err == nil {
		t.Error("the staging folder still exists")
	}
	if err := Unstage(staging); err != nil {
		t.Errorf("again: %v", err)
	}
}

package foreignfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
)

const most = 64

// Only a regular file of the folder is read, and only up to the limit.
func TestRead(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "secret")
	write := func(path string, size int) error { return os.WriteFile(path, make([]byte, size), 0o600) }
	if err := write(outside, 1); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		make func(path string) error
		want int
		ok   bool
	}{
		"a file":              {func(p string) error { return write(p, most) }, most, true},
		"an empty file":       {func(p string) error { return write(p, 0) }, 0, true},
		"a large file":        {func(p string) error { return write(p, most+1) }, 0, false},
		"a huge file":         {func(p string) error { return errors.Join(write(p, 0), os.Truncate(p, 1<<40)) }, 0, false},
		"a link":              {func(p string) error { return os.Symlink(outside, p) }, 0, false},
		"a link in itself":    {func(p string) error { return errors.Join(write(p+".other", 1), os.Symlink("file.other", p)) }, 0, false},
		"a pipe":              {func(p string) error { return unix.Mkfifo(p, 0o600) }, 0, false},
		"a folder":            {func(p string) error { return os.Mkdir(p, 0o700) }, 0, false},
		"a device":            {func(p string) error { return unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) }, 0, false},
		"a socket":            {func(p string) error { return unix.Mknod(p, unix.S_IFSOCK|0o600, 0) }, 0, false},
		"no file":             {func(string) error { return nil }, 0, false},
		"a file with a lease": {func(p string) error { return errors.Join(write(p, 1), lease(t, p)) }, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := test.make(filepath.Join(dir, "file")); errors.Is(err, fs.ErrPermission) {
				t.Skip(err)
			} else if err != nil {
				t.Fatal(err)
			}
			got, err := Read(dir, "file", most)
			if (err == nil) != test.ok || test.ok && len(got) != test.want {
				t.Errorf("read %d bytes, %v", len(got), err)
			}
		})
	}
}

// lease takes a write lease, as the owner of a file can: a plain open of the file by others waits until it is broken.
func lease(t *testing.T, path string) error {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	t.Cleanup(func() { _ = file.Close() })
	_, err = unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	return err
}

// A folder of the path can be a link in the folder, and none that leads out of it.
func TestOpenBelow(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	for _, path := range []string{filepath.Join(dir, "real/file"), filepath.Join(outside, "file")} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink("real", filepath.Join(dir, "inside")), os.Symlink(outside, filepath.Join(dir, "outside"))); err != nil {
		t.Fatal(err)
	}
	for path, ok := range map[string]bool{
		"real/file": true, "inside/file": true,
		"outside/file": false, "../" + filepath.Base(outside) + "/file": false, filepath.Join(outside, "file"): false,
	} {
		file, err := Open(dir, path)
		if (err == nil) != ok {
			t.Errorf("%s: %v", path, err)
		}
		if err == nil {
			_ = file.Close()
		}
	}
}

// Replace follows no link of the other process and replaces the existing file.
func TestReplace(t *testing.T) {
	folder, outside := t.TempDir(), filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(outside, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{"data", "data.capstand"} {
		if err := os.Symlink(outside, filepath.Join(folder, link)); err != nil {
			t.Fatal(err)
		}
	}
	dir, err := os.OpenRoot(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dir.Close() }()
	if err := Replace(dir, "data", []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(outside); string(got) != "kept" {
		t.Errorf("a file outside became %q", got)
	}
	info, err := os.Lstat(filepath.Join(folder, "data"))
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if atomicfile.Exists(filepath.Join(folder, "data.capstand")) {
		t.Error("the temporary file is left")
	}
}

// TestReplaceWithoutRoom: a new file that is not complete does not stay.
func TestReplaceWithoutRoom(t *testing.T) {
	folder := t.TempDir()
	if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(folder, 0) })
	dir, err := os.OpenRoot(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dir.Close() }()
	if err := errors.Join(Replace(dir, "data", []byte("old"), 0o600), os.Mkdir(filepath.Join(folder, "folder"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := Replace(dir, "data", make([]byte, 1<<17), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("more than fits: %v", err)
	}
	if err := Replace(dir, "folder", nil, 0o600); err == nil {
		t.Error("a folder was replaced")
	}
	entries, err := os.ReadDir(folder)
	if err != nil || len(entries) != 2 {
		t.Errorf("left %v, %v", entries, err)
	}
	if got, err := Read(folder, "data", most); err != nil || string(got) != "old" {
		t.Errorf("the file is %q, %v", got, err)
	}
}

package foreignfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// makeTree makes folders of the caller, and home/ann, to which others can write.
func makeTree(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for _, folder := range []string{"etc", "run", "var", "home/ann/own"} {
		if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	err := os.Chmod(filepath.Join(root, "home/ann"), 0o777)
	for name, target := range map[string]string{
		"var/run": "../run", "var/config": "/etc", "var/home": "../home/ann", "var/up": "../../../etc", "var/ring": "ring",
		"home/ann/inside": "own", "home/ann/up": "../../etc", "home/ann/absolute": "/etc", "home/ann/file": "own/none",
	} {
		err = errors.Join(err, os.Symlink(target, filepath.Join(root, name)))
	}
	if err = errors.Join(err, unix.Mkfifo(filepath.Join(root, "home/ann/pipe"), 0o666)); err != nil {
		t.Fatal(err)
	}
	return root
}

// A file gets into the folder of its path. Links of the caller lead anywhere below root, links of others only to their own folder.
func TestMakeParent(t *testing.T) {
	for path, want := range map[string]string{
		"/x":                   "x",
		"/etc/x":               "etc/x",
		"/new/folder/x":        "new/folder/x",
		"/var/run/x":           "run/x",
		"/var/run/new/x":       "run/new/x",
		"/var/config/x":        "etc/x",
		"/var/up/x":            "etc/x",
		"/var/ring/x":          "",
		"/home/ann/x":          "home/ann/x",
		"/home/ann/new/x":      "home/ann/new/x",
		"/home/ann/inside/x":   "home/ann/own/x",
		"/home/ann/file/x":     "",
		"/home/ann/up/x":       "",
		"/home/ann/absolute/x": "",
		"/home/ann/pipe/x":     "",
		"/var/home/x":          "home/ann/x",
		"/var/home/up/x":       "",
	} {
		t.Run(path, func(t *testing.T) {
			root := makeTree(t)
			folder, name, err := MakeParent(root, path)
			if want == "" {
				if err == nil {
					t.Error("the folder was opened")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = folder.Close() }()
			if err := folder.WriteFile(name, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(filepath.Join(root, want)); err != nil {
				t.Error(err)
			}
		})
	}
}

// Parent creates nothing.
func TestParent(t *testing.T) {
	root := makeTree(t)
	for _, path := range []string{"/new/x", "/etc/new/x", "/home/ann/new/x"} {
		if _, _, err := Parent(root, path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, _, err := Parent(root, "/home/ann/up/x"); err == nil {
		t.Error("a link led out of the folder of another user")
	}
	folder, name, err := Parent(root, "/var/run/x")
	if err != nil || name != "x" || folder.Close() != nil {
		t.Errorf("%q, %v", name, err)
	}
}

// Create and Symlink put new files in the place of planted links.
func TestCreate(t *testing.T) {
	root := makeTree(t)
	victim := filepath.Join(root, "etc/victim")
	err := os.WriteFile(victim, []byte("kept"), 0o600)
	for _, name := range []string{"file.tmp", "link.tmp"} {
		err = errors.Join(err, os.Symlink("../../etc/victim", filepath.Join(root, "home/ann", name)))
	}
	folder, _, openErr := Parent(root, "/home/ann/x")
	if err = errors.Join(err, openErr); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = folder.Close() }()
	file, err := Create(folder, "file.tmp")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(file.Close(), Symlink(folder, "target", "link.tmp", os.Getuid(), os.Getgid())); err != nil {
		t.Fatal(err)
	}
	if target, err := folder.Readlink("link.tmp"); err != nil || target != "target" {
		t.Errorf("the link leads to %q, %v", target, err)
	}
	if info, err := folder.Lstat("file.tmp"); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if data, err := os.ReadFile(victim); err != nil || string(data) != "kept" {
		t.Errorf("the other file became %q, %v", data, err)
	}
}

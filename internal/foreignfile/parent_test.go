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

// The last part of a path can be a link of the caller, and no link of others.
func TestReadPath(t *testing.T) {
	root := makeTree(t)
	for _, file := range []string{"etc/x", "home/ann/own/x"} {
		if err := os.WriteFile(filepath.Join(root, file), []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"var/link": "../etc/x", "var/foreign": "/home/ann/own/x", "var/none": "nothing", "home/ann/link": "own/x", "home/ann/out": "/etc/x"} {
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		"/etc/x":             "etc/x",
		"/var/config/x":      "etc/x",
		"/var/link":          "etc/x",
		"/home/ann/own/x":    "home/ann/own/x",
		"/home/ann/inside/x": "home/ann/own/x",
		"/var/foreign":       "home/ann/own/x",
	} {
		if data, err := ReadPath(root, path, most); err != nil || string(data) != want {
			t.Errorf("%s has %q, %v", path, data, err)
		}
	}
	for path, missing := range map[string]bool{
		"/none": true, "/new/x": true, "/var/none": true, "/home/ann/none": true,
		"/etc": false, "/etc/x/x": false, "/var/ring": false, "/home/ann/link": false, "/home/ann/out": false, "/home/ann/up/x": false, "/home/ann/pipe": false,
	} {
		if data, err := ReadPath(root, path, most); err == nil || errors.Is(err, fs.ErrNotExist) != missing {
			t.Errorf("%s has %q, %v", path, data, err)
		}
	}
}

// Create, Symlink and Mkdir put new files in the place of planted links.
func TestCreate(t *testing.T) {
	root := makeTree(t)
	victim := filepath.Join(root, "etc/victim")
	err := os.WriteFile(victim, []byte("kept"), 0o600)
	for _, name := range []string{"file.tmp", "link.tmp", "folder.tmp"} {
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
	uid, gid := os.Getuid(), os.Getgid()
	if err := errors.Join(file.Close(), Symlink(folder, "target", "link.tmp", uid, gid), Mkdir(folder, "folder.tmp", uid, gid)); err != nil {
		t.Fatal(err)
	}
	if target, err := folder.Readlink("link.tmp"); err != nil || target != "target" {
		t.Errorf("the link leads to %q, %v", target, err)
	}
	for name, want := range map[string]fs.FileMode{"file.tmp": 0o600, "folder.tmp": fs.ModeDir | 0o700} {
		if info, err := folder.Lstat(name); err != nil || info.Mode() != want {
			t.Errorf("%v, %v", info, err)
		}
	}
	if data, err := os.ReadFile(victim); err != nil || string(data) != "kept" {
		t.Errorf("the other file became %q, %v", data, err)
	}
}

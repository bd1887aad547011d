package clearfolder

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestRemove: links are removed and not followed, and a removal can be repeated.
func TestRemove(t *testing.T) {
	dir := t.TempDir()
	precious, folder, link, file := filepath.Join(dir, "precious"), filepath.Join(dir, "folder"), filepath.Join(dir, "link"), filepath.Join(dir, "file")
	must(t, os.MkdirAll(filepath.Join(precious, "inner"), 0o700))
	must(t, os.MkdirAll(filepath.Join(folder, "a", "b"), 0o700))
	must(t, os.Symlink(precious, filepath.Join(folder, "a", "link")))
	must(t, os.Symlink(precious, link))
	must(t, os.WriteFile(file, nil, 0o600))
	for _, path := range []string{folder, link, file} {
		for range 2 {
			must(t, Remove(t.Context(), path, time.Minute))
		}
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s remains: %v", path, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(precious, "inner")); err != nil {
		t.Error("a link was followed")
	}
}

// TestDeep: 700 folders in each other are removed with 300 open files.
func TestDeep(t *testing.T) {
	path := filepath.Join(t.TempDir(), "folder")
	must(t, os.Mkdir(path, 0o700))
	root, err := os.OpenRoot(path)
	must(t, err)
	for range 700 {
		must(t, root.Mkdir("x", 0o700))
		inner, err := root.OpenRoot("x")
		must(t, errors.Join(err, root.Close()))
		root = inner
	}
	must(t, root.Close())
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 300, Max: limit.Max}))
	defer func() { must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)) }()
	must(t, Remove(t.Context(), path, time.Hour))
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder remains: %v", err)
	}
}

// TestEnd: a process that goes on writing holds up the removal for a time only, and its caller can end it.
func TestEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "folder")
	must(t, os.MkdirAll(filepath.Join(path, "x"), 0o700))
	if err := Remove(t.Context(), path, -time.Second); err == nil || !strings.Contains(err.Error(), "the next attempt continues") {
		t.Errorf("found %v, expected the end of the time", err)
	}
	ctx, end := context.WithCancel(t.Context())
	end()
	if err := Remove(ctx, path, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("found %v, expected the end of the context", err)
	}
}

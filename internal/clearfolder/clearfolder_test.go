package clearfolder

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
)

// TestRemove: links are removed and not followed, and a removal can be repeated.
func TestRemove(t *testing.T) {
	dir := t.TempDir()
	precious, folder, link, file := filepath.Join(dir, "precious"), filepath.Join(dir, "folder"), filepath.Join(dir, "link"), filepath.Join(dir, "file")
	expect.NoError(t, os.MkdirAll(filepath.Join(precious, "inner"), 0o700))
	expect.NoError(t, os.MkdirAll(filepath.Join(folder, "a", "b"), 0o700))
	expect.NoError(t, os.Symlink(precious, filepath.Join(folder, "a", "link")))
	expect.NoError(t, os.Symlink(precious, link))
	expect.NoError(t, os.WriteFile(file, nil, 0o600))
	for _, path := range []string{folder, link, file} {
		for range 2 {
			expect.NoError(t, Remove(t.Context(), path, time.Minute))
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
	expect.NoError(t, os.Mkdir(path, 0o700))
	root, err := os.OpenRoot(path)
	expect.NoError(t, err)
	for range 700 {
		expect.NoError(t, root.Mkdir("x", 0o700))
		inner, err := root.OpenRoot("x")
		expect.NoError(t, errors.Join(err, root.Close()))
		root = inner
	}
	expect.NoError(t, root.Close())
	var limit unix.Rlimit
	expect.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	expect.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 300, Max: limit.Max}))
	defer func() { expect.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)) }()
	expect.NoError(t, Remove(t.Context(), path, time.Hour))
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder remains: %v", err)
	}
}

// TestEnd: a process that goes on writing holds up the removal for a time only, and its caller can end it.
func TestEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "folder")
	expect.NoError(t, os.MkdirAll(filepath.Join(path, "x"), 0o700))
	if err := Remove(t.Context(), path, -time.Second); err == nil || !strings.Contains(err.Error(), "the next attempt continues") {
		t.Errorf("found %v, expected the end of the time", err)
	}
	ctx, end := context.WithCancel(t.Context())
	end()
	if err := Remove(ctx, path, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("found %v, expected the end of the context", err)
	}
}

// TestAttributes: files and folders with the attributes i and a of chattr(1) are removed, at any depth.
func TestAttributes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "folder")
	deep := filepath.Join(path, strings.Repeat("x/", maxDepth+1))
	expect.NoError(t, os.MkdirAll(filepath.Join(deep, "inner"), 0o700))
	expect.NoError(t, os.WriteFile(filepath.Join(path, "file"), nil, 0o600))
	for _, fixed := range []string{filepath.Join(deep, "inner"), deep, filepath.Dir(deep), filepath.Join(path, "file"), filepath.Join(path, "x")} {
		if out, err := exec.CommandContext(t.Context(), "chattr", "+ia", fixed).CombinedOutput(); err != nil {
			t.Logf("without attributes: %s", out)
		}
	}
	t.Cleanup(func() { _ = exec.CommandContext(context.Background(), "chattr", "-R", "-ia", path).Run() })
	expect.NoError(t, Remove(t.Context(), path, time.Minute))
}

// TestOneFileStays: a file that cannot be removed does not keep the others.
func TestOneFileStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "folder")
	for i := range 20 {
		expect.NoError(t, os.MkdirAll(filepath.Join(path, fmt.Sprint(i), "x"), 0o700))
		expect.NoError(t, os.MkdirAll(filepath.Join(path, "10", fmt.Sprint(i)), 0o700))
	}
	busy := filepath.Join(path, "10", "10")
	expect.NoError(t, unix.Mount("tmpfs", busy, "tmpfs", 0, "size=16k"))
	t.Cleanup(func() { expect.NoError(t, unix.Unmount(busy, 0)) })
	if err := Remove(t.Context(), path, time.Minute); !errors.Is(err, unix.EBUSY) {
		t.Errorf("found %v, expected that a mount is busy", err)
	}
	for pattern, want := range map[string]string{"*": filepath.Dir(busy), "*/*": busy} {
		if left, err := filepath.Glob(filepath.Join(path, pattern)); err != nil || !slices.Equal(left, []string{want}) {
			t.Errorf("left: %v, %v", left, err)
		}
	}
}

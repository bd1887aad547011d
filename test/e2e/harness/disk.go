//go:build e2e

package harness

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Disk makes a small disk for a test and returns where it is mounted, and what makes writes to it fail and work again.
type Disk func(t *testing.T, megabytes string) (dir string, fail, mend func())

// Disks fail in different ways.
var Disks = map[string]Disk{"no space": noSpace, "I/O errors": ioErrors}

// noSpace is a tmpfs: writes fail with ENOSPC.
func noSpace(t *testing.T, megabytes string) (dir string, fail, mend func()) {
	t.Helper()
	dir = t.TempDir()
	mount(t, dir, "-t", "tmpfs", "-o", "mode=755,size="+megabytes+"m", "tmpfs")
	fail, mend = filler(dir)
	return dir, fail, mend
}

// ioErrors is a loop device over a sparse file whose own disk gets full: the device cannot write and reports EIO. Without
// a journal the file system works again when the device does.
func ioErrors(t *testing.T, megabytes string) (dir string, fail, mend func()) {
	t.Helper()
	below := t.TempDir()
	mount(t, below, "-t", "tmpfs", "-o", "size="+megabytes+"m", "tmpfs")
	image := filepath.Join(below, "image")
	command(t, "truncate", "-s", "1G", image)
	command(t, "mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=1", image)
	// The file system's own tables are at the beginning. They must stay writable: without a journal, a lost update of them loses
	// data that fsync has confirmed, which no etcd can survive.
	command(t, "fallocate", "-l", "32M", image)
	dir = t.TempDir()
	mount(t, dir, "-o", "loop,errors=continue", image)
	fail, mend = filler(below)
	return dir, fail, mend
}

func mount(t *testing.T, dir string, args ...string) {
	t.Helper()
	command(t, "mount", append(args, dir)...)
	t.Cleanup(func() { command(t, "umount", dir) })
}

func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
}

// filler fills a file system to the last byte.
func filler(dir string) (fail, mend func()) {
	file := filepath.Join(dir, "filler")
	fill := "cat /dev/zero > " + file + "; sync " + file // it ends with an error, as it is to
	return func() { _ = exec.Command("sh", "-c", fill).Run() }, func() { _ = os.Remove(file) }
}

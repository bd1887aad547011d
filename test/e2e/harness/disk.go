//go:build e2e

package harness

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Disk creates a small disk for a test. It returns the mount point, and functions that make writes fail and succeed
// again.
type Disk func(t *testing.T, megabytes string) (dir string, fail, mend func())

// Disks can fail in different ways.
var Disks = map[string]Disk{"no space": noSpace, "I/O errors": ioErrors}

// noSpace is a tmpfs. Its writes fail with ENOSPC.
func noSpace(t *testing.T, megabytes string) (dir string, fail, mend func()) {
	t.Helper()
	dir = t.TempDir()
	mount(t, dir, "-t", "tmpfs", "-o", "mode=755,size="+megabytes+"m", "tmpfs")
	fail, mend = filler(dir)
	return dir, fail, mend
}

// ioErrors is a loop device over a sparse file on a disk without space. The device cannot write and returns EIO. The
// file system has no journal, so it works again as soon as the device does.
func ioErrors(t *testing.T, megabytes string) (dir string, fail, mend func()) {
	t.Helper()
	below := t.TempDir()
	mount(t, below, "-t", "tmpfs", "-o", "size="+megabytes+"m", "tmpfs")
	image := filepath.Join(below, "image")
	command(t, "truncate", "-s", "1G", image)
	command(t, "mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=1", image)
	// The tables of the file system are at its start. They must stay writable: without a journal, a lost update of them
	// loses data that fsync has confirmed, and etcd cannot survive that.
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

// filler fills a file system completely.
func filler(dir string) (fail, mend func()) {
	file := filepath.Join(dir, "filler")
	fill := "cat /dev/zero > " + file + "; sync " + file // The command must end with an error.
	return func() { _ = exec.Command("sh", "-c", fill).Run() }, func() { _ = os.Remove(file) }
}

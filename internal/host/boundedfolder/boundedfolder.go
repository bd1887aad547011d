// Package boundedfolder makes folders that a less privileged process shares with capstand: root in a machine, or a balancer. Each is a file
// system of its own in memory (tmpfs), with a size and a number of files, so its users cannot fill the disk or the memory of the host. It
// is a mount: it outlives capstand, and ends with Unmount or with the boot.
//
// Layer: host. Allowed imports: api, library, contract.
package boundedfolder

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Limits of a folder.
type Limits struct {
	// Bytes of all files.
	Bytes int64
	// Files, folders and links together.
	Files int
}

// Make creates an empty folder that only its owner can use. Nothing exists at the path.
func Make(path string, owner int, limits Limits) error {
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	options := fmt.Sprintf("mode=0700,uid=%d,gid=%d,size=%d,nr_inodes=%d", owner, owner, limits.Bytes, limits.Files)
	if err := unix.Mount("capstan", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
		return errors.Join(fmt.Errorf("mounting a tmpfs on %s: %w", path, err), os.Remove(path))
	}
	return nil
}

// Unmount ends the file system, and leaves the folder. Processes that still use the file system keep it until they end. A folder without one
// is no error: an earlier capstand made it, or the box was started again.
func Unmount(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		switch {
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		case err != nil:
			return fmt.Errorf("unmounting %s: %w", path, err)
		}
	}
}

// Package hostmount opens folders and files of the host that machines mount, so that no path can lead elsewhere between the check
// and the mount. A machine with a writable mount can create symbolic links in it at any time.
//
// Layer: host. Allowed imports: api, library, contract.
package hostmount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Open opens a folder or regular file for a mount. No part of the path may be a symbolic link. own are the folders of capstand: a
// source that is in one of them, or contains one, is refused. The descriptor gives no access to the content by itself.
func Open(source string, own ...string) (*os.File, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, source, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
	switch {
	case errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("expected a path without symbolic links, found one in %s: name the folder itself, as `realpath` prints it", source)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return nil, fmt.Errorf("expected a folder or file %s on the host, found none: create it", source)
	case errors.Is(err, unix.ENOSYS):
		return nil, fmt.Errorf("mounts of the host need Linux 5.6 or later, because of openat2: %w", err)
	case err != nil:
		return nil, fmt.Errorf("opening %s: %w", source, err)
	}
	file := os.NewFile(uintptr(fd), source)
	if err := check(file, own); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Stage creates a path and mounts an open folder or file there. A change of the file's own path has no effect. The kernel refuses the
// mount of a descriptor in another mount namespace, so runc needs a path, and only capstand can change this one. The mount is
// read-only: if files above it are removed after a crash, no file of the host is removed.
func Stage(file *os.File, at string) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(at, 0o700)
	} else {
		err = errors.Join(os.MkdirAll(filepath.Dir(at), 0o700), os.WriteFile(at, nil, 0o600))
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", file.Fd()), at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting %s: %w", file.Name(), err)
	}
	return errors.Join(unix.Mount("", at, "", unix.MS_PRIVATE, ""),
		unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""))
}

// Unstage removes all mounts of Stage in a folder, and the folder. A folder that does not exist is no error. It removes no content.
func Unstage(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		for err = nil; err == nil; { // until nothing is mounted there
			err = unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		}
		if !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmounting %s: %w", path, err)
		}
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	return os.Remove(dir)
}

func check(file *os.File, own []string) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		return fmt.Errorf("expected a folder or a regular file, found %s with mode %s: a device belongs into spec.devices", file.Name(), info.Mode())
	}
	for _, folder := range own {
		if folder == "" {
			continue
		}
		if overlap(file.Name(), info, folder) {
			return fmt.Errorf("%s contains files of capstand, or is among them (%s): no machine can mount it", file.Name(), folder)
		}
	}
	return nil
}

// overlap returns whether one of two folders contains the other. It compares files and not names, because folder may be reached
// through symbolic links and other mounts.
func overlap(source string, info os.FileInfo, folder string) bool {
	own, err := os.Stat(folder)
	return among(parents(folder), info) || err == nil && among(parents(source), own)
}

// among returns whether one of the paths is the file.
func among(paths []string, file os.FileInfo) bool {
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil && os.SameFile(info, file) {
			return true
		}
	}
	return false
}

// parents returns the path without symbolic links, and the folders that contain it, without the root.
func parents(path string) (out []string) {
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		path = resolved
	}
	for ; path != "/" && path != "."; path = filepath.Dir(path) {
		out = append(out, path)
	}
	return out
}

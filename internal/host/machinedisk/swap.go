package machinedisk

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/clearfolder"
)

// endSwap ends the use of the swap files of a mounted file system: root in the machine can have begun it with swapon(8), and the kernel would keep
// the loop device.
func (d Disk) endSwap() error {
	if mounted, err := d.Mounted(); err != nil || !mounted {
		return err
	}
	swaps, err := swapFiles()
	if err != nil || len(swaps) == 0 {
		return err
	}
	root, err := os.OpenRoot(d.Dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	for _, swap := range swaps {
		// The kernel prints the path in the mount namespace that used the file.
		err = errors.Join(err, endSwapOf(root, strings.Trim(strings.TrimPrefix(swap.path, d.Dir), "/")))
	}
	return err
}

// swapFile is a file that the kernel uses for swap. The file has more than size bytes.
type swapFile struct {
	path string
	size int64
}

// swapFiles returns the swap files of the host and of all machines.
func swapFiles() (files []swapFile, err error) {
	swaps, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return nil, atomicfile.IgnoreMissing(err) // The kernel has no swap.
	}
	for line := range strings.Lines(string(swaps)) {
		path, rest, _ := strings.Cut(line, " ")
		fields := strings.Fields(rest)
		if len(fields) < 2 || fields[0] != "file" {
			continue
		}
		kibibytes, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("reading /proc/swaps: %w", err)
		}
		files = append(files, swapFile{unescape.Replace(path), kibibytes << 10})
	}
	return files, nil
}

// unescape decodes the characters that the kernel escapes in the paths of /proc/swaps.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// endSwapOf ends the use of a swap file if root has it. A swap file of the host can have the same name.
func endSwapOf(root *os.Root, name string) error {
	info, err := root.Lstat(name)
	if err != nil || !info.Mode().IsRegular() {
		return nil //nolint:nilerr // The swap file is in another file system.
	}
	file, err := root.Open(name)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	return swapOff(file)
}

// swapOff ends the use of a file for swap. It does nothing if the kernel does not use the file.
func swapOff(file *os.File) error {
	path := fmt.Sprintf("/proc/self/fd/%d", file.Fd()) // No link of the machine leads it elsewhere.
	errno := swapOffPath(path)
	if errno == unix.EPERM { // The kernel opens the file for writing.
		if change, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0); err == nil {
			_ = clearfolder.MakeChangeable(change)
			_ = change.Close()
		}
		errno = swapOffPath(path)
	}
	if errno != 0 && errno != unix.EINVAL {
		return fmt.Errorf("ending the use of the swap file %q of the machine: %w", file.Name(), errno)
	}
	return nil
}

func swapOffPath(name string) unix.Errno {
	path, err := unix.BytePtrFromString(name)
	if err != nil {
		return unix.EINVAL
	}
	_, _, errno := unix.Syscall(unix.SYS_SWAPOFF, uintptr(unsafe.Pointer(path)), 0, 0) //nolint:gosec // The kernel reads the path.
	return errno
}

// endHiddenSwap ends the use of swap files of an unmounted file system that endSwap has not found: the kernel prints the path in the mount that
// was used, which can be another folder or a single file. It mounts the file system again, which the kernel keeps because of these files.
func (d Disk) endHiddenSwap(ctx context.Context) error {
	swaps, err := swapFiles()
	if err != nil || len(swaps) == 0 {
		return err
	}
	if err := d.Attach(ctx); err != nil {
		return err
	}
	smallest := slices.MinFunc(swaps, func(a, b swapFile) int { return cmp.Compare(a.size, b.size) }).size
	err = d.eachInode(ctx, func(file *os.File) error {
		if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() || info.Size() <= smallest {
			return nil //nolint:nilerr // It is no swap file.
		}
		return swapOff(file)
	})
	return errors.Join(err, unix.Unmount(d.Dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
}

const (
	// firstInode is the first one that is not reserved.
	firstInode = 11
	// handleOfInode is FILEID_INO32_GEN of the kernel: the number of an inode and its generation, of which 0 means any.
	handleOfInode = 1
)

// eachInode calls f with each file of the mounted file system, until an error. The files give no access to content. Folders of any depth cannot
// make it slow, unlike a walk.
func (d Disk) eachInode(ctx context.Context, f func(*os.File) error) error {
	count, err := d.superblock(inodeCount)
	if err != nil {
		return err
	}
	dir, err := os.Open(d.Dir)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	for inode := uint32(firstInode); inode <= count && err == nil && ctx.Err() == nil; inode++ {
		handle := append(binary.NativeEndian.AppendUint32(nil, inode), 0, 0, 0, 0)
		fd, openErr := unix.OpenByHandleAt(int(dir.Fd()), unix.NewFileHandle(handleOfInode, handle), unix.O_PATH|unix.O_CLOEXEC)
		if openErr != nil {
			continue // There is no such file.
		}
		file := os.NewFile(uintptr(fd), fmt.Sprintf("%s, inode %d", d.Image, inode))
		err = errors.Join(f(file), file.Close())
	}
	return errors.Join(err, ctx.Err())
}

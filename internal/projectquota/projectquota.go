// Package projectquota limits the space and the files of folders with the project quotas of a file system. A folder has a project
// id, which its new files and folders inherit, and the file system has a limit for each id.
//
// Functions take an open file, because a path can change meanwhile.
//
// Layer: library. Allowed imports: api.
package projectquota

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Constants of linux/fs.h and linux/quota.h that the package unix lacks.
const (
	// SetAttributes is the ioctl FS_IOC_FSSETXATTR, which changes the project id of a file.
	SetAttributes = 0x401c5820
	getAttributes = 0x801c581f // FS_IOC_FSGETXATTR

	inherit = 0x200 // FS_XFLAG_PROJINHERIT

	projectQuotas = 2                   // PRJQUOTA
	getState      = uint('X')<<8 | 0x08 // Q_XGETQSTATV
	getQuota      = 0x800007            // Q_GETQUOTA
	setQuota      = 0x800008            // Q_SETQUOTA
	enforced      = 1 << 5              // FS_QUOTA_PDQ_ENFD
	bothLimits    = 1 | 4               // QIF_BLIMITS and QIF_ILIMITS

	blockSize = 1024 // of limits, in bytes
)

// attributes is struct fsxattr.
type attributes struct {
	Flags, ExtentSize, Extents, Project, CowExtentSize uint32
	_                                                  [8]byte
}

// Quota contains the space and the files that a project id uses, and their limits. 0 means no limit.
type Quota struct {
	Bytes, Files       uint64
	MaxBytes, MaxFiles uint64
}

// dqblk is struct if_dqblk.
type dqblk struct {
	BlockHard, BlockSoft, Space    uint64
	InodeHard, InodeSoft, Inodes   uint64
	BlockGraceTime, InodeGraceTime uint64
	Valid                          uint32
	_                              uint32
}

// state is struct fs_quota_statv.
type state struct {
	Version int8
	_       uint8
	Flags   uint16
	_       [252]byte // The kernel writes less.
}

// rootInode is the inode of the top folder of an ext4 file system.
const rootInode = 2

// ErrNone means that a disk enforces no limits of projects. Other errors say nothing about the limits.
var ErrNone = errors.New("no limits of projects")

// Own returns nil if a folder is on the disk whose top folder is top, and the disk enforces limits of projects. It returns ErrNone if top
// is a folder on a larger disk, for example that of a host: others give out project ids there too.
func Own(top, folder string) error {
	f, err := os.Open(folder)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	var whole, part unix.Stat_t
	if err := errors.Join(unix.Stat(top, &whole), unix.Fstat(int(f.Fd()), &part)); err != nil {
		return err
	}
	if whole.Ino != rootInode || whole.Dev != part.Dev {
		return fmt.Errorf("%w: the folder %s is not on a disk of its own with the top folder %s", ErrNone, folder, top)
	}
	return Enforced(int(f.Fd()))
}

// Enforced returns nil if the file system of a file or mount enforces limits of projects, and ErrNone if it does not.
func Enforced(fd int) error {
	s := state{Version: 1}
	return enforces(s.Flags, quotactl(fd, getState, 0, unsafe.Pointer(&s))) //nolint:gosec // The kernel writes the struct.
}

// enforces decides about the answer of the kernel to getState: the flags, or an error. ENOSYS is the answer of a kernel or a file system
// without quotas, EINVAL that of a file system without quotas of projects, and ESRCH that of one whose quotas are off.
func enforces(flags uint16, err error) error {
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ESRCH):
		return fmt.Errorf("%w: the file system has no project quotas: %w", ErrNone, err)
	case err != nil:
		return fmt.Errorf("reading the state of the project quotas: %w", err)
	case flags&enforced == 0:
		return fmt.Errorf("%w: the file system does not enforce project quotas (state %#x)", ErrNone, flags)
	}
	return nil
}

// ID returns the project id of a file or folder, 0 if it has none.
func ID(f *os.File) (uint32, error) {
	a, err := get(f)
	return a.Project, err
}

func get(f *os.File) (a attributes, err error) {
	if err := ioctl(f, getAttributes, &a); err != nil {
		return a, fmt.Errorf("reading the project of %s: %w", f.Name(), err)
	}
	return a, nil
}

// SetID gives a folder a project id that its new files and folders inherit.
func SetID(folder *os.File, id uint32) error {
	a, err := get(folder)
	if err != nil {
		return err
	}
	a.Project, a.Flags = id, a.Flags|inherit
	if err := ioctl(folder, SetAttributes, &a); err != nil {
		return fmt.Errorf("setting the project of %s: %w", folder.Name(), err)
	}
	return nil
}

// Get returns the use and the limits of a project id in the file system of f.
func Get(f *os.File, id uint32) (Quota, error) {
	var q dqblk
	if err := quotactl(int(f.Fd()), getQuota, id, unsafe.Pointer(&q)); err != nil { //nolint:gosec // The kernel writes the struct.
		return Quota{}, fmt.Errorf("reading the limits of the project %d: %w", id, err)
	}
	return Quota{Bytes: q.Space, Files: q.Inodes, MaxBytes: q.BlockHard * blockSize, MaxFiles: q.InodeHard}, nil
}

// Limit sets the hard limits of a project id in the file system of f. 0 means no limit.
func Limit(f *os.File, id uint32, maxBytes, maxFiles uint64) error {
	q := dqblk{BlockHard: maxBytes/blockSize + min(1, maxBytes%blockSize), InodeHard: maxFiles, Valid: bothLimits}
	if err := quotactl(int(f.Fd()), setQuota, id, unsafe.Pointer(&q)); err != nil { //nolint:gosec // The kernel reads the struct.
		return fmt.Errorf("limiting the project %d to %d bytes and %d files: %w", id, maxBytes, maxFiles, err)
	}
	return nil
}

// quotactl is the system call quotactl_fd of Linux 5.14, which needs no path of a device: machines do not have that of their disk.
func quotactl(fd int, command uint, id uint32, data unsafe.Pointer) error {
	if _, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, uintptr(fd), uintptr(command<<8|projectQuotas), uintptr(id), uintptr(data), 0, 0); errno != 0 {
		return errno
	}
	return nil
}

func ioctl(f *os.File, command uintptr, a *attributes) error {
	//nolint:gosec // The kernel reads and writes the struct.
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), command, uintptr(unsafe.Pointer(a))); errno != 0 {
		return errno
	}
	return nil
}

// Package machinedisk gives each machine a disk of a fixed size: an ext4 file system in a sparse file of the host, on a loop
// device. The file occupies only the blocks that the machine has written, and blocks that the machine frees return to the host.
//
// Every step can be repeated after a crash. An image has its name only when it is complete. The kernel releases a loop device
// when its last user is gone (autoclear), so a process that ends between two steps leaves no device behind.
//
// Layer: host. Allowed imports: api, library, contract.
package machinedisk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
)

// MinBytes is the smallest size that an ext4 file system with a journal works with. The API's minimum is larger.
const MinBytes = 16 << 20

// blockSize of the file system and of the loop device, in bytes. A loop device with the block size of the file system can use
// direct I/O on disks with sectors of any size.
const blockSize = 4096

// Disk is the disk of one machine.
type Disk struct {
	// Image is the path of the file that contains the file system.
	Image string
	// Dir is the folder where the file system is mounted.
	Dir string
	// Preallocate makes the image occupy its full size from the start. Blocks that the machine frees stay reserved for it.
	Preallocate bool
	// Quotas gives a new disk project quotas. The kernel mounts it only if ProbeQuotas finds no error.
	Quotas bool
	// Checking is called when the check of an Attach takes longer than usual: it can take hours. nil does nothing.
	Checking func()
	// Releasing is called before an Attach unmounts a file system that reported errors: open files would keep it in use. nil does nothing.
	Releasing func()
}

// Probe returns nil if this host can create and attach disks, otherwise an error with the remedy.
func Probe() error {
	for _, tool := range []string{"mkfs.ext4", "e2fsck", "resize2fs"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w: install e2fsprogs", err)
		}
	}
	control, err := openControl()
	if err != nil {
		return err
	}
	return control.Close()
}

// Exists reports whether the disk was created.
func (d Disk) Exists() bool { return atomicfile.Exists(d.Image) }

// Create makes the image with an empty file system of size bytes, unless it exists.
func (d Disk) Create(ctx context.Context, size int64) error {
	if d.Exists() {
		return nil
	}
	unfinished := d.Image + ".new"
	if err := d.newFile(unfinished, size/blockSize*blockSize); err != nil {
		return errors.Join(err, os.RemoveAll(unfinished))
	}
	// The inode tables and the journal of a new sparse file are zero already. No blocks are reserved for root: the kubelet
	// evicts before the file system is full.
	features, extended := "has_journal", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"
	if d.Quotas {
		features, extended = features+","+quotaFeatures, extended+","+quotaType
	}
	err := run(ctx, "mkfs.ext4", "-q", "-F", "-b", fmt.Sprint(blockSize), "-m", "0", "-O", features, "-E", extended, unfinished)
	if err = errors.Join(err, syncFile(unfinished)); err != nil {
		return errors.Join(err, os.Remove(unfinished))
	}
	return atomicfile.Rename(unfinished, d.Image)
}

func (d Disk) newFile(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = f.Truncate(size)
	if err == nil && d.Preallocate {
		if err = unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
			err = fmt.Errorf("reserving %d bytes for the disk %s: %w", size, d.Image, err)
		}
	}
	return errors.Join(err, f.Close())
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// releaseTimeout bounds the wait for the loop device of a file system that is unmounted for its repair.
const releaseTimeout = time.Minute

// Attach mounts the file system at Dir. It does nothing when the file system is mounted there and works. A file system that
// reported errors is unmounted, checked and mounted again: nothing may use it. The check of a large file system can take hours, and
// one that ctx ends begins again at the next Attach: ctx needs no deadline.
func (d Disk) Attach(ctx context.Context) error {
	device, err := d.mounted()
	if err != nil {
		return err
	}
	if device != "" {
		if count, err := errorsOf(device); err == nil && count == 0 {
			return nil
		}
		if d.Releasing != nil {
			d.Releasing()
		}
		release, cancel := context.WithTimeout(ctx, releaseTimeout)
		defer cancel()
		if err := d.Detach(release); err != nil {
			return err
		}
	}
	loop, err := d.loop(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = loop.Close() }()
	if err := os.MkdirAll(d.Dir, 0o755); err != nil {
		return err
	}
	// The inode tables of a new sparse file need no initialization in the background. Lost data is an error of the file system.
	options := "noinit_itable,errors=remount-ro,data_err=abort"
	if !d.Preallocate {
		options += ",discard" // Freed blocks return to the host.
	}
	quotas, err := d.hasQuotas()
	if err != nil {
		return err
	}
	hint := ""
	if quotas {
		options += ",prjquota"
		hint = "; it has project quotas, which need a kernel with CONFIG_QUOTA and CONFIG_QFMT_V2 (module quota_v2)"
	}
	if err := unix.Mount(loop.Name(), d.Dir, "ext4", 0, options); err != nil {
		return fmt.Errorf("mounting the disk %s on %s: %w; the kernel's log has the cause%s", d.Image, loop.Name(), err, hint)
	}
	return nil
}

// loop returns the loop device of the image: the one that has it already, or else a new one, after a check of the file system.
func (d Disk) loop(ctx context.Context) (*os.File, error) {
	if loop, err := findLoop(d.Image); err != nil || loop != nil {
		return loop, err
	}
	if err := d.check(ctx); err != nil {
		return nil, err
	}
	return newLoop(d.Image)
}

// slowCheck is the time after which a check takes longer than usual.
const slowCheck = time.Second

// check repairs the file system as a boot would do. It takes a few milliseconds when the file system needs no repair.
func (d Disk) check(ctx context.Context) error {
	ended := make(chan struct{})
	var notice sync.WaitGroup
	notice.Go(func() {
		select {
		case <-ended:
		case <-time.After(slowCheck):
			if d.Checking != nil {
				d.Checking()
			}
		}
	})
	err := run(ctx, "e2fsck", "-p", d.Image)
	close(ended)
	notice.Wait()
	return checkResult(err)
}

// Exit codes of e2fsck are bits. Errors that it has corrected are no failure. It ends with fsckCanceled after a signal that it handles.
const (
	fsckCorrected = 1
	fsckCanceled  = 32
)

// checkResult distinguishes a damaged file system from a check that did not come to its end, after which the file system can be intact.
func checkResult(err error) error {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &exit):
		return fmt.Errorf("the file system of the disk was not checked: %w", err)
	case !exit.Exited() || exit.ExitCode()&fsckCanceled != 0:
		return fmt.Errorf("the check of the file system of the disk was ended by a signal, and begins again with the next start: %w", err)
	case exit.ExitCode()&^fsckCorrected == 0:
		return nil
	}
	return fmt.Errorf("the disk is damaged and cannot be repaired automatically: %w", err)
}

// Grow makes the attached disk size bytes large while it is in use. It can be repeated, and never makes a disk smaller. It needs
// CAP_SYS_RESOURCE.
func (d Disk) Grow(ctx context.Context, size int64) error {
	size = size / blockSize * blockSize
	if err := d.growFile(size); err != nil {
		return err
	}
	device, err := d.mounted()
	if err != nil {
		return err
	}
	if device == "" {
		return fmt.Errorf("no disk is mounted at %s", d.Dir)
	}
	loop, err := os.OpenFile("/dev/"+device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = loop.Close() }()
	if err := unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return fmt.Errorf("%s does not accept the new size of its file: %w", loop.Name(), err)
	}
	// resize2fs enlarges a mounted file system to the size of its device, and does nothing if it has that size.
	if err := run(ctx, "resize2fs", loop.Name()); err != nil {
		return fmt.Errorf("enlarging the file system of %s: %w", d.Image, err)
	}
	return nil
}

// growFile makes the image at least size bytes large. After an error it has its former size: a part of the growth would fill the disk of the host.
func (d Disk) growFile(size int64) error {
	f, err := os.OpenFile(d.Image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && info.Size() < size {
		if d.Preallocate {
			err = unix.Fallocate(int(f.Fd()), 0, info.Size(), size-info.Size())
		} else {
			err = f.Truncate(size)
		}
		if err != nil {
			err = errors.Join(err, f.Truncate(info.Size()))
		}
		err = errors.Join(err, f.Sync())
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("reserving %d bytes for the disk %s: %w", size, d.Image, err)
	}
	return nil
}

// fithaw is the request FITHAW of ioctl(2).
const fithaw = 0xc0045878

// Thaw lets the writers of a file system continue that root in the machine has frozen, for example with fsfreeze(8). The kernel kills no
// process that waits for the thaw, and keeps a frozen file system after its unmount.
func (d Disk) Thaw() error {
	// An unmounted folder belongs to the file system of the host, which its administrator may have frozen.
	if mounted, err := d.Mounted(); err != nil || !mounted {
		return err
	}
	dir, err := os.Open(d.Dir)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	if err := unix.IoctlSetInt(int(dir.Fd()), fithaw, 0); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: it is not frozen.
		return fmt.Errorf("thawing the file system at %s: %w", d.Dir, err)
	}
	return nil
}

// Detach unmounts the file system and waits until its loop device is released.
func (d Disk) Detach(ctx context.Context) error {
	if err := d.Thaw(); err != nil {
		return err
	}
	// A lazy unmount works even if a process still reads a file of the disk. After an error of the swap files, it would hide them from the next
	// attempt. Such an error concerns the disk only if the kernel uses one of its files: a swap file of the host can have the same name.
	swapErr, flags := d.endSwap(), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW
	if swapErr != nil {
		flags = unix.UMOUNT_NOFOLLOW
	}
	for {
		err := unix.Unmount(d.Dir, flags)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		if err != nil {
			return errors.Join(swapErr, fmt.Errorf("unmounting %s: %w", d.Dir, err))
		}
	}
	for {
		loop, err := findLoop(d.Image)
		if err != nil || loop == nil {
			return err
		}
		name := loop.Name()
		_ = loop.Close()
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s of the disk %s is still in use: end the use of its swap files, its other mounts and its open files: %w", name, d.Image, ctx.Err())
		case <-time.After(10 * time.Millisecond): // The kernel has no event for it.
		}
	}
}

// Mounted reports whether a file system is mounted at Dir.
func (d Disk) Mounted() (bool, error) {
	device, err := d.mounted()
	return device != "", err
}

// mounted returns the name of the loop device that is mounted at Dir, for example loop3; empty when none is.
func (d Disk) mounted() (string, error) {
	dir, err := filepath.EvalSymlinks(d.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(dir))
	if err != nil || len(mounts) == 0 {
		return "", err
	}
	return strings.TrimPrefix(mounts[0].Source, "/dev/"), nil
}

// run runs a program, which ends with ctx and with capstand: the next capstand would run a second one on the same disk. The kernel ends
// it when the thread that started it ends, so the thread has to wait.
func run(ctx context.Context, name string, args ...string) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("%w: install e2fsprogs", err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, strings.Join(strings.Fields(string(out)), " "))
	}
	return nil
}

// Space returns the size of the file system that contains dir, and the part of it that is free, in bytes.
func Space(dir string) (total, free int64, err error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, 0, fmt.Errorf("space of %s: %w", dir, err)
	}
	return int64(s.Blocks) * s.Bsize, int64(s.Bavail) * s.Bsize, nil
}

package localvolume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/clearfolder"
	"capstan.dev/capstan/internal/machineapi"
)

// Folders are the folders of the volumes in the folder Dir. Only root can enter that folder. Every operation can be repeated.
type Folders struct {
	Dir string
	// Top is the top folder of the machine's disk.
	Top string
}

// OfMachine are the folders of volumes of this machine. Blocks are those of its block volumes, whose content no pod can write.
var (
	OfMachine = Folders{Dir: Root, Top: "/"}
	Blocks    = Folders{Dir: machineapi.BlockVolumesFolder, Top: "/"}
)

// Disk returns the size of the disk.
func (f Folders) Disk() (Disk, error) {
	if err := os.MkdirAll(f.Dir, 0o700); err != nil {
		return Disk{}, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(f.Dir, &fs); err != nil {
		return Disk{}, fmt.Errorf("reading the size of the disk of %s: %w", f.Dir, err)
	}
	return Disk{Total: int64(fs.Blocks) * fs.Bsize, Free: int64(fs.Bavail) * fs.Bsize}, nil
}

// Unwritten returns the bytes that the volumes can still fill, so that no other volume may have them. Volumes without enforced sizes have
// none.
func (f Folders) Unwritten(block bool) (sum int64, err error) {
	entries, err := os.ReadDir(f.Dir)
	for _, entry := range entries {
		if checkName(entry.Name()) != nil {
			continue
		}
		size, written, err := f.use(entry.Name(), block)
		switch {
		case errors.Is(err, os.ErrNotExist): // It was removed meanwhile, or is not complete.
		case err != nil:
			return 0, err
		default:
			sum += max(0, size-written)
		}
	}
	return sum, atomicfile.IgnoreMissing(err)
}

// Taken returns the bytes that a volume has written or can still fill. It returns 0 for a volume that does not exist.
func (f Folders) Taken(name string, block bool) (int64, error) {
	if err := checkName(name); err != nil {
		return 0, err
	}
	size, written, err := f.use(name, block)
	return max(size, written), atomicfile.IgnoreMissing(err)
}

// use returns the size of a volume and the part of it that occupies the disk.
func (f Folders) use(name string, block bool) (size, written int64, err error) {
	path := filepath.Join(f.Dir, name)
	if block {
		var image unix.Stat_t
		err := unix.Lstat(filepath.Join(path, imageName), &image)
		return image.Size, image.Blocks * 512, err
	}
	var disk, volume unix.Statfs_t
	if err := errors.Join(unix.Statfs(f.Dir, &disk), unix.Statfs(path, &volume)); err != nil {
		return 0, 0, err
	}
	if volume.Blocks == disk.Blocks { // The folder has no limits.
		return 0, 0, nil
	}
	return int64(volume.Blocks) * volume.Bsize, int64(volume.Blocks-volume.Bfree) * volume.Bsize, nil
}

// Create creates the folder of a volume. Pods of every user can write to it.
func (f Folders) Create(name string) error {
	root, err := f.open(name)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	if err := root.Mkdir(name, 0o777); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	info, err := root.Lstat(name)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("expected the folder %s, found another file; remove it", filepath.Join(f.Dir, name))
	}
	return root.Chmod(name, 0o777) // the process has a umask
}

// unfinished is the end of the names of the files of Begin.
const unfinished = ".unfinished"

// Begin records that a volume is about to have data, but no PersistentVolume, until End. The record outlives the process.
func (f Folders) Begin(name string) error {
	root, err := f.open(name)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	record, err := root.OpenFile(name+unfinished, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return record.Close()
}

// End ends what Begin has recorded.
func (f Folders) End(name string) error {
	root, err := f.open(name)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return atomicfile.IgnoreMissing(root.Remove(name + unfinished))
}

// Unfinished returns the names of the volumes between Begin and End.
func (f Folders) Unfinished() (volumes []string, err error) {
	entries, err := os.ReadDir(f.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, entry := range entries {
		if name, ok := strings.CutSuffix(entry.Name(), unfinished); ok && checkName(name) == nil {
			volumes = append(volumes, name)
		}
	}
	return volumes, nil
}

// imageName is the file in the folder of a block volume that has its data.
const imageName = "disk"

// CreateImage creates the folder of a block volume with its file of size bytes, unless it exists. The blocks of the file are reserved, so
// that a full disk does not refuse writes to the volume, if the file system can reserve blocks. The file has its name only when
// it is complete.
func (f Folders) CreateImage(name string, size int64) error {
	if size <= 0 {
		return fmt.Errorf("expected a size larger than 0, found %d", size)
	}
	if err := f.Create(name); err != nil {
		return err
	}
	root, folder, err := f.openVolume(name)
	if err != nil {
		return err
	}
	defer func() { _, _ = root.Close(), folder.Close() }()
	const incomplete = imageName + ".new"
	at := int(folder.Fd())
	if err := unix.Faccessat(at, imageName, unix.F_OK, unix.AT_SYMLINK_NOFOLLOW); !errors.Is(err, unix.ENOENT) {
		return err
	}
	image, err := openImage(folder, incomplete, unix.O_CREAT|unix.O_TRUNC)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(image.Fd()), 0, 0, size)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = image.Truncate(size)
	}
	if err = errors.Join(err, image.Sync(), image.Close()); err != nil {
		return fmt.Errorf("reserving %d bytes for the volume: %w", size, err)
	}
	if err := unix.Renameat(at, incomplete, at, imageName); err != nil {
		return err
	}
	return unix.Syncfs(at)
}

// OpenImage opens the file of a block volume.
func (f Folders) OpenImage(name string) (*os.File, error) {
	root, folder, err := f.openVolume(name)
	if err != nil {
		return nil, err
	}
	defer func() { _, _ = root.Close(), folder.Close() }()
	return openImage(folder, imageName, 0)
}

func openImage(folder *os.File, name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(folder.Fd()), name, flags|unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("the file of the block volume: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Images returns the names of the block volumes.
func (f Folders) Images() ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(f.Dir, "*", imageName))
	var volumes []string
	for _, path := range paths {
		if name := filepath.Base(filepath.Dir(path)); checkName(name) == nil {
			volumes = append(volumes, name)
		}
	}
	return volumes, err
}

// maxEmptying is the time of one attempt to empty a volume. A pod that was deleted with force can still write.
const maxEmptying = time.Minute

// Empty removes the content of a volume, under the conditions of Remove. The folder remains, and with it the project id.
func (f Folders) Empty(name string) error {
	root, err := f.openUnmounted(name)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	if info, err := root.Lstat(name); errors.Is(err, os.ErrNotExist) || err == nil && !info.IsDir() {
		return nil
	}
	volume, err := root.OpenRoot(name)
	if err != nil {
		return err
	}
	return errors.Join(clearfolder.Clear(context.Background(), volume, maxEmptying), volume.Close())
}

// Remove removes the folder of a volume with its content. It follows no symbolic link, and refuses a folder with a mount,
// because the content of the mount belongs to something else.
func (f Folders) Remove(name string) error {
	if err := f.Empty(name); err != nil {
		return err
	}
	root, err := f.openUnmounted(name)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return atomicfile.IgnoreMissing(root.Remove(name))
}

// openUnmounted is open for a volume without mounts.
func (f Folders) openUnmounted(name string) (*os.Root, error) {
	root, err := f.open(name)
	if err != nil {
		return nil, err
	}
	if err := f.checkMounts(name); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return root, nil
}

func (f Folders) checkMounts(name string) error {
	path, err := filepath.EvalSymlinks(f.Dir)
	if err != nil {
		return err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(filepath.Join(path, name)))
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return fmt.Errorf("expected no mount in the volume, found %s; unmount it on the machine", mounts[0].Mountpoint)
	}
	return nil
}

func (f Folders) open(name string) (*os.Root, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(f.Dir, 0o700); err != nil {
		return nil, err
	}
	return os.OpenRoot(f.Dir)
}

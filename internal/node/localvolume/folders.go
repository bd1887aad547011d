package localvolume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/clearfolder"
)

// Folders are the folders of the volumes in the folder Dir. Only root can enter that folder. Every operation can be repeated.
type Folders struct {
	Dir string
	// Top is the top folder of the machine's disk.
	Top string
}

// OfMachine are the folders of volumes of this machine.
var OfMachine = Folders{Dir: Root, Top: "/"}

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
	if err := root.Remove(name); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
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

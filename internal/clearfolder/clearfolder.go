// Package clearfolder removes folders whose content belongs to a less privileged process, which can still change it.
//
// Layer: library. Allowed imports: api.
package clearfolder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// maxDepth bounds the paths of a removal, because each step opens all folders of its path, and the owner of the content decides about
// the depth. os.RemoveAll has a file open for each folder of a path, and so fails, after it has used up the files of the process.
const maxDepth = 100

// Clear removes the content of a folder within a time, until ctx ends. Only the content of root can be removed: its owner can replace folders by
// links meanwhile, and root admits no link to a folder outside. So root must be the folder itself, and no folder above it. A file that cannot
// be removed does not keep the others. After an error the next call continues.
func Clear(ctx context.Context, root *os.Root, within time.Duration) error {
	return (&clearing{root: root, within: within, until: time.Now().Add(within)}).clear(ctx, ".", 0)
}

// Remove removes a file, or a folder with its content. One that does not exist is no error. Only its content may belong to a less
// privileged process.
func Remove(ctx context.Context, path string, within time.Duration) error {
	info, err := os.Lstat(path)
	if err == nil && info.IsDir() {
		err = clearAt(ctx, path, within)
	}
	if err == nil {
		err = os.Remove(path)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func clearAt(ctx context.Context, path string, within time.Duration) error {
	root, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	return errors.Join(Clear(ctx, root, within), root.Close())
}

type clearing struct {
	root *os.Root
	// moved counts the folders that were too deep, and are then in the root.
	moved  int
	within time.Duration
	until  time.Time
}

// clear removes the content of a folder, a part at a time, until no more of it can be removed. It returns the first error of the last part: a
// folder can have very many files.
func (c *clearing) clear(ctx context.Context, folder string, depth int) error {
	for {
		content, err := c.some(ctx, folder)
		if err != nil || len(content) == 0 {
			return err
		}
		removed := false
		for _, child := range content {
			failed := c.remove(ctx, filepath.Join(folder, child.Name()), child.IsDir(), depth)
			removed, err = removed || failed == nil, cmp.Or(err, failed)
		}
		if !removed {
			return err
		}
	}
}

// remove removes a file, or a folder with its content. It moves a folder that is too deep.
func (c *clearing) remove(ctx context.Context, path string, isFolder bool, depth int) error {
	if isFolder && depth == maxDepth {
		return c.change(path, func() error { return c.move(path) })
	}
	if isFolder {
		if err := c.clear(ctx, path, depth+1); err != nil {
			return err
		}
	}
	return c.change(path, func() error { return c.root.Remove(path) })
}

// change removes or moves a file. If this is not permitted, it tries again without the attributes of the file and its folders that forbid it.
func (c *clearing) change(path string, do func() error) error {
	err := do()
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	// A folder that is too deep moves to the root.
	if kept := errors.Join(c.makeChangeable("."), c.makeChangeable(filepath.Dir(path)), c.makeChangeable(path)); kept != nil {
		return errors.Join(err, kept)
	}
	return do()
}

func (c *clearing) makeChangeable(path string) error {
	info, err := c.root.Lstat(path)
	if err != nil || !info.IsDir() && !info.Mode().IsRegular() { // Other files have no attributes.
		return err
	}
	file, err := c.root.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // The owner of the content can make it a pipe meanwhile.
	if err != nil {
		return err
	}
	return errors.Join(MakeChangeable(file), file.Close())
}

// fixed are the attributes i and a of chattr(1): a file with one of them cannot be renamed or removed.
const fixed = 0x10 | 0x20

// MakeChangeable removes these attributes of a file or folder. Root in a machine can set them on the files that it can reach.
func MakeChangeable(file *os.File) error {
	flags, err := unix.IoctlGetUint32(int(file.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(file.Fd()), unix.FS_IOC_SETFLAGS, int(flags&^fixed))
	}
	if err != nil {
		return fmt.Errorf("removing the attributes of %s that forbid its removal: %w", file.Name(), err)
	}
	return nil
}

// some returns a part of the content of a folder, or nothing if it is empty.
func (c *clearing) some(ctx context.Context, folder string) ([]os.DirEntry, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if time.Now().After(c.until) {
		return nil, fmt.Errorf("expected to remove the content of %s within %s: it has very many files, or a process still writes; the next attempt continues", c.root.Name(), c.within)
	}
	f, err := c.root.Open(folder)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	content, err := f.ReadDir(1024)
	if errors.Is(err, io.EOF) {
		return nil, nil
	}
	return content, err
}

// move gives a folder a new name in the root.
func (c *clearing) move(folder string) error {
	for {
		c.moved++
		name := fmt.Sprintf(".moved-%d", c.moved)
		if _, err := c.root.Lstat(name); errors.Is(err, os.ErrNotExist) {
			return c.root.Rename(folder, name)
		} else if err != nil {
			return err
		}
	}
}

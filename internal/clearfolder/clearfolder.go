// Package clearfolder removes folders whose content belongs to a less privileged process, which can still change it.
//
// Layer: library. Allowed imports: api.
package clearfolder

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// maxDepth bounds the paths of a removal, because each step opens all folders of its path, and the owner of the content decides about
// the depth. os.RemoveAll has a file open for each folder of a path, and so fails, after it has used up the files of the process.
const maxDepth = 100

// Clear removes the content of a folder within a time, until ctx ends. Only the content of root can be removed: its owner can replace folders by
// links meanwhile, and root admits no link to a folder outside. So root must be the folder itself, and no folder above it. After an
// error the next call continues.
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

// clear removes the content of a folder, a part at a time. It moves folders that are too deep.
func (c *clearing) clear(ctx context.Context, folder string, depth int) error {
	for {
		content, err := c.some(ctx, folder)
		if err != nil || len(content) == 0 {
			return err
		}
		for _, child := range content {
			path := filepath.Join(folder, child.Name())
			if child.IsDir() && depth == maxDepth {
				err = c.move(path)
			} else {
				if child.IsDir() {
					err = c.clear(ctx, path, depth+1)
				}
				if err == nil {
					err = c.root.Remove(path)
				}
			}
			if err != nil {
				return err
			}
		}
	}
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

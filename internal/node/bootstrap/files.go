package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/changes"
	"capstan.dev/capstan/internal/node/cloudconfig"
)

// writeFile writes a file whole or not at all. Appending twice is avoided by the recorded length
// that the file had before.
func (r *Runner) writeFile(step string, f cloudconfig.File) error {
	uid, gid, err := lookupOwner(f.Owner)
	if err != nil {
		return err
	}
	path := filepath.Join(r.Root, f.Path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	content := f.Content
	if f.Append {
		old, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		before, known := r.record.Appended[step]
		if !known {
			before = int64(len(old))
			r.record.Appended[step] = before
			if err := r.save(); err != nil {
				return err
			}
		}
		content = append(old[:min(before, int64(len(old)))], content...)
	}
	return replaceFile(path, content, f.Mode, uid, gid)
}

// replaceFile writes a file beside path and moves it there. Nobody but root can read it before it
// has its owner and mode. It is on the disk before the step that wrote it is recorded.
func replaceFile(path string, content []byte, mode os.FileMode, uid, gid int) error {
	file, err := os.OpenFile(path+".capstan-tmp", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	if os.Getuid() == 0 {
		err = errors.Join(err, file.Chown(uid, gid))
	}
	err = errors.Join(err, file.Chmod(mode), file.Sync(), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		_ = os.Remove(file.Name())
		return err
	}
	return atomicfile.SyncDir(filepath.Dir(path))
}

// lookupOwner reads "user", "user:group" or numbers in their place; root by default.
func lookupOwner(owner string) (uid, gid int, err error) {
	name, group, hasGroup := strings.Cut(owner, ":")
	if name != "" && name != "root" {
		if uid, err = strconv.Atoi(name); err != nil {
			u, err := user.Lookup(name)
			if err != nil {
				return 0, 0, fmt.Errorf("owner: %w", err)
			}
			uid, _ = strconv.Atoi(u.Uid)
			gid, _ = strconv.Atoi(u.Gid)
		}
	}
	if hasGroup && group != "" {
		if gid, err = strconv.Atoi(group); err != nil {
			g, err := user.LookupGroup(group)
			if err != nil {
				return 0, 0, fmt.Errorf("owner: %w", err)
			}
			gid, _ = strconv.Atoi(g.Gid)
		}
	}
	return uid, gid, nil
}

// erase overwrites a file with zeros and removes it. A missing file is fine.
func erase(path string) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("erasing the bootstrap data: %w", err)
	}
	info, err := file.Stat()
	if err == nil {
		_, err = file.WriteAt(make([]byte, info.Size()), 0)
	}
	if err := errors.Join(err, file.Sync(), file.Close(), os.Remove(path)); err != nil {
		return fmt.Errorf("erasing the bootstrap data: %w", err)
	}
	return nil
}

// waitForFile returns when the file exists, or ctx has ended. The folder is made if need be.
func waitForFile(ctx context.Context, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return changes.WaitFor(ctx, path)
}

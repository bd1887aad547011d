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

// writeFile writes a file completely or not at all. The recorded length of the file before the step prevents that
// content is appended twice.
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

// WriteFile writes a file below root completely or not at all. It does not append.
func WriteFile(root string, f cloudconfig.File) error {
	uid, gid, err := lookupOwner(f.Owner)
	if err != nil {
		return err
	}
	path := filepath.Join(root, f.Path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return replaceFile(path, f.Content, f.Mode, uid, gid)
}

// replaceFile writes a file beside path and renames it to path. Only root can read it before it has its owner and mode.
// It is synced to the disk before its step is recorded.
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

// lookupOwner parses "user" or "user:group", as names or numbers. The default is root.
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

// Erase overwrites a file with zeros and removes it. A missing file is no error.
func Erase(path string) error {
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

// waitForFile returns when the file exists or ctx has ended. It creates the folder if necessary.
func waitForFile(ctx context.Context, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return changes.WaitFor(ctx, path)
}

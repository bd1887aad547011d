// Package atomicfile replaces files so that a crash between any two system calls leaves either the
// complete old or the complete new content.
//
// Layer: library. Allowed imports: api.
package atomicfile

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// temporary begins the name of a file that is not complete.
const temporary = ".new-"

// WriteFile replaces path with data: temporary file, fsync, rename, fsync of the folder.
func WriteFile(path string, data []byte, mode fs.FileMode) error {
	const own = -1
	return WriteFileAs(path, data, mode, own, own)
}

// WriteFileAs is WriteFile for a file of another user. The new file has its owner and mode from the start.
func WriteFileAs(path string, data []byte, mode fs.FileMode, uid, gid int) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, temporary+"*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // fails, as it should, after the rename
	_, err = f.Write(data)
	err = errors.Join(err, f.Chown(uid, gid), f.Chmod(mode), f.Sync(), f.Close())
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return SyncDir(dir)
}

// RemoveTemporary removes the files that killed calls of WriteFile have left in a folder. An empty one stays: it has no secret, and can be
// that of another process, which creates a mark at the same time.
func RemoveTemporary(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return IgnoreMissing(err)
	}
	for _, entry := range entries {
		if !entry.Type().IsRegular() || !strings.HasPrefix(entry.Name(), temporary) {
			continue
		}
		info, e := entry.Info()
		if e == nil && info.Size() > 0 {
			e = os.Remove(filepath.Join(dir, entry.Name()))
		}
		err = errors.Join(err, IgnoreMissing(e))
	}
	return err
}

// WriteJSON is WriteFile for a value.
func WriteJSON(path string, v any, mode fs.FileMode) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return WriteFile(path, append(data, '\n'), mode)
}

// ReadJSON reads a file of WriteJSON.
func ReadJSON(path string, v any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	return nil
}

// SyncDir makes renames and removals in dir durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Rename moves a file or folder and makes that durable.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return errors.Join(SyncDir(filepath.Dir(from)), SyncDir(filepath.Dir(to)))
}

// Remove removes a file. A file that does not exist is no error.
func Remove(path string) error { return IgnoreMissing(os.Remove(path)) }

// IgnoreMissing returns nil for the error that a file does not exist, and other errors as they are.
func IgnoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Exists reports whether path exists (a dangling link does).
func Exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// Together runs functions at the same time, waits for all and returns the first error in their order. Files that are written at the same
// time share the commits of the file system's journal.
func Together(functions ...func() error) error {
	errs := make([]error, len(functions))
	var group sync.WaitGroup
	for i, function := range functions {
		group.Go(func() { errs[i] = function() })
	}
	group.Wait()
	return cmp.Or(errs...)
}

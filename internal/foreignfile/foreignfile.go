// Package foreignfile reads and replaces files in folders that a less privileged process can write to. For capstand this is root in a machine
// or a balancer, for capstan-init a user, or a pod that does not run as root. Such a process can put a link, a pipe, a device or a file of any size in the place of a
// file. No other code of capstand reads such files.
//
// Layer: library. Allowed imports: api.
package foreignfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
)

// Open opens a regular file below a folder for reading. The path is relative to the folder. It leads to no file outside of the folder, and
// its last part is no link. Nothing but a regular file is opened, because to open a device can have an effect.
func Open(folder, path string) (*os.File, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	return open(root, path, os.O_RDONLY)
}

func open(root *os.Root, path string, flags int) (*os.File, error) {
	place, err := root.OpenFile(path, unix.O_PATH|unix.O_NOFOLLOW, 0) // This descriptor gives no access to the content.
	if err != nil {
		return nil, err
	}
	defer func() { _ = place.Close() }()
	info, err := place.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "open", Path: place.Name(), Err: fmt.Errorf("expected a regular file, found one of mode %s", info.Mode())}
	}
	// Without O_NONBLOCK, a lease of the owner (F_SETLEASE) delays this call.
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", place.Fd()), flags|unix.O_NONBLOCK, 0)
}

// Read returns the content of a file as Open opens it. More than most bytes are an error.
func Read(folder, path string, most int64) ([]byte, error) {
	file, err := Open(folder, path)
	if err != nil {
		return nil, err
	}
	data, err := readAll(file, most)
	return data, errors.Join(err, file.Close())
}

func readAll(file *os.File, most int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(file, most+1))
	if err == nil && int64(len(data)) > most {
		err = &fs.PathError{Op: "read", Path: file.Name(), Err: fmt.Errorf("expected at most %d bytes: %w", most, unix.EFBIG)}
	}
	return data, err
}

// ReadIn is Read for a file below root. The returned owner and mode are those of the file that was read.
func ReadIn(root *os.Root, path string, most int64) ([]byte, fs.FileInfo, error) {
	file, err := open(root, path, os.O_RDONLY)
	if err != nil {
		return nil, nil, err
	}
	info, err := file.Stat()
	if err != nil {
		return nil, nil, errors.Join(err, file.Close())
	}
	data, err := readAll(file, most)
	return data, info, errors.Join(err, file.Close())
}

// ReadJSON decodes the content of a file as Read reads it.
func ReadJSON(folder, path string, most int64, v any) error {
	data, err := Read(folder, path, most)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	return nil
}

// Write gives a file the content data, and creates it with its folders if it does not exist. Like Open, it changes only a regular file below
// the root. The file stays the same one, because it can be bound into a machine.
func Write(root *os.Root, path string, data []byte, mode fs.FileMode) error {
	if err := root.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := root.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if errors.Is(err, fs.ErrExist) {
		file, err = open(root, path, os.O_WRONLY|os.O_TRUNC)
	}
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	return errors.Join(err, file.Close())
}

// Replace puts a new file in the place of the file of a name in the folder root, or creates it. The new file and the rename follow no link of
// the other process. Nothing is synchronized with the disk: the content is worthless after a crash.
func Replace(root *os.Root, name string, data []byte, mode fs.FileMode) error {
	tmp := name + ".capstand"
	file, err := Create(root, tmp)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err = errors.Join(err, file.Chmod(mode), file.Close()); err == nil {
		err = root.Rename(tmp, name)
	}
	if err != nil { // The file takes room that the next attempt needs.
		return errors.Join(err, atomicfile.IgnoreMissing(root.Remove(tmp)))
	}
	return nil
}

// Create removes what has a name in the folder root, and creates a file that only the caller can read.
func Create(root *os.Root, name string) (*os.File, error) {
	if err := atomicfile.IgnoreMissing(root.Remove(name)); err != nil {
		return nil, err
	}
	return root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
}

// Symlink removes what has a name in the folder root, and creates a symbolic link with an owner.
func Symlink(root *os.Root, target, name string, uid, gid int) error {
	if err := errors.Join(atomicfile.IgnoreMissing(root.Remove(name)), root.Symlink(target, name)); err != nil {
		return err
	}
	return chown(root, name, fs.ModeSymlink, uid, gid)
}

// Mkdir removes what has a name in the folder root, and creates a folder with an owner. Only the owner can use it.
func Mkdir(root *os.Root, name string, uid, gid int) error {
	if err := errors.Join(atomicfile.IgnoreMissing(root.Remove(name)), root.Mkdir(name, 0o700)); err != nil {
		return err
	}
	return chown(root, name, fs.ModeDir, uid, gid)
}

// chown gives what has a name in the folder root an owner. Something of another type, for example a file or a link that replaced it, does
// not get the owner.
func chown(root *os.Root, name string, kind fs.FileMode, uid, gid int) error {
	file, err := root.OpenFile(name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err == nil && info.Mode().Type() != kind {
		err = &fs.PathError{Op: "chown", Path: name, Err: fmt.Errorf("expected the type %s, found a file of mode %s", kind, info.Mode())}
	}
	if err != nil {
		return err
	}
	return unix.Fchownat(int(file.Fd()), "", uid, gid, unix.AT_EMPTY_PATH)
}

// Sync makes renames in the folder root durable.
func Sync(root *os.Root) error {
	folder, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(folder.Sync(), folder.Close())
}

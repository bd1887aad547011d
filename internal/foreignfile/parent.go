package foreignfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Parent opens the folder of an absolute path below root, and returns the last part of the path as well. Other users can be able to change
// parts of the path. The first folder that they can write to bounds the rest: their links lead to nothing outside of it. Links before it are
// those of the caller, and lead anywhere below root.
func Parent(root, path string) (folder *os.Root, name string, err error) {
	return parent(root, path, func(*os.Root, string) error { return nil })
}

// MakeParent is Parent, and creates missing folders.
func MakeParent(root, path string) (folder *os.Root, name string, err error) {
	return parent(root, path, func(bound *os.Root, rest string) error { return bound.MkdirAll(rest, 0o755) })
}

// ReadPath returns the content of the regular file at an absolute path below root. It follows links as Parent does. The last part of the path
// can be a link of the caller. More than most bytes are an error.
func ReadPath(root, path string, most int64) ([]byte, error) {
	own, rest, err := split(root, path)
	if err != nil {
		return nil, err
	}
	if rest == "" {
		own, rest = filepath.Split(own)
	}
	return Read(own, rest, most)
}

func parent(root, path string, prepare func(bound *os.Root, rest string) error) (folder *os.Root, name string, err error) {
	name = filepath.Base(path)
	own, rest, err := split(root, filepath.Dir(path))
	if err != nil {
		return nil, "", err
	}
	bound, err := os.OpenRoot(own + "/.") // With the dot it opens only folders. To open a pipe would wait for its other end.
	if err != nil || rest == "" {
		return bound, name, err
	}
	defer func() { _ = bound.Close() }()
	if err := prepare(bound, rest); err != nil {
		return nil, "", err
	}
	folder, err = bound.OpenRoot(rest + "/.")
	return folder, name, err
}

// maxLinks bounds the links of a path, as the kernel does.
const maxLinks = 40

// split divides a path below root. Only the caller can change what own is. Rest begins with a missing part, or own is the first folder to
// which others can write.
func split(root, path string) (own, rest string, err error) {
	own = "/"
	left := parts(path)
	for links := 0; ; {
		full := filepath.Join(root, own)
		info, err := os.Stat(full)
		switch {
		case err != nil:
			return "", "", err
		case len(left) > 0 && !info.IsDir():
			return "", "", &fs.PathError{Op: "open", Path: full, Err: syscall.ENOTDIR}
		case len(left) == 0 || !onlyOwn(info):
			return full, filepath.Join(left...), nil
		}
		next := filepath.Join(own, left[0])
		target, err := os.Readlink(filepath.Join(root, next))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return full, filepath.Join(left...), nil
		case errors.Is(err, syscall.EINVAL): // no link
			own, left = next, left[1:]
		case err != nil:
			return "", "", err
		case links == maxLinks:
			return "", "", &fs.PathError{Op: "open", Path: path, Err: syscall.ELOOP}
		default:
			links++
			if filepath.IsAbs(target) {
				own = "/"
			}
			left = append(parts(target), left[1:]...)
		}
	}
}

func parts(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

// onlyOwn reports whether only root and the user of this process can write to a folder.
func onlyOwn(folder fs.FileInfo) bool {
	uid := int(folder.Sys().(*syscall.Stat_t).Uid)
	return (uid == 0 || uid == os.Geteuid()) && folder.Mode().Perm()&0o022 == 0
}

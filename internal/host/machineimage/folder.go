package machineimage

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"

	"capstan.dev/capstan/internal/endingreader"
)

// folderDigest returns the digest of the parts of a folder: of the names, owners, modes, targets of links, and contents of all files.
func (s *Store) folderDigest(ctx context.Context, dir string) (string, error) {
	if err := CheckPrivate(dir); err != nil {
		return "", err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", err
	}
	defer func() { _ = root.Close() }()
	sum, left := sha256.New(), budget(s.limits())
	err = fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == "." {
			return err
		}
		if top, _, _ := strings.Cut(path, "/"); !slices.Contains(Parts, top) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		return describe(ctx, sum, root, path, &left)
	})
	if err != nil {
		return "", err
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
}

// describe writes a file to w, without its times.
func describe(ctx context.Context, w io.Writer, root *os.Root, path string, left *budget) error {
	info, err := root.Lstat(path)
	if err != nil {
		return err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("the owner of %s is unknown", path)
	}
	size := int64(0)
	if info.Mode().IsRegular() {
		size = info.Size()
	}
	if err := left.take(size); err != nil {
		return err
	}
	fmt.Fprintf(w, "%q %o %d %d %d\n", path, info.Mode(), owner.Uid, owner.Gid, size)
	switch info.Mode().Type() {
	case fs.ModeDir:
		return nil
	case fs.ModeSymlink:
		target, err := root.Readlink(path)
		fmt.Fprintf(w, "%q\n", target)
		return err
	case 0:
		file, err := root.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		_, err = io.CopyN(w, endingreader.New(ctx, file), size)
		return err
	}
	return fmt.Errorf("expected files, folders and links, found %s (%v): remove it from the image", path, info.Mode())
}

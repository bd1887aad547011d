package machineimage

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
)

// Names of the entries of a layer that remove files of the layers below: see the specification of OCI images.
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

// maxWindow bounds the memory for a zstd stream.
const maxWindow = 128 << 20

// decompress returns the content of a layer. end releases its resources.
func decompress(r io.Reader) (plain io.Reader, end func(), err error) {
	buffered := bufio.NewReader(r)
	magic, err := buffered.Peek(4)
	if err != nil {
		return nil, nil, err
	}
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		plain, err = gzip.NewReader(buffered)
		return plain, func() {}, err
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		d, err := zstd.NewReader(buffered, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, nil, err
		}
		return d, d.Close, nil
	}
	return buffered, func() {}, nil
}

// layer unpacks the entries of one layer. All paths are resolved in root: os.Root follows no link that leads out of it.
type layer struct {
	root *os.Root
	left *budget
	// own are the paths of this layer, which an opaque folder keeps.
	own map[string]bool
}

func applyLayer(root *os.Root, r *tar.Reader, left *budget) error {
	l := layer{root, left, map[string]bool{}}
	for {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := l.apply(header, r); err != nil {
			return fmt.Errorf("%q: %w", header.Name, err)
		}
	}
}

// apply unpacks an entry. It leaves out the parts that machines do not get, devices, and the bits setuid and setgid: the files are
// on the host's disk, and nothing in a machine needs them.
func (l layer) apply(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if err := l.left.take(h.Size); err != nil {
		return err
	}
	name, ok := inParts(h.Name)
	if !ok {
		return nil
	}
	dir, base := path.Split(name)
	if base == opaque {
		return l.empty(path.Clean(dir))
	}
	if hidden, ok := strings.CutPrefix(base, whiteout); ok {
		if hidden == "" || hidden == "." || hidden == ".." {
			return fmt.Errorf("expected the name of a file after %q, found %q", whiteout, hidden)
		}
		return l.root.RemoveAll(path.Join(dir, hidden))
	}
	for p := name; p != "."; p = path.Dir(p) {
		l.own[p] = true
	}
	if err := l.makeParents(path.Dir(name)); err != nil {
		return err
	}
	if info, err := l.root.Lstat(name); err == nil && (h.Typeflag != tar.TypeDir || !info.IsDir()) {
		if err := l.root.RemoveAll(name); err != nil {
			return err
		}
	}
	return l.create(h, name, content)
}

// inParts returns the path of an entry below the root, and whether machines get it.
func inParts(name string) (string, bool) {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	top, _, _ := strings.Cut(name, "/")
	return name, slices.Contains(Parts, strings.TrimPrefix(top, whiteout))
}

// makeParents creates the folders that a layer does not contain.
func (l layer) makeParents(dir string) error {
	if dir == "." {
		return nil
	}
	return l.root.MkdirAll(dir, 0o755)
}

func (l layer) create(h *tar.Header, name string, content io.Reader) error {
	mode := fs.FileMode(h.Mode) & 0o777
	switch h.Typeflag {
	case tar.TypeDir:
		if err := l.root.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	case tar.TypeReg:
		if err := l.write(name, content); err != nil {
			return err
		}
	case tar.TypeSymlink:
		return errors.Join(l.root.Symlink(h.Linkname, name), l.root.Lchown(name, h.Uid, h.Gid))
	case tar.TypeLink:
		target, ok := inParts(h.Linkname)
		if !ok {
			return fmt.Errorf("expected a hard link to a file of the image's %s, found one to %q", strings.Join(Parts, ", "), h.Linkname)
		}
		return l.root.Link(target, name)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return nil
	default:
		return fmt.Errorf("expected files, folders and links, found type %q", h.Typeflag)
	}
	return errors.Join(l.root.Lchown(name, h.Uid, h.Gid), l.root.Chmod(name, mode))
}

func (l layer) write(name string, content io.Reader) error {
	file, err := l.root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	return errors.Join(err, file.Close())
}

// empty removes the files of the layers below from a folder.
func (l layer) empty(dir string) error {
	folder, err := l.root.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	names, err := folder.Readdirnames(-1)
	errs := []error{err, folder.Close()}
	for _, name := range names {
		if p := path.Join(dir, name); !l.own[p] {
			errs = append(errs, l.root.RemoveAll(p))
		}
	}
	return errors.Join(errs...)
}

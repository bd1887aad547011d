package versions

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// unpackArchive copies the programs of a folder of an archive. It reads the archive twice: first the names, to choose the folder, and
// then the content.
func unpackArchive(file, out, version string, limits Limits) error {
	folders := map[string]map[string]entry{}
	err := readArchive(file, limits, func(name string, e entry, _ *tar.Reader, _ bool) error {
		dir := path.Dir(name)
		if folders[dir] == nil {
			folders[dir] = map[string]entry{}
		}
		if _, twice := folders[dir][e.name]; twice {
			return errors.New("expected each file once, found it twice")
		}
		folders[dir][e.name] = e
		return nil
	})
	if err != nil {
		return err
	}
	dir, err := programFolder(folders, version)
	if err != nil {
		return err
	}
	copied, err := chosen(folders[dir], limits)
	if err != nil {
		return err
	}
	return readArchive(file, limits, func(name string, e entry, r *tar.Reader, executable bool) error {
		switch {
		case path.Dir(name) != dir || !copied[e.name]:
			return nil
		case e.link != "":
			return link(e, out)
		}
		return write(r, e.name, executable, out, limits.Program)
	})
}

// programFolder chooses the folder of an archive. Capstan's archives have one for each version, kubernetes/vX.Y.Z; upstream's have
// kubernetes/server/bin; those of etcd have etcd-vX.Y.Z-linux-ARCHITECTURE.
func programFolder(folders map[string]map[string]entry, version string) (string, error) {
	var candidates []string
	for dir, entries := range folders {
		_, kubelet := entries["kubelet"]
		_, etcd := entries["etcd"]
		if kubelet || etcd {
			candidates = append(candidates, dir)
		}
	}
	slices.Sort(candidates)
	named := slices.DeleteFunc(slices.Clone(candidates), func(dir string) bool { return path.Base(dir) != version })
	switch {
	case len(named) == 1:
		return named[0], nil
	case len(candidates) == 1:
		return candidates[0], nil
	case len(candidates) == 0:
		return "", fmt.Errorf("expected an archive with a folder that contains kubelet or etcd, found %d folders without them", len(folders))
	}
	return "", fmt.Errorf("expected an archive with one version, found %s: choose one with --version", strings.Join(candidates, ", "))
}

// readArchive calls visit for each file and symbolic link of an archive. It refuses archives with other entries, with names that lead
// out of the folder, and beyond the limits.
func readArchive(file string, limits Limits, visit func(name string, e entry, r *tar.Reader, executable bool) error) error {
	in, err := os.Open(file)
	if err != nil {
		return err
	}
	defer in.Close()
	plain, err := gzip.NewReader(in)
	if err != nil {
		return fmt.Errorf("expected an archive that tar and gzip made (.tar.gz): %w", err)
	}
	bounded := &bounded{r: plain, left: limits.Unpacked, limit: limits.Unpacked}
	r := tar.NewReader(bounded)
	for count := 0; ; count++ {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			// The checksum of gzip is at its end.
			_, err = io.Copy(io.Discard, bounded)
			return err
		}
		if err != nil {
			return err
		}
		if count >= limits.Entries {
			return fmt.Errorf("expected an archive of at most %d entries, found more", limits.Entries)
		}
		if err := visitHeader(h, r, visit); err != nil {
			return fmt.Errorf("%q: %w", h.Name, err)
		}
	}
}

func visitHeader(h *tar.Header, r *tar.Reader, visit func(string, entry, *tar.Reader, bool) error) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name := path.Clean(h.Name)
	if !filepath.IsLocal(name) || slices.Contains(strings.Split(h.Name, "/"), "..") {
		return errors.New("expected a path inside of the archive, found one that leads out of it")
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return nil
	case tar.TypeReg:
		return visit(name, entry{name: path.Base(name), size: h.Size}, r, h.Mode&0o111 != 0)
	case tar.TypeSymlink:
		return visit(name, entry{name: path.Base(name), link: h.Linkname}, r, false)
	}
	return fmt.Errorf("expected files, folders and symbolic links, found an entry of type %q", h.Typeflag)
}

// bounded fails after a number of bytes.
type bounded struct {
	r           io.Reader
	left, limit int64
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("expected an archive with a content of at most %d bytes, found more", b.limit)
	}
	n, err := b.r.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

package machineimage

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/endingreader"
)

// Bounds of an archive.
const (
	maxBlobs  = 10_000
	maxLayers = 128
	maxJSON   = 4 << 20
)

// archive is an OCI image layout in a tar file.
type archive struct {
	file *os.File
	// blobs are the positions of the files in it, by name.
	blobs map[string]position
}

type position struct{ offset, size int64 }

// unpack unpacks an archive, unless this was done, and returns its digest.
func (s *Store) unpack(ctx context.Context, name string) (string, error) {
	if err := CheckPrivate(name); err != nil {
		return "", err
	}
	file, err := Open(filepath.Dir(name), filepath.Base(name))
	if err != nil {
		return "", err
	}
	defer func() { _ = file.Close() }()
	a, err := readArchive(file)
	if err != nil {
		return "", fmt.Errorf("expected an OCI archive: %w", err)
	}
	described, err := a.choose()
	if err != nil {
		return "", err
	}
	dir := s.unpacked(string(described.Digest))
	if dir == "" {
		return "", fmt.Errorf("expected a manifest with a sha256 digest, found %q", described.Digest)
	}
	if atomicfile.Exists(dir) {
		return string(described.Digest), nil
	}
	var manifest v1.Manifest
	if err := a.json(described, &manifest); err != nil {
		return "", err
	}
	return string(described.Digest), s.unpackLayers(ctx, a, manifest.Layers, dir)
}

// unpackLayers fills dir, which appears when it is complete.
func (s *Store) unpackLayers(ctx context.Context, a *archive, layers []v1.Descriptor, dir string) error {
	if len(layers) == 0 || len(layers) > maxLayers {
		return fmt.Errorf("expected 1 to %d layers, found %d", maxLayers, len(layers))
	}
	unfinished, err := os.MkdirTemp(s.Unpacked, ".new-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(unfinished) }() // finds nothing after the rename
	root, err := os.OpenRoot(unfinished)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	left := budget(s.limits())
	for i, layer := range layers {
		if err := a.unpackLayer(ctx, root, layer, &left); err != nil {
			return fmt.Errorf("layer %d: %w", i+1, err)
		}
	}
	folder, err := root.Open(".")
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Syncfs(int(folder.Fd())), folder.Close(), os.Chmod(unfinished, 0o755)); err != nil {
		return err
	}
	return atomicfile.Rename(unfinished, dir)
}

func (a *archive) unpackLayer(ctx context.Context, root *os.Root, layer v1.Descriptor, left *budget) error {
	blob, err := a.blob(layer)
	if err != nil {
		return err
	}
	verifier := layer.Digest.Verifier()
	verified := io.TeeReader(endingreader.New(ctx, blob), verifier)
	plain, end, err := decompress(verified)
	if err != nil {
		return err
	}
	defer end()
	if err := applyLayer(root, tar.NewReader(plain), left); err != nil {
		return err
	}
	// The end of the archive can follow the end of the tar file.
	if _, err := io.Copy(io.Discard, verified); err != nil {
		return err
	}
	if !verifier.Verified() {
		return fmt.Errorf("expected content with the digest %s, found another one: the archive is damaged", layer.Digest)
	}
	return nil
}

// readArchive finds the files of an archive.
func readArchive(file *os.File) (*archive, error) {
	a := &archive{file, map[string]position{}}
	for r := tar.NewReader(file); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return a, nil
		}
		if err != nil {
			return nil, err
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		if len(a.blobs) == maxBlobs {
			return nil, fmt.Errorf("expected at most %d files, found more", maxBlobs)
		}
		offset, err := file.Seek(0, io.SeekCurrent) // The reader has read the header and nothing more.
		if err != nil {
			return nil, err
		}
		a.blobs[path.Clean(header.Name)] = position{offset, header.Size}
	}
}

// choose returns the descriptor of the manifest for this host.
func (a *archive) choose() (v1.Descriptor, error) {
	at, ok := a.blobs[v1.ImageIndexFile]
	if !ok || at.size > maxJSON {
		return v1.Descriptor{}, fmt.Errorf("expected an OCI archive with the file %s, found none: make it with `skopeo copy … oci-archive:NAME.tar` or `docker save`", v1.ImageIndexFile)
	}
	data, err := io.ReadAll(io.NewSectionReader(a.file, at.offset, at.size))
	if err != nil {
		return v1.Descriptor{}, err
	}
	index := v1.Index{}
	if err := json.Unmarshal(data, &index); err != nil {
		return v1.Descriptor{}, fmt.Errorf("%s: %w", v1.ImageIndexFile, err)
	}
	found, err := only(index.Manifests)
	if err != nil || found.MediaType != v1.MediaTypeImageIndex {
		return found, err
	}
	index = v1.Index{}
	if err := a.json(found, &index); err != nil {
		return v1.Descriptor{}, err
	}
	return only(index.Manifests)
}

// only returns the manifest for the platform of this host.
func only(all []v1.Descriptor) (v1.Descriptor, error) {
	var found []v1.Descriptor
	for _, d := range all {
		if p := d.Platform; p == nil || p.OS == "linux" && p.Architecture == runtime.GOARCH || p.OS == "" && p.Architecture == "" {
			found = append(found, d)
		}
	}
	if len(found) != 1 {
		return v1.Descriptor{}, fmt.Errorf("expected one image for linux/%s, found %d among %d: save only this image", runtime.GOARCH, len(found), len(all))
	}
	return found[0], nil
}

// blob returns the content that a descriptor names. The caller verifies the digest.
func (a *archive) blob(d v1.Descriptor) (*io.SectionReader, error) {
	if err := d.Digest.Validate(); err != nil || d.Digest.Algorithm() != digest.SHA256 {
		return nil, fmt.Errorf("expected a sha256 digest, found %q", d.Digest)
	}
	at, ok := a.blobs[path.Join("blobs", "sha256", d.Digest.Encoded())]
	if !ok {
		return nil, fmt.Errorf("expected the blob %s, found none: the archive is incomplete", d.Digest)
	}
	return io.NewSectionReader(a.file, at.offset, at.size), nil
}

// json reads a small blob.
func (a *archive) json(d v1.Descriptor, v any) error {
	blob, err := a.blob(d)
	if err != nil {
		return err
	}
	if blob.Size() > maxJSON {
		return fmt.Errorf("expected at most %d bytes in %s, found %d", maxJSON, d.Digest, blob.Size())
	}
	data, err := io.ReadAll(blob)
	if err != nil {
		return err
	}
	if digest.FromBytes(data) != d.Digest {
		return fmt.Errorf("expected content with the digest %s, found another one: the archive is damaged", d.Digest)
	}
	return json.NewDecoder(bytes.NewReader(data)).Decode(v)
}

// Package archive reads and writes backups of an embedded management plane. A backup is a tar.gz file. Its first entry is
// manifest.json, which lists all other files with their size and SHA-256.
//
// Layer: tool. Allowed imports: api, library, contract, host, node.
package archive

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
)

const (
	// Format is the version of the format. This package reads and writes this version only.
	Format = 1

	manifestName = "manifest.json"
	// manifestLimit and filesLimit protect against large archives of unknown origin.
	manifestLimit = 1 << 20
	filesLimit    = 100
)

// Manifest describes a backup.
type Manifest struct {
	Format int `json:"format"`
	// Installation is the id of the plane.
	Installation string    `json:"installation"`
	Time         time.Time `json:"time"`
	// CapstanVersion, KubernetesVersion and EtcdVersion are the versions of the plane.
	CapstanVersion    string `json:"capstanVersion"`
	KubernetesVersion string `json:"kubernetesVersion"`
	EtcdVersion       string `json:"etcdVersion"`
	// Revision of etcd. The backup contains all writes up to it.
	Revision int64  `json:"revision"`
	Files    []File `json:"files"`
}

// File of an archive.
type File struct {
	// Name is a path with slashes, relative to the root of the archive.
	Name      string `json:"name"`
	SizeBytes int64  `json:"sizeBytes"`
	SHA256    string `json:"sha256"`
}

// Write creates an archive with mode 0600 from the named files in dir. The file at path must not exist.
func Write(path string, m Manifest, dir string, names []string) (err error) {
	m.Format, m.Files = Format, nil
	for _, name := range names {
		size, sum, err := sumOf(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		m.Files = append(m.Files, File{name, size, sum})
	}
	description, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	compressed, err := gzip.NewWriterLevel(out, gzip.BestSpeed)
	if err != nil {
		return err
	}
	w := tar.NewWriter(compressed)
	if err := w.WriteHeader(header(manifestName, int64(len(description)), m.Time)); err != nil {
		return err
	}
	if _, err := w.Write(description); err != nil {
		return err
	}
	for _, f := range m.Files {
		if err := add(w, filepath.Join(dir, f.Name), f, m.Time); err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), compressed.Close(), out.Sync())
}

func header(name string, size int64, at time.Time) *tar.Header {
	return &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o600, ModTime: at, Format: tar.FormatPAX}
}

func sumOf(path string) (size int64, sum string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, "", err
	}
	defer f.Close()
	hash := sha256.New()
	size, err = io.Copy(hash, f)
	return size, hex.EncodeToString(hash.Sum(nil)), err
}

// add adds a file. It is an error if the file has changed since its checksum was calculated.
func add(w *tar.Writer, path string, f File, at time.Time) error {
	in, err := os.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := w.WriteHeader(header(f.Name, f.SizeBytes, at)); err != nil {
		return err
	}
	hash := sha256.New()
	if _, err := io.Copy(io.MultiWriter(w, hash), in); err != nil {
		return err
	}
	if sum := hex.EncodeToString(hash.Sum(nil)); sum != f.SHA256 {
		return fmt.Errorf("%s changed while it was read", path)
	}
	return nil
}

// Read reads the manifest of an archive, and nothing else.
func Read(path string) (Manifest, error) {
	m := Manifest{}
	err := open(path, func(_ *tar.Reader, manifest Manifest) error { m = manifest; return nil })
	return m, err
}

// Extract unpacks an archive into the empty folder dir with mode 0600, and checks all files.
func Extract(path, dir string) (Manifest, error) {
	m := Manifest{}
	err := open(path, func(r *tar.Reader, manifest Manifest) error {
		m = manifest
		return extractAll(r, m.Files, dir)
	})
	return m, err
}

func open(path string, use func(*tar.Reader, Manifest) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	compressed, err := gzip.NewReader(f)
	if err != nil {
		return damaged(path, err)
	}
	r := tar.NewReader(compressed)
	m, err := readManifest(r)
	if err != nil {
		return damaged(path, err)
	}
	if m.Format != Format {
		return fmt.Errorf("expected a backup of format %d in %s, found format %d: use the version of Capstan that created it (%s), or a newer one", Format, path, m.Format, m.CapstanVersion)
	}
	if err := use(r, m); err != nil {
		return damaged(path, err)
	}
	return nil
}

func damaged(path string, err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("expected a complete backup of a management plane in %s: %w", path, err)
}

func readManifest(r *tar.Reader) (m Manifest, err error) {
	h, err := r.Next()
	if err != nil {
		return m, err
	}
	if h.Name != manifestName || h.Size > manifestLimit {
		return m, fmt.Errorf("its first file is %s with %d bytes, expected %s", h.Name, h.Size, manifestName)
	}
	if err := json.NewDecoder(r).Decode(&m); err != nil {
		return m, fmt.Errorf("%s: %w", manifestName, err)
	}
	if len(m.Files) > filesLimit {
		return m, fmt.Errorf("%s lists %d files, expected at most %d", manifestName, len(m.Files), filesLimit)
	}
	return m, nil
}

func extractAll(r *tar.Reader, files []File, dir string) error {
	for _, f := range files {
		h, err := r.Next()
		if err != nil {
			return err
		}
		switch {
		case h.Name != f.Name || h.Typeflag != tar.TypeReg || !filepath.IsLocal(f.Name):
			return fmt.Errorf("it contains %s where its manifest lists %s", h.Name, f.Name)
		case h.Size != f.SizeBytes:
			return fmt.Errorf("%s has %d bytes, expected %d as in its manifest", f.Name, h.Size, f.SizeBytes)
		}
		if err := extract(r, f, filepath.Join(dir, filepath.FromSlash(f.Name))); err != nil {
			return err
		}
	}
	if h, err := r.Next(); err == nil {
		return fmt.Errorf("it contains %s, which its manifest does not list", h.Name)
	} else if !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

func extract(r io.Reader, f File, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	hash := sha256.New()
	_, err = io.Copy(io.MultiWriter(out, hash), r)
	if err := errors.Join(err, out.Sync(), out.Close(), atomicfile.SyncDir(filepath.Dir(path))); err != nil {
		return err
	}
	if sum := hex.EncodeToString(hash.Sum(nil)); sum != f.SHA256 {
		return fmt.Errorf("%s is damaged: its SHA-256 is %s, expected %s as in its manifest", f.Name, sum, f.SHA256)
	}
	return nil
}

// SizeBytes returns the size of all files.
func (m Manifest) SizeBytes() (total int64) {
	for _, f := range m.Files {
		total += f.SizeBytes
	}
	return total
}

// Has reports whether the backup contains a file.
func (m Manifest) Has(name string) bool {
	return slices.ContainsFunc(m.Files, func(f File) bool { return f.Name == name })
}

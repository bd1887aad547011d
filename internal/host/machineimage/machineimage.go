// Package machineimage keeps the images of machines: root file systems other than that of the host. An administrator puts them into
// a folder, as folders or as OCI archives. An archive is unpacked once, into a folder named by its digest.
//
// An image never changes: its digest is known, and a machine keeps the image with which it was made.
//
// Layer: host. Allowed imports: api, library, contract.
package machineimage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/shorten"
)

const (
	// MaxImages bounds the images of a host.
	MaxImages = 64
	// maxProblem bounds the text of a problem, in bytes.
	maxProblem = 256
)

// Parts are the folders of an image that machines get. etc is a source of files: see package host.
var Parts = []string{"bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr"}

var (
	// validName of an image. It has no characters of paths, and no leading dot.
	validName = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$`)
	// validDigest can be part of a path.
	validDigest = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

// Image is a root file system.
type Image struct {
	Name string
	// Digest of the content: that of the manifest of an archive, or of all files of a folder. Empty with a problem.
	Digest string
	// Dir contains the parts.
	Dir string
	// Problem is the reason why machines cannot use the image, or empty.
	Problem string
}

// Limits of the content of an image.
type Limits struct {
	Bytes int64
	Files int
}

// DefaultLimits are far above every useful image.
var DefaultLimits = Limits{Bytes: 16 << 30, Files: 1 << 20}

// Store contains the images of a host. Its methods are safe for concurrent use.
type Store struct {
	// Dir is the folder of the administrator.
	Dir string
	// Unpacked is the folder with the content of archives, by digest. Only root can enter it.
	Unpacked string
	// Reserved are names that no image can have.
	Reserved []string
	Limits   Limits

	scanning sync.Mutex
	mu       sync.RWMutex
	images   map[string]entry
}

// entry is an image, and the state of its folder or archive when it was read.
type entry struct {
	Image
	stamp string
}

// List returns the images, sorted by name.
func (s *Store) List() (out []Image) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, name := range slices.Sorted(maps.Keys(s.images)) {
		out = append(out, s.images[name].Image)
	}
	return out
}

// Get returns an image. digest is that of a machine which exists, or empty. A machine keeps its archive, even if the archive of that
// name is another one by now.
func (s *Store) Get(name, digest string) (Image, error) {
	s.mu.RLock()
	found, ok := s.images[name]
	s.mu.RUnlock()
	if ok && found.Problem == "" && (digest == "" || digest == found.Digest) {
		return found.Image, nil
	}
	if dir := s.unpacked(digest); dir != "" && atomicfile.Exists(dir) {
		return Image{Name: name, Digest: digest, Dir: dir}, nil
	}
	switch {
	case !ok:
		return Image{}, fmt.Errorf("expected the image %s in %s, found none: put it there", name, s.Dir)
	case found.Problem != "":
		return Image{}, fmt.Errorf("image %s in %s: %s", name, s.Dir, found.Problem)
	}
	return Image{}, fmt.Errorf("expected the image %s with digest %s, with which the machine was made, found %s in %s: put the former image back, or replace the machine", name, digest, found.Digest, s.Dir)
}

// unpacked returns the folder of an archive, or "".
func (s *Store) unpacked(digest string) string {
	if !validDigest.MatchString(digest) {
		return ""
	}
	return filepath.Join(s.Unpacked, strings.TrimPrefix(digest, "sha256:"))
}

// Scan registers the images that are new or changed, and forgets those that are gone. It returns whether the list differs from
// before. It unpacks archives, which can take minutes; the end of ctx ends this, and the list stays. inUse reports whether a machine has a
// digest: others are removed.
func (s *Store) Scan(ctx context.Context, inUse func(digest string) bool) (changed bool, err error) {
	s.scanning.Lock()
	defer s.scanning.Unlock()
	if err := errors.Join(os.MkdirAll(s.Dir, 0o700), os.MkdirAll(s.Unpacked, 0o700), os.Chmod(s.Unpacked, 0o700)); err != nil {
		return false, err
	}
	found, err := s.found()
	if err != nil {
		return false, err
	}
	s.mu.RLock()
	before := s.images
	s.mu.RUnlock()
	images := map[string]entry{}
	for name, files := range found {
		stamp := stampOf(s.Dir, files)
		if old, ok := before[name]; ok && old.stamp == stamp {
			images[name] = old
			continue
		}
		changed = true
		images[name] = entry{s.register(ctx, name, files), stamp}
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
	changed = changed || len(images) != len(before)
	s.mu.Lock()
	s.images = images
	s.mu.Unlock()
	return changed, s.clean(images, inUse)
}

// found returns the names of folders and archives by the name of their image. Other files are ignored, as are those whose name
// begins with a dot: an administrator fills such a folder, and renames it.
func (s *Store) found() (map[string][]string, error) {
	if err := CheckPrivate(s.Dir); err != nil {
		return nil, err
	}
	files, err := os.ReadDir(s.Dir)
	if err != nil {
		return nil, err
	}
	out := map[string][]string{}
	for _, f := range files {
		name, archive := strings.CutSuffix(f.Name(), ".tar")
		if !validName.MatchString(name) || !archive && !f.IsDir() {
			continue
		}
		if out[name] == nil && len(out) == MaxImages {
			return out, nil
		}
		out[name] = append(out[name], f.Name())
	}
	return out, nil
}

// register returns an image with its digest or its problem.
func (s *Store) register(ctx context.Context, name string, files []string) Image {
	image := Image{Name: name}
	err := errors.New("both the folder " + name + " and the archive " + name + ".tar exist: remove one")
	switch {
	case slices.Contains(s.Reserved, name):
		err = errors.New("the name is reserved: choose another one")
	case len(files) == 1 && files[0] == name:
		image.Dir = filepath.Join(s.Dir, name)
		image.Digest, err = s.folderDigest(ctx, image.Dir)
	case len(files) == 1:
		image.Digest, err = s.unpack(ctx, filepath.Join(s.Dir, files[0]))
		image.Dir = s.unpacked(image.Digest)
	}
	if err == nil {
		err = Check(image.Dir)
	}
	if err != nil {
		problem := strings.ToValidUTF8(err.Error(), "?")
		return Image{Name: name, Problem: shorten.To(problem, maxProblem)}
	}
	return image
}

// clean removes unpacked images that are not used any more.
func (s *Store) clean(images map[string]entry, inUse func(digest string) bool) error {
	used := map[string]bool{}
	for _, e := range images {
		used[e.Dir] = true
	}
	dirs, err := os.ReadDir(s.Unpacked)
	for _, dir := range dirs {
		path := filepath.Join(s.Unpacked, dir.Name())
		if !used[path] && !inUse("sha256:"+dir.Name()) {
			err = errors.Join(err, os.RemoveAll(path))
		}
	}
	return err
}

// stampOf changes when one of the files is replaced, or when an archive or the first level of a folder changes.
func stampOf(dir string, files []string) (stamp string) {
	for _, name := range files {
		var st unix.Stat_t
		err := unix.Lstat(filepath.Join(dir, name), &st)
		stamp += fmt.Sprint(name, err, st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
	}
	return stamp
}

// CheckPrivate refuses a file that another user than root can change.
func CheckPrivate(path string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	if mode := os.FileMode(st.Mode & 0o777); st.Uid != 0 || mode&0o022 != 0 {
		return fmt.Errorf("expected that only root can change %s, found user %d and mode %v: run `chown root %s && chmod go-w %s`", path, st.Uid, mode, path, path)
	}
	return nil
}

// limits returns the limits of the store.
func (s *Store) limits() Limits {
	return Limits{Bytes: cmp.Or(s.Limits.Bytes, DefaultLimits.Bytes), Files: cmp.Or(s.Limits.Files, DefaultLimits.Files)}
}

// budget is the rest of the limits.
type budget Limits

// take counts a file.
func (b *budget) take(size int64) error {
	b.Files--
	b.Bytes -= size
	if size < 0 || b.Files < 0 || b.Bytes < 0 {
		return fmt.Errorf("expected an image of at most %d GiB and %d files, found a larger one", DefaultLimits.Bytes>>30, DefaultLimits.Files)
	}
	return nil
}

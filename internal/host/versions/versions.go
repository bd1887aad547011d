// Package versions adds Kubernetes versions to the assets folder of a host, and removes them. A version is a folder with programs. It
// appears and disappears by a rename, so capstand sees all of it or nothing, also after a kill at any point.
//
// Layer: host. Allowed imports: api, library, contract.
package versions

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/blang/semver/v4"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
)

// Programs of every machine, and those of machines with a control plane.
var (
	WorkerPrograms       = []string{"kubelet", "kube-proxy", "kubectl"}
	ControlPlanePrograms = []string{"etcd", "etcdctl", "etcdutl", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}
)

const (
	// unfinished is the prefix of folders on their way in and out. capstand ignores such names.
	unfinished = ".versions-"
	// hidden is the prefix of folders of versions that no new machine can use, while Remove looks for users a second time.
	hidden = ".hidden-"
)

// Store is the folder "kubernetes" of the assets of a host.
type Store struct {
	// Dir contains a folder per version.
	Dir string
	// Limits of sources; the zero value means DefaultLimits.
	Limits Limits

	// step is called before each step; tests kill the process there.
	step func(name string)
}

// Version is an installed version.
type Version struct {
	Name string `json:"version"`
	// Missing are the programs that control planes need and the folder does not have.
	Missing []string `json:"missingForControlPlanes,omitempty"`
	Bytes   int64    `json:"bytes"`
}

func (s *Store) at(name string) {
	if s.step != nil {
		s.step(name)
	}
}

// Valid reports whether name is the name of a version, for example v1.36.3.
func Valid(name string) bool {
	plain, found := strings.CutPrefix(name, "v")
	_, err := semver.Parse(plain)
	return found && err == nil
}

// Names returns the versions of a folder that have the programs, the oldest first.
func Names(dir string, programs ...string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, entry := range entries {
		if Valid(entry.Name()) && len(missing(filepath.Join(dir, entry.Name()), programs)) == 0 {
			names = append(names, entry.Name())
		}
	}
	slices.SortFunc(names, func(a, b string) int { return semver.MustParse(a[1:]).Compare(semver.MustParse(b[1:])) })
	return names, nil
}

// List returns the versions that machines can have, the oldest first.
func (s *Store) List() ([]Version, error) {
	names, err := Names(s.Dir, "kubelet")
	if err != nil {
		return nil, err
	}
	var out []Version
	for _, name := range names {
		dir := filepath.Join(s.Dir, name)
		bytes, err := sizeOf(dir)
		if err != nil {
			return nil, err
		}
		out = append(out, Version{name, missing(dir, ControlPlanePrograms), bytes})
	}
	return out, nil
}

// missing returns the programs that a folder does not have.
func missing(dir string, programs []string) (out []string) {
	for _, name := range programs {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			out = append(out, name)
		}
	}
	return out
}

func sizeOf(dir string) (total int64, err error) {
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		if info, err := entry.Info(); err == nil && info.Mode().IsRegular() {
			total += info.Size()
		}
	}
	return total, err
}

// lock admits one change at a time, restores versions that an interrupted removal hid, and removes all other remains of interrupted changes.
func (s *Store) lock() (unlock func(), err error) {
	if err := os.MkdirAll(s.Dir, 0o755); err != nil {
		return nil, err
	}
	unlock, err = flock(s.Dir)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("expected to be the only command that changes %s, found another one: wait until it has ended: %w", s.Dir, err)
	}
	if err != nil {
		return nil, err
	}
	err = restore(s.Dir)
	left, _ := filepath.Glob(filepath.Join(s.Dir, unfinished+"*"))
	for _, path := range left {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// flock locks a folder, or returns EWOULDBLOCK if another process has the lock.
func flock(path string) (unlock func(), err error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = dir.Close()
		return nil, err
	}
	// A process that is about to start a program has a copy of the descriptor, so closing it does not suffice.
	return func() { _ = unix.Flock(int(dir.Fd()), unix.LOCK_UN); _ = dir.Close() }, nil
}

// Restore makes the versions usable again that an interrupted removal hid. It changes nothing while a command holds the lock.
func Restore(dir string) error {
	if left, err := filepath.Glob(filepath.Join(dir, hidden+"*")); err != nil || len(left) == 0 {
		return err
	}
	unlock, err := flock(dir)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	return restore(dir)
}

// restore gives hidden versions their names. The lock is held. A version that is there again under its name counts.
func restore(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, hidden+"*"))
	for _, path := range left {
		to := filepath.Join(dir, strings.TrimPrefix(filepath.Base(path), hidden))
		if atomicfile.Exists(to) {
			to = filepath.Join(dir, unfinished+filepath.Base(to))
			err = errors.Join(err, atomicfile.Rename(path, to), os.RemoveAll(to))
			continue
		}
		err = errors.Join(err, atomicfile.Rename(path, to))
	}
	return err
}

// Request describes a version to add.
type Request struct {
	// Sources together have the programs of the version.
	Sources []Source
	// Version selects one version of sources that have several. It is optional otherwise.
	Version string
}

// Add adds a version, and returns it. added is false if the host had the version with the same content.
func (s *Store) Add(ctx context.Context, r Request) (v Version, added bool, err error) {
	if r.Version != "" && !Valid(r.Version) {
		return v, false, fmt.Errorf("expected a version such as v1.36.3, found %q", r.Version)
	}
	unlock, err := s.lock()
	if err != nil {
		return v, false, err
	}
	defer unlock()
	work, err := os.MkdirTemp(s.Dir, unfinished)
	if err != nil {
		return v, false, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	s.at("made the folder")
	// The sources are untrusted until all of them are checked, so each gets a folder of its own.
	programs := filepath.Join(work, "programs")
	if err := os.Mkdir(programs, 0o700); err != nil {
		return v, false, err
	}
	for i, source := range r.Sources {
		fetched := filepath.Join(work, fmt.Sprint("source-", i))
		if err := source.unpack(ctx, fetched, programs, r.Version, s.limits()); err != nil {
			return v, false, fmt.Errorf("%s: %w", source.Location, err)
		}
		s.at("unpacked a source")
	}
	name, err := check(ctx, programs, r.Version)
	if err != nil {
		return v, false, err
	}
	s.at("checked")
	added, err = s.publish(programs, name)
	if err != nil {
		return v, false, err
	}
	s.at("published")
	dir := filepath.Join(s.Dir, name)
	size, err := sizeOf(dir)
	return Version{name, missing(dir, ControlPlanePrograms), size}, added, err
}

// publish gives the checked folder its final name, unless the version exists.
func (s *Store) publish(dir, name string) (bool, error) {
	target := filepath.Join(s.Dir, name)
	if atomicfile.Exists(target) {
		same, err := equal(dir, target)
		if err == nil && !same {
			err = fmt.Errorf("expected a host without Kubernetes %s, found %s with other content: machines may use it. Remove it first with `capstan host versions remove %s`", name, target, name)
		}
		return false, err
	}
	if err := errors.Join(os.Chmod(dir, 0o755), atomicfile.SyncDir(dir)); err != nil {
		return false, err
	}
	s.at("synchronized")
	return true, atomicfile.Rename(dir, target)
}

// equal reports whether two folders have the same files with the same content.
func equal(a, b string) (bool, error) {
	sumsA, errA := sums(a)
	sumsB, errB := sums(b)
	return bytes.Equal(sumsA, sumsB), errors.Join(errA, errB)
}

// sums is a description of a folder's files.
func sums(dir string) ([]byte, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		if entry.Type() == fs.ModeSymlink {
			target, err := os.Readlink(path)
			if err != nil {
				return nil, err
			}
			fmt.Fprintf(&out, "%q -> %q\n", entry.Name(), target)
			continue
		}
		file, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		hash := sha256.New()
		_, err = io.Copy(hash, file)
		if err := errors.Join(err, file.Close()); err != nil {
			return nil, err
		}
		fmt.Fprintf(&out, "%q %x\n", entry.Name(), hash.Sum(nil))
	}
	return out.Bytes(), nil
}

// ErrNotInstalled is the error for the removal of a version that the host does not have.
var ErrNotInstalled = errors.New("this host does not have the version: `capstan host versions list` lists all")

// Remove removes a version. users returns the names of its users. Remove refuses a version with users, unless force is true.
func (s *Store) Remove(name string, users func() ([]string, error), force bool) error {
	if !Valid(name) {
		return fmt.Errorf("expected a version such as v1.36.3, found %q", name)
	}
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	target := filepath.Join(s.Dir, name)
	if !atomicfile.Exists(target) {
		return fmt.Errorf("expected Kubernetes %s in %s: %w", name, s.Dir, ErrNotInstalled)
	}
	if !force {
		if target, err = s.hide(name, users); err != nil {
			return err
		}
	}
	trash := filepath.Join(s.Dir, unfinished+"removed-"+name)
	if err := atomicfile.Rename(target, trash); err != nil {
		return err
	}
	s.at("renamed")
	return os.RemoveAll(trash)
}

// hide returns the folder of a version without users, under a name that capstand ignores. A command that is killed before the second
// look at the users leaves a hidden folder, which the next command or capstand restores.
func (s *Store) hide(name string, users func() ([]string, error)) (string, error) {
	if err := unused(name, users); err != nil {
		return "", err
	}
	s.at("found unused")
	target, path := filepath.Join(s.Dir, name), filepath.Join(s.Dir, hidden+name)
	if err := atomicfile.Rename(target, path); err != nil {
		return "", err
	}
	s.at("hidden")
	// capstand may have accepted a machine between the first look and the rename. It accepts none now.
	if err := unused(name, users); err != nil {
		return "", errors.Join(err, atomicfile.Rename(path, target))
	}
	s.at("found unused again")
	return path, nil
}

func unused(name string, users func() ([]string, error)) error {
	found, err := users()
	if err == nil && len(found) > 0 {
		err = fmt.Errorf("expected a version that nothing uses, found that %s is used by %s: upgrade or delete them first, or repeat the command with --force", name, strings.Join(found, ", "))
	}
	return err
}

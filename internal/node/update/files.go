package update

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/foreignfile"
	"capstan.dev/capstan/internal/node/bootstrap"
	"capstan.dev/capstan/internal/node/cloudconfig"
)

// snapshot keeps copies of files below dir. It is complete or does not exist. Only root can read it.
type snapshot struct {
	// root is the prefix of all paths; empty on a machine.
	root string
	dir  string
}

// copiesBeside returns the snapshot of the update with this journal.
func copiesBeside(journal string) snapshot {
	return snapshot{dir: filepath.Join(filepath.Dir(journal), "previous")}
}

// saved is a file of a snapshot.
type saved struct {
	Path string      `json:"path"`
	Mode fs.FileMode `json:"mode"`
	UID  int         `json:"uid"`
	GID  int         `json:"gid"`
	// Copy is the name of the copy in the snapshot.
	Copy string `json:"copy,omitempty"`
	// Link is the target of a symbolic link, which has no copy.
	Link string `json:"link,omitempty"`
}

// manifest lists the files of a snapshot.
type manifest struct {
	// Paths of files and folders that were saved, whether they existed or not.
	Paths []string `json:"paths"`
	Files []saved  `json:"files"`
}

func (s snapshot) manifestPath() string { return filepath.Join(s.dir, "manifest.json") }

// take replaces the snapshot by one of the paths. A folder is saved with all regular files and symbolic links in it.
func (s snapshot) take(paths []string) error {
	unfinished := s.dir + ".new"
	if err := errors.Join(os.RemoveAll(unfinished), os.RemoveAll(s.dir), os.MkdirAll(unfinished, 0o700)); err != nil {
		return err
	}
	m := manifest{Paths: paths}
	for _, path := range paths {
		err := s.files(path, func(f found) error {
			file, err := f.saveTo(unfinished, strconv.Itoa(len(m.Files)))
			if err == nil {
				m.Files = append(m.Files, file)
			}
			return atomicfile.IgnoreMissing(err) // It was removed meanwhile.
		})
		if err != nil {
			return fmt.Errorf("saving %s: %w", path, err)
		}
	}
	if err := atomicfile.WriteJSON(filepath.Join(unfinished, "manifest.json"), m, 0o600); err != nil {
		return err
	}
	return atomicfile.Rename(unfinished, s.dir)
}

// found is a regular file or a symbolic link. Users of the machine can be able to change its path, so it is named below an open folder.
type found struct {
	folder *os.Root
	name   string
	path   string
	isLink bool
}

// saveTo copies a file to dir, or notes the target of a link. Content, owner and mode are those of the same file: a restore gives nobody a
// copy of a file that replaced it meanwhile.
func (f found) saveTo(dir, name string) (saved, error) {
	if f.isLink {
		target, err := f.folder.Readlink(f.name)
		if err != nil {
			return saved{}, err
		}
		info, err := f.folder.Lstat(f.name)
		if err != nil {
			return saved{}, err
		}
		return savedAs(f.path, info, saved{Link: target}), nil
	}
	data, info, err := foreignfile.ReadIn(f.folder, f.name, cloudconfig.MaxFileBytes)
	if err != nil {
		return saved{}, err
	}
	return savedAs(f.path, info, saved{Copy: name}), atomicfile.WriteFile(filepath.Join(dir, name), data, 0o600)
}

func savedAs(path string, info fs.FileInfo, file saved) saved {
	stat := info.Sys().(*syscall.Stat_t)
	file.Path, file.Mode, file.UID, file.GID = path, info.Mode().Perm(), int(stat.Uid), int(stat.Gid)
	return file
}

// files calls f with each regular file and symbolic link at or below path. A missing path has none.
func (s snapshot) files(path string, f func(found) error) error {
	folder, name, err := foreignfile.Parent(s.root, path)
	if err != nil {
		return atomicfile.IgnoreMissing(err)
	}
	defer func() { _ = folder.Close() }()
	info, err := folder.Lstat(name)
	if err != nil {
		return atomicfile.IgnoreMissing(err)
	}
	visit := func(below string, mode fs.FileMode) error {
		if !mode.IsRegular() && mode.Type() != fs.ModeSymlink {
			return nil
		}
		return f(found{folder, below, filepath.Join(filepath.Dir(path), below), mode.Type() == fs.ModeSymlink})
	}
	if !info.IsDir() {
		return visit(name, info.Mode())
	}
	return fs.WalkDir(folder.FS(), name, func(below string, entry fs.DirEntry, err error) error {
		if err != nil {
			return atomicfile.IgnoreMissing(err)
		}
		return visit(below, entry.Type())
	})
}

// restore writes all files of the snapshot, and removes the files that did not exist. A file with an error does not stop it: a user of the
// machine can block a file in an own folder, and the services need the others.
func (s snapshot) restore() error {
	var m manifest
	if err := atomicfile.ReadJSON(s.manifestPath(), &m); err != nil {
		return err
	}
	var errs []error
	for _, file := range m.Files {
		if err := s.restoreFile(file); err != nil {
			errs = append(errs, fmt.Errorf("restoring %s: %w", file.Path, err))
		}
	}
	for _, path := range m.Paths {
		err := s.files(path, func(f found) error {
			if slices.ContainsFunc(m.Files, func(file saved) bool { return file.Path == f.path }) {
				return nil
			}
			return atomicfile.IgnoreMissing(f.folder.Remove(f.name))
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("removing the new files of %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

func (s snapshot) restoreFile(file saved) error {
	if file.Link != "" {
		return s.restoreLink(file)
	}
	data, err := os.ReadFile(filepath.Join(s.dir, file.Copy))
	if err != nil || s.unchanged(file, data) {
		return err
	}
	return bootstrap.ReplaceFile(s.root, file.Path, data, file.Mode, file.UID, file.GID)
}

// unchanged reports whether a file has the saved content, owner and mode.
func (s snapshot) unchanged(file saved, data []byte) bool {
	folder, name, err := foreignfile.Parent(s.root, file.Path)
	if err != nil {
		return false
	}
	defer func() { _ = folder.Close() }()
	now, info, err := foreignfile.ReadIn(folder, name, cloudconfig.MaxFileBytes)
	return err == nil && bytes.Equal(now, data) && savedAs(file.Path, info, saved{Copy: file.Copy}) == file
}

func (s snapshot) restoreLink(file saved) error {
	folder, name, err := foreignfile.MakeParent(s.root, file.Path)
	if err != nil {
		return err
	}
	defer func() { _ = folder.Close() }()
	if now, err := folder.Readlink(name); err == nil && now == file.Link {
		return nil
	}
	temporary := name + ".capstan-link"
	if err := foreignfile.Symlink(folder, file.Link, temporary, file.UID, file.GID); err != nil {
		return err
	}
	return errors.Join(folder.Rename(temporary, name), foreignfile.Sync(folder))
}

// read returns the saved content of a file.
func (s snapshot) read(path string) ([]byte, error) {
	var m manifest
	if err := atomicfile.ReadJSON(s.manifestPath(), &m); err != nil {
		return nil, err
	}
	for _, file := range m.Files {
		if file.Path == path {
			return os.ReadFile(filepath.Join(s.dir, file.Copy))
		}
	}
	return nil, fmt.Errorf("%s: %w", path, fs.ErrNotExist)
}

// remove deletes the snapshot.
func (s snapshot) remove() error { return errors.Join(os.RemoveAll(s.dir), os.RemoveAll(s.dir+".new")) }

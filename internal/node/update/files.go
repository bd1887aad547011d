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
		err := s.files(path, func(name string, info fs.FileInfo) error {
			file := saved{Path: name, Mode: info.Mode().Perm(), Copy: strconv.Itoa(len(m.Files))}
			if stat, ok := info.Sys().(*syscall.Stat_t); ok {
				file.UID, file.GID = int(stat.Uid), int(stat.Gid)
			}
			err := s.copyTo(unfinished, &file, info.Mode())
			m.Files = append(m.Files, file)
			return err
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

// copyTo copies a file to dir, or notes the target of a link.
func (s snapshot) copyTo(dir string, file *saved, mode fs.FileMode) error {
	path := filepath.Join(s.root, file.Path)
	if mode.Type() == fs.ModeSymlink {
		target, err := os.Readlink(path)
		file.Copy, file.Link = "", target
		return err
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return atomicfile.WriteFile(filepath.Join(dir, file.Copy), data, 0o600)
}

// files calls f with each regular file and symbolic link at or below path. A missing path has none.
func (s snapshot) files(path string, f func(name string, info fs.FileInfo) error) error {
	return filepath.WalkDir(filepath.Join(s.root, path), func(full string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !entry.Type().IsRegular() && entry.Type() != fs.ModeSymlink {
			return err
		}
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) { // It was replaced meanwhile.
			return nil
		}
		if err != nil {
			return err
		}
		name, err := filepath.Rel(filepath.Join(s.root, "/"), full)
		if err != nil {
			return err
		}
		return f("/"+name, info)
	})
}

// restore writes all files of the snapshot, and removes the files that did not exist.
func (s snapshot) restore() error {
	var m manifest
	if err := atomicfile.ReadJSON(s.manifestPath(), &m); err != nil {
		return err
	}
	for _, file := range m.Files {
		if err := s.restoreFile(file); err != nil {
			return fmt.Errorf("restoring %s: %w", file.Path, err)
		}
	}
	for _, path := range m.Paths {
		err := s.files(path, func(name string, _ fs.FileInfo) error {
			if slices.ContainsFunc(m.Files, func(f saved) bool { return f.Path == name }) {
				return nil
			}
			return os.Remove(filepath.Join(s.root, name))
		})
		if err != nil {
			return fmt.Errorf("removing the new files of %s: %w", path, err)
		}
	}
	return nil
}

func (s snapshot) restoreFile(file saved) error {
	if file.Link != "" {
		return s.restoreLink(file)
	}
	data, err := os.ReadFile(filepath.Join(s.dir, file.Copy))
	if err != nil {
		return err
	}
	path := filepath.Join(s.root, file.Path)
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, data) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := atomicfile.WriteFile(path, data, file.Mode); err != nil {
			return err
		}
	}
	// The update can have changed only the rights, and an earlier attempt can have ended before these steps.
	return errors.Join(os.Chown(path, file.UID, file.GID), os.Chmod(path, file.Mode))
}

func (s snapshot) restoreLink(file saved) error {
	path := filepath.Join(s.root, file.Path)
	if now, err := os.Readlink(path); err == nil && now == file.Link {
		return nil
	}
	temporary := path + ".capstan-link"
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), atomicfile.Remove(temporary)); err != nil {
		return err
	}
	if err := errors.Join(os.Symlink(file.Link, temporary), os.Lchown(temporary, file.UID, file.GID)); err != nil {
		return err
	}
	return atomicfile.Rename(temporary, path)
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

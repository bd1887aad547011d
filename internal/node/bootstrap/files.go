package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/changes"
	"capstan.dev/capstan/internal/foreignfile"
	"capstan.dev/capstan/internal/node/cloudconfig"
)

// writeFiles writes and records the files of steps in their order, each completely or not at all. Those before one with an error are
// written.
func (r *Runner) writeFiles(steps []step) error {
	var files []*newFile
	var names []string
	var failed error
	for i, s := range steps {
		r.announce(s)
		file, err := r.stage(s, i)
		if err != nil {
			failed = fmt.Errorf("%s: %w", s.name, err)
			break
		}
		files, names = append(files, file), append(names, s.name)
	}
	if len(files) == 0 {
		return failed
	}
	if err := commit(files); err != nil {
		return errors.Join(failed, fmt.Errorf("write_files: %w", err))
	}
	return errors.Join(failed, r.done(names...))
}

// stage writes the file of a step beside its path. The recorded length of the file before the step prevents that content is appended twice.
func (r *Runner) stage(s step, index int) (*newFile, error) {
	if !s.file.Append {
		return stage(r.Root, *s.file, index)
	}
	old, err := foreignfile.ReadPath(r.Root, s.file.Path, cloudconfig.MaxFileBytes)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	before, known := r.record.Appended[s.name]
	if !known {
		before = int64(len(old))
		r.record.Appended[s.name] = before
		if err := r.save(); err != nil {
			return nil, err
		}
	}
	file := *s.file
	file.Content = append(old[:min(before, int64(len(old)))], file.Content...)
	return stage(r.Root, file, index)
}

// WriteFile writes a file below root completely or not at all. It does not append.
func WriteFile(root string, f cloudconfig.File) error {
	file, err := stage(root, f, 0)
	if err != nil {
		return err
	}
	return commit([]*newFile{file})
}

// ReplaceFile writes a file below root completely or not at all.
func ReplaceFile(root, path string, content []byte, mode os.FileMode, uid, gid int) error {
	file, err := stageAt(root, path, 0, content, mode, uid, gid)
	if err != nil {
		return err
	}
	return commit([]*newFile{file})
}

// newFile is a file beside the path that it will have. All calls name it below its open folder: when a machine is updated, users of the
// machine can replace the folders of the path by links.
type newFile struct {
	*os.File
	folder *os.Root
	// temporary and name are the names of the file in the folder, now and later.
	temporary, name string
	path            string
}

// stage writes a file of bootstrap data beside its path below root.
func stage(root string, f cloudconfig.File, index int) (*newFile, error) {
	uid, gid, err := lookupOwner(f.Owner)
	if err != nil {
		return nil, err
	}
	return stageAt(root, f.Path, index, f.Content, f.Mode, uid, gid)
}

// stageAt writes a file beside its path below root, with its owner and mode, and creates its folder. Only root can read it before it has
// them. Two files of one commit have different indexes, because a link can make two paths the same.
func stageAt(root, path string, index int, content []byte, mode os.FileMode, uid, gid int) (*newFile, error) {
	folder, name, err := foreignfile.MakeParent(root, path)
	if err != nil {
		return nil, err
	}
	temporary := fmt.Sprintf("%s%s%d", name, cloudconfig.TemporarySuffix, index)
	file, err := foreignfile.Create(folder, temporary)
	if err != nil {
		return nil, errors.Join(err, folder.Close())
	}
	out := &newFile{file, folder, temporary, name, path}
	_, err = file.Write(content)
	if os.Getuid() == 0 {
		err = errors.Join(err, file.Chown(uid, gid))
	}
	if err = errors.Join(err, file.Chmod(mode)); err != nil {
		return nil, errors.Join(err, out.discard())
	}
	return out, nil
}

// discard removes the file, unless it has its path.
func (f *newFile) discard() error {
	_ = f.Close()
	return errors.Join(atomicfile.IgnoreMissing(f.folder.Remove(f.temporary)), f.folder.Close())
}

// commit gives files their paths, in their order, and returns when all are on the disk: then their steps are recorded.
func commit(files []*newFile) error {
	defer func() {
		for _, f := range files {
			_ = f.discard()
		}
	}()
	var syncs, folders []func() error
	for _, f := range files {
		syncs = append(syncs, f.Sync)
	}
	if err := atomicfile.Together(syncs...); err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, f := range files {
		if err := f.folder.Rename(f.temporary, f.name); err != nil {
			return err
		}
		if folder := filepath.Dir(f.path); !seen[folder] {
			seen[folder] = true
			folders = append(folders, func() error { return foreignfile.Sync(f.folder) })
		}
	}
	return atomicfile.Together(folders...)
}

// lookupOwner parses "user" or "user:group", as names or numbers. The default is root.
func lookupOwner(owner string) (uid, gid int, err error) {
	name, group, hasGroup := strings.Cut(owner, ":")
	if name != "" && name != "root" {
		if uid, err = strconv.Atoi(name); err != nil {
			u, err := user.Lookup(name)
			if err != nil {
				return 0, 0, fmt.Errorf("owner: %w", err)
			}
			uid, _ = strconv.Atoi(u.Uid)
			gid, _ = strconv.Atoi(u.Gid)
		}
	}
	if hasGroup && group != "" {
		if gid, err = strconv.Atoi(group); err != nil {
			g, err := user.LookupGroup(group)
			if err != nil {
				return 0, 0, fmt.Errorf("owner: %w", err)
			}
			gid, _ = strconv.Atoi(g.Gid)
		}
	}
	return uid, gid, nil
}

// Erase overwrites a file with zeros and removes it. A missing file is no error.
func Erase(path string) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("erasing the bootstrap data: %w", err)
	}
	info, err := file.Stat()
	if err == nil {
		_, err = file.WriteAt(make([]byte, info.Size()), 0)
	}
	if err := errors.Join(err, file.Sync(), file.Close(), os.Remove(path)); err != nil {
		return fmt.Errorf("erasing the bootstrap data: %w", err)
	}
	return nil
}

// waitForFile returns when the file exists or ctx has ended. It creates the folder if necessary.
func waitForFile(ctx context.Context, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return changes.WaitFor(ctx, path)
}

// Package cgroup creates, fills, kills and removes cgroups on hosts with cgroup v2, v1, or both.
//
// Layer: host. Allowed imports: api, library, contract.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/backoff"
)

// Version returns 2 on a host with only the unified hierarchy, otherwise 1.
func Version() int {
	var st unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &st); err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
		return 2
	}
	return 1
}

// Group is the path of a cgroup below the root of each hierarchy, for example /capstan/3f2a/m-1.
type Group string

// dirs lists the group's folder in each hierarchy of the host.
func (g Group) dirs() ([]string, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("looking for the cgroup hierarchies: %w", err)
	}
	var dirs []string
	for _, mount := range mounts {
		if strings.HasPrefix(mount.Mountpoint, "/sys/fs/cgroup") {
			dirs = append(dirs, filepath.Join(mount.Mountpoint, string(g)))
		}
	}
	slices.Sort(dirs)
	return slices.Compact(dirs), nil
}

// Add creates the group and moves a process into it.
func (g Group) Add(pid int) error {
	dirs, err := g.dirs()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := fillCpuset(dir); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return fmt.Errorf("moving process %d into its cgroup: %w", pid, err)
		}
	}
	return nil
}

// fillCpuset copies the parent's CPUs and memory nodes into a new v1 cpuset, because an empty cpuset accepts no process.
func fillCpuset(dir string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		file := filepath.Join(dir, name)
		now, err := os.ReadFile(file)
		if err != nil || strings.TrimSpace(string(now)) != "" || Version() == 2 {
			continue
		}
		if err := fillCpuset(filepath.Dir(dir)); err != nil {
			return err
		}
		parent, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(file, parent, 0); err != nil {
			return err
		}
	}
	return nil
}

// Exists returns whether any hierarchy has the group.
func (g Group) Exists() bool {
	dirs, err := g.dirs()
	return err != nil || slices.ContainsFunc(dirs, func(d string) bool {
		_, err := os.Stat(d)
		return err == nil
	})
}

// Children lists the names of the direct subgroups in any hierarchy.
func (g Group) Children() []string {
	dirs, _ := g.dirs()
	var names []string
	for _, dir := range dirs {
		entries, _ := os.ReadDir(dir) // Not every hierarchy has the group.
		for _, entry := range entries {
			if entry.IsDir() {
				names = append(names, entry.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Remove kills all processes in the group and its subgroups, and removes the groups. It returns when they are gone, or with
// ctx's error.
func (g Group) Remove(ctx context.Context) error {
	for pauses := backoff.Doubling(5*time.Millisecond, 200*time.Millisecond); ; {
		err := g.removeOnce()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("removing cgroup %s: %w (%w)", g, err, ctx.Err())
		// A killed process leaves its cgroup when it has ended. cgroup v1 has no event for that.
		case <-time.After(pauses.Step()):
		}
	}
}

func (g Group) removeOnce() error {
	dirs, err := g.dirs()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if killErr := killTree(dir); killErr != nil {
			err = errors.Join(err, killErr)
		}
	}
	for _, dir := range dirs {
		err = errors.Join(err, removeTree(dir))
	}
	return err
}

// killTree sends SIGKILL to all processes below dir.
func killTree(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0); err == nil {
		return nil // v2, kernel 5.14 or newer
	}
	return killEach(dir)
}

// killEach is killTree without cgroup.kill.
func killEach(dir string) error {
	return walk(dir, func(root *os.Root, group string) error {
		// A frozen process of v1 dies only after it is thawed.
		_ = root.WriteFile(path.Join(group, "freezer.state"), []byte("THAWED"), 0)
		procs, err := root.ReadFile(path.Join(group, "cgroup.procs"))
		if errors.Is(err, unix.EOPNOTSUPP) {
			return nil // A threaded group of v2: the group above that is its domain lists its processes.
		}
		if err != nil {
			return ignoreGone(err)
		}
		for _, field := range strings.Fields(string(procs)) {
			// 0 is a process of another pid namespace. Killing it would kill capstand's own process group.
			if pid, err := strconv.Atoi(field); err == nil && pid > 1 {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
		return nil
	})
}

// removeTree removes dir and its subfolders, the deepest first.
func removeTree(dir string) error {
	var groups []string
	err := walk(dir, func(_ *os.Root, group string) error { groups = append(groups, group); return nil })
	if err != nil || len(groups) == 0 {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return ignoreGone(err)
	}
	defer func() { _ = root.Close() }()
	for _, group := range slices.Backward(groups[1:]) {
		if err := ignoreGone(root.Remove(group)); err != nil {
			return err
		}
	}
	return ignoreGone(unix.Rmdir(dir))
}

// walk visits the group of dir, ".", and its subgroups by their paths in root. Root in a machine can make subgroups whose whole paths are
// longer than the kernel accepts: root opens one folder after the other.
func walk(dir string, visit func(root *os.Root, group string) error) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return ignoreGone(err)
	}
	defer func() { _ = root.Close() }()
	return fs.WalkDir(root.FS(), ".", func(group string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return ignoreGone(err)
		case !entry.IsDir():
			return nil
		}
		return visit(root, group)
	})
}

// ignoreGone drops the error of a cgroup that was removed in between.
func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// RemoveEmpty removes the group if it is empty.
func (g Group) RemoveEmpty() {
	dirs, _ := g.dirs()
	for _, dir := range dirs {
		_ = unix.Rmdir(dir) // The kernel refuses to remove a group that is not empty.
	}
}

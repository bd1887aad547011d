package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"

	"capstan.dev/capstan/internal/testenv/expect"
)

// TestRemove: a group is removed with its processes and subgroups, also if the path of a subgroup is longer than the kernel accepts. Root in
// a machine can make such groups.
func TestRemove(t *testing.T) {
	g := Group(fmt.Sprintf("/capstan-test-%d", os.Getpid()))
	sleeper := exec.CommandContext(t.Context(), "sleep", "3600")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	if err := g.Add(sleeper.Process.Pid); err != nil {
		t.Skipf("no group can be made here: %v", err)
	}
	dirs, err := g.dirs()
	if err != nil {
		t.Fatal(err)
	}
	deep := 0
	for _, dir := range dirs {
		if makeDeep(dir) == nil {
			deep++
		}
	}
	if deep == 0 {
		t.Error("no hierarchy has deep subgroups")
	}
	if err := g.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := sleeper.Wait(); err == nil || g.Exists() {
		t.Errorf("the process ended with %v, and the group exists: %v", err, g.Exists())
	}
	if err := g.Remove(t.Context()); err != nil {
		t.Errorf("the second time: %v", err)
	}
}

// TestKillThreaded: the processes of a group are killed without cgroup.kill although it has a threaded subgroup, whose processes the kernel does
// not list. Root in a machine can make one.
func TestKillThreaded(t *testing.T) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
	if err != nil || len(mounts) == 0 {
		t.Skipf("no hierarchy of cgroup v2: %v", err)
	}
	dir := filepath.Join(mounts[0].Mountpoint, fmt.Sprintf("capstan-threaded-%d", os.Getpid()))
	threaded := filepath.Join(dir, "threaded")
	t.Cleanup(func() {
		expect.Eventually(t, "the group is removed", func() error { return removeTree(dir) })
	})
	expect.NoError(t, os.MkdirAll(threaded, 0o755))
	expect.NoError(t, os.WriteFile(filepath.Join(threaded, "cgroup.type"), []byte("threaded"), 0))
	sleeper := exec.CommandContext(t.Context(), "sleep", "3600")
	expect.NoError(t, sleeper.Start())
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(sleeper.Process.Pid)), 0))
	expect.NoError(t, killEach(dir))
	if err := sleeper.Wait(); err == nil {
		t.Error("the process was not killed")
	}
}

// makeDeep makes subgroups in each other, whose paths have 5000 characters.
func makeDeep(dir string) error {
	root, err := os.OpenRoot(dir)
	for range 25 {
		name := strings.Repeat("x", 200)
		if err == nil {
			err = root.Mkdir(name, 0o755)
		}
		if err != nil {
			break
		}
		inner, errOpen := root.OpenRoot(name)
		err = errors.Join(errOpen, root.Close())
		root = inner
	}
	return errors.Join(err, root.Close())
}

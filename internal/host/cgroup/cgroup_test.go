package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
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

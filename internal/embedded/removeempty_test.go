package embedded

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
)

// TestRemoveEmpty: `capstan down` keeps only the backups.
func TestRemoveEmpty(t *testing.T) {
	root := filepath.Join(t.TempDir(), "backups")
	for _, dir := range []string{"default/gone", "default/kept", "other/gone"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	kept := filepath.Join(root, "default/kept/etcd-1.db")
	if err := os.WriteFile(kept, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := removeEmpty(root); err != nil {
		t.Fatal(err)
	}
	for path, there := range map[string]bool{kept: true, filepath.Join(root, "default/gone"): false, filepath.Join(root, "other"): false} {
		if _, err := os.Stat(path); (err == nil) != there {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := os.Remove(kept); err != nil {
		t.Fatal(err)
	}
	if err := removeEmpty(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the empty folder still exists: %v", err)
	}
}

// TestUpAfterDown: a plane can be created again beside everything that `capstan down` has kept: backups, the folder of capstand.service with
// its mounts, and lost+found of a root folder with a file system of its own.
func TestUpAfterDown(t *testing.T) {
	l := Layout{Root: newRoot(t)}
	mount := func(path string) {
		expect.NoError(t, errors.Join(os.MkdirAll(path, 0o711), unix.Mount("tmpfs", path, "tmpfs", 0, "")))
		t.Cleanup(func() { expect.NoError(t, unix.Unmount(path, unix.MNT_DETACH)) })
	}
	mount(l.Root)
	mount(filepath.Join(l.JoinedHost(), "machines/m"))
	kept := []string{filepath.Join(l.Backups(), "default/a/etcd-1.db"), filepath.Join(l.JoinedHost(), "machines/m/rootfs"), filepath.Join(l.JoinedHost(), "volumes/v/disk.img"), filepath.Join(l.Root, "lost+found/1")}
	for _, path := range append([]string{l.State(), l.commandLock(), l.AdminKubeconfig(), filepath.Join(l.HostRoot("local"), "host-id")}, kept...) {
		expect.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o711), os.WriteFile(path, nil, 0o600)))
	}
	expect.NoError(t, removeRoot(l))
	if found := slices.Collect(maps.Keys(content(t, l.Root))); len(found) != len(kept) {
		t.Errorf("after `capstan down`, there are %v", found)
	}
	expect.NoError(t, prepareRoot(l))
	for _, path := range kept {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	expect.NoError(t, os.WriteFile(filepath.Join(l.Root, "other"), nil, 0o600))
	if err := prepareRoot(l); err == nil || !strings.Contains(err.Error(), "found other files") {
		t.Errorf("a folder with other files: %v", err)
	}
}

// TestDownWithoutState: with a missing or damaged state, the folders of the hosts have the list of machines, which `capstan down` does not
// delete without a capstand. Without such folders, it removes the installation.
func TestDownWithoutState(t *testing.T) {
	for name, state := range map[string]string{"missing": "", "damaged": "{"} {
		l := Layout{Root: newRoot(t)}
		spec := filepath.Join(l.HostRoot("local"), "machines/m/spec.json")
		for _, path := range []string{l.commandLock(), spec} {
			expect.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o711), os.WriteFile(path, nil, 0o600)))
		}
		if state != "" {
			expect.NoError(t, os.WriteFile(l.State(), []byte(state), 0o600))
		}
		o := Options{Root: l.Root, Assets: t.TempDir()}
		err := Down(t.Context(), o, false, func(string) {})
		if _, there := os.Stat(spec); err == nil || there != nil || !strings.Contains(err.Error(), "capstand, which removes the machines, in "+o.Assets) {
			t.Errorf("%s state: %v, %v", name, err, there)
		}
		expect.NoError(t, os.RemoveAll(l.HostRoot("local")))
		if err := Down(t.Context(), o, false, func(string) {}); err != nil {
			t.Errorf("%s state, without hosts: %v", name, err)
		}
		if _, err := os.Stat(l.Root); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s state: the folder remains: %v", name, err)
		}
	}
}

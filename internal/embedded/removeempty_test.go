package embedded

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
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

// TestUpAfterDown: a plane can be created again beside the backups that `capstan down` has kept.
func TestUpAfterDown(t *testing.T) {
	l := Layout{Root: newRoot(t)}
	kept := filepath.Join(l.Backups(), "default/a/etcd-1.db")
	for _, path := range []string{kept, l.State(), l.commandLock(), l.AdminKubeconfig()} {
		must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o711), os.WriteFile(path, nil, 0o600)))
	}
	must(t, removeRoot(l))
	if found := slices.Collect(maps.Keys(content(t, l.Root))); len(found) != 1 {
		t.Errorf("after `capstan down`, there are %v", found)
	}
	must(t, prepareRoot(l))
	if _, err := os.Stat(kept); err != nil {
		t.Error(err)
	}
}

package agent

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/node/localvolume"
)

// Without an answer about the limits of the disk, no volume is created without limits, and no folder is removed, because it is the
// record of the limits. The agent tries again.
func TestVolumeWithUnknownLimits(t *testing.T) {
	const a, b = "pvc-00000000-0000-4000-8000-00000000000a", "pvc-00000000-0000-4000-8000-00000000000b"
	dir := t.TempDir()
	v := &volumes{folders: localvolume.Folders{Dir: filepath.Join(dir, "volumes"), Top: dir}}
	must(t, v.create(t.Context(), a, 1<<20))
	must(t, v.removeFolder(t.Context(), a))

	v.folders.Top = filepath.Join(dir, "unknown")
	if err := v.create(t.Context(), b, 1<<20); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a volume without limits: %v", err)
	}
	if err := v.removeFolder(t.Context(), b); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("limits without a volume: %v", err)
	}
	if _, err := os.Stat(filepath.Join(v.folders.Dir, b)); err != nil {
		t.Error(err)
	}
}

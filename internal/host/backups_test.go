package host

import (
	"os"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
)

// TestBackups: a control plane machine sees the backups of its own cluster, and no other machine sees any.
func TestBackups(t *testing.T) {
	root := t.TempDir()
	h := &platform{config: Config{Backups: root}, backupFolders: looks{byFiles: map[string]*look{}}}
	for _, c := range []struct {
		spec *hostpb.MachineSpec
		want string
		bad  bool
	}{
		{spec: &hostpb.MachineSpec{Namespace: "default", Cluster: "demo", ControlPlane: true}, want: "default/demo"},
		{spec: &hostpb.MachineSpec{Namespace: "default", Cluster: "demo"}},
		{spec: &hostpb.MachineSpec{ControlPlane: true}},
		{spec: &hostpb.MachineSpec{Namespace: "..", Cluster: "demo", ControlPlane: true}, bad: true},
		{spec: &hostpb.MachineSpec{Namespace: "default", Cluster: "a/../../b", ControlPlane: true}, bad: true},
	} {
		got, err := h.backups(c.spec)
		if (err != nil) != c.bad || c.want == "" && got != "" || c.want != "" && got != filepath.Join(root, c.want) {
			t.Errorf("%v: %q, %v", c.spec, got, err)
		}
		if got == "" {
			continue
		}
		if info, err := os.Stat(got); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", got, info, err)
		}
	}
}

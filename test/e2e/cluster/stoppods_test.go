//go:build e2e

package cluster

import (
	"os"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

// stopsInOrder starts a pod on the control plane machine that needs three seconds to end, and another one that never ends. The
// function that it returns checks after the deletion of the cluster that the first one has ended in order: its mark is in the
// folder of backups, which outlives the machine.
func stopsInOrder(t *testing.T, c *harness.Cluster) (check func(*testing.T)) {
	t.Helper()
	node, folder := c.ControlPlaneMachine(t).Name, filepath.Join(c.Namespace, c.Name)
	const ends = `trap 'sleep 3; echo done > /out/ended; exit 0' TERM; while :; do sleep 0.1; done`
	out := filepath.Join("/var/lib/capstan/backups", folder)
	c.Apply(t, harness.ShellPod("ends", node, out, 30, ends, "")+
		harness.ShellPod("never-ends", node, out, 5, `trap '' TERM; while :; do sleep 0.1; done`, ""))
	c.MustKubectl(t, "wait", "--for=condition=Ready", "pod/ends", "pod/never-ends", "--timeout=3m")
	return func(t *testing.T) {
		t.Helper()
		if got, err := os.ReadFile(filepath.Join(plane.Root, "backups", folder, "ended")); string(got) != "done\n" {
			t.Errorf("the pod did not end in order: its mark is %q, %v", got, err)
		}
	}
}

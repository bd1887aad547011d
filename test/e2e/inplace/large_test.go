//go:build e2e && inplace

package inplace

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// longLimit is the time for all machines of a role. Each is interrupted in each step.
const longLimit = 20 * time.Minute

// Rows ALL-17, CP-21: a cluster with three control plane machines and five workers goes to the next minor version in place. In each
// step of each machine, the process of the update is killed, and in turn capstand, the manager or an API server. No container
// restarts, no acknowledged write is lost, and the machines stay.
func TestLargeCluster(t *testing.T) {
	from := harness.FormerMinor(t)
	c := plane.CreateCluster(t, "default", "large", "--control-plane-machines", "3", "--workers", "5", "--kubernetes-version", from)
	harness.Eventually(t, "eight Nodes", longLimit, func(ctx context.Context) error { return c.NodesReady(ctx, 8) })
	before := allMachines(t, c, from, limit)
	l := startLoad(t, c, from)
	cp := &controlplanev1.CapstanControlPlane{}
	cp.Namespace, cp.Name = c.Namespace, controlPlaneName(t, c)
	k := startKiller(t, c, steps...)

	start := time.Now()
	changeControlPlane(t, cp, func() {
		cp.Spec.Rollout.Strategy.InPlace = controlplanev1.InPlaceOnly
		cp.Spec.Version = harness.KubernetesVersion
	})
	harness.Eventually(t, "the update of the control plane", longLimit, func(ctx context.Context) error {
		if err := updating(ctx, cp, controlplanev1.NotUpdatingReason); err != nil {
			return err
		}
		if n := ptr.Deref(cp.Status.UpToDateReplicas, -1); n != 3 || len(cp.Status.Versions) != 1 || cp.Status.Versions[0].Version != harness.KubernetesVersion {
			return fmt.Errorf("%d machines up to date, versions %v", n, cp.Status.Versions)
		}
		return nil
	})
	t.Logf("three control plane machines: %v", time.Since(start).Round(time.Second))

	start = time.Now()
	md := &clusterv1.MachineDeployment{}
	md.Namespace, md.Name = c.Namespace, c.Name+"-md-0"
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:"Only"}},"spec":{"rollout":{"strategy":{"type":"RollingUpdate","rollingUpdate":{"maxSurge":0,"maxUnavailable":1}}},"template":{"spec":{"version":%q}}}}`,
		infrav1.InPlaceAnnotation, harness.KubernetesVersion)
	if err := plane.Client.Patch(t.Context(), md, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
		t.Fatal(err)
	}
	after := allMachines(t, c, harness.KubernetesVersion, longLimit)
	t.Logf("five workers: %v", time.Since(start).Round(time.Second))
	k.check()

	if !maps.Equal(before, after) {
		t.Errorf("the machines were %+v and are %+v", before, after)
	}
	l.check()
}

// slow are the steps that take long enough to be seen, with the machines on which they do. A step that ends within a few
// milliseconds is interrupted on some machines only. containerd does not restart, because its version and its configuration stay
// the same.
var slow = map[string]bool{"check": false, "etcd": true, "kube-apiserver": true, "kube-controller-manager": true, "kubelet": false, "verify": false}

// check stops the killer. It fails the test unless each slow step was interrupted together with each other process. The steps of
// control planes count on control plane machines only: on workers they do nothing.
func (k *killer) check() {
	k.t.Helper()
	k.stop()
	for _, step := range steps {
		others := map[string]int{}
		controlPlaneOnly, expected := slow[step]
		for machine, killed := range k.killed {
			if killed[step] != "" && (k.controlPlane[machine] || !controlPlaneOnly) {
				others[killed[step]]++
			}
		}
		k.t.Logf("step %s: the update was killed on %d machines, together with %v", step, k.count(step), others)
		if expected && len(others) < len(inTurn) {
			k.t.Errorf("in step %s only %s were killed", step, strings.Join(slices.Sorted(maps.Keys(others)), ", "))
		}
	}
}

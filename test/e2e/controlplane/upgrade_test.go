//go:build e2e

package controlplane

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/semver"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// TestUpgrade upgrades three machines from one minor version of Kubernetes to the next (CP-05). Meanwhile a client
// writes, and API servers, members of etcd and whole machines are killed one after the other. The last old machine is
// lost permanently before its replacement.
func TestUpgrade(t *testing.T) {
	from := harness.FormerMinor(t)
	s := &subject{Cluster: plane.CreateCluster(t, "default", "up", "--workers", "0", "--control-plane-machines", "3", "--kubernetes-version", from), made: map[string]bool{}}
	s.etcd = memberClient(t, s.Kubeconfig)
	s.settled(t, 3)
	w := startWriter(t, s.Cluster)
	k := s.startInTurn(t, 2)

	start := time.Now()
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Version = harness.KubernetesVersion })
	lowest, lost, calm := "", "", false
	harness.Eventually(t, "every Machine has the new version", 3*limit, func(ctx context.Context) error {
		now, err := s.machines(ctx)
		if err != nil {
			return err
		}
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		if lowest != "" && semver.Compare(cp.Status.Version, lowest) < 0 {
			t.Errorf("the lowest version went from %s to %s", lowest, cp.Status.Version)
		}
		lowest = cp.Status.Version
		if old := staying(now, from); len(old) == 1 && !calm {
			calm = true
			k.end() // Two restarts at a time would lose the majority.
		} else if len(old) == 1 && lost == "" {
			lost = old[0]
			destroy(t, s, lost)
		}
		for name, m := range now {
			if m.Spec.Version != harness.KubernetesVersion {
				return fmt.Errorf("%s has %s: %s", name, m.Spec.Version, explain(cp, now))
			}
		}
		return nil
	})
	k.end()
	s.settled(t, 3)
	t.Logf("from %s to %s in %.1f s; lost %q, killed meanwhile: %s; longest gap between acknowledged writes %.1f s",
		from, harness.KubernetesVersion, time.Since(start).Seconds(), lost, strings.Join(k.killed, ", "), w.LongestGap().Seconds())
	w.check(t)
	harness.Eventually(t, "the API server has the new version", limit, func(context.Context) error {
		version, err := s.Kubectl(t, "get", "--raw", "/version")
		if err == nil && !strings.Contains(version, `"`+harness.KubernetesVersion+`"`) {
			err = fmt.Errorf("its version is %s", version)
		}
		return err
	})
	if len(k.killed) == 0 {
		t.Error("no process was killed")
	}
}

// staying returns the Machines of a version that are not being deleted.
func staying(machines map[string]clusterv1.Machine, version string) []string {
	var out []string
	for name, m := range machines {
		if m.Spec.Version == version && m.DeletionTimestamp.IsZero() {
			out = append(out, name)
		}
	}
	return out
}

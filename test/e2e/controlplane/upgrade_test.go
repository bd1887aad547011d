//go:build e2e

package controlplane

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/mod/semver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// upgrade changes the minor version of Kubernetes (CP-05), and the template of the machines: the new one has volumes, which get etcd's log. It
// also adds metrics-server. Meanwhile a whole machine, an API server and a member of etcd are killed. The last old machine is lost permanently
// before its replacement.
func upgrade(t *testing.T, s *subject) {
	before := s.mustMachines(t)
	from, template := harness.FormerMinor(t), s.templateWithVolumes(t)
	k := s.startInTurn(t)
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Version, cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name = harness.KubernetesVersion, template
		cp.Spec.Config.Cluster.ResourceMetrics = bootstrapv1.ResourceMetricsServer
		// Later machines get a volume with the log of a member that was removed.
		cp.Spec.Config.Cluster.Etcd.ExtraArgs = []bootstrapv1.Arg{{Name: "wal-dir", Value: harness.DataVolume()[0].Path + "/etcd/log"}}
	})
	lowest, lost, calm := "", "", false
	most := s.untilReplaced(t, before, func(cp *controlplanev1.CapstanControlPlane, now map[string]clusterv1.Machine) {
		if lowest != "" && semver.Compare(cp.Status.Version, lowest) < 0 {
			t.Errorf("the lowest version went from %s to %s", lowest, cp.Status.Version)
		}
		lowest = cp.Status.Version
		switch old := staying(now, from); {
		case len(old) != 1 || lost != "":
		case !calm:
			calm = true
			k.end() // Two restarts at a time would lose the majority.
		default:
			lost = old[0]
			destroy(t, s, lost)
		}
	})
	k.end()
	s.settled(t, 3)
	k.report(t)
	t.Logf("from %s to %s; lost %q", from, harness.KubernetesVersion, lost)
	if most != 4 {
		t.Errorf("%d Machines at once", most)
	}
	if lost == "" {
		t.Error("no machine was lost")
	}
	for name, m := range s.mustMachines(t) {
		if m.Spec.Version != harness.KubernetesVersion {
			t.Errorf("%s has %s", name, m.Spec.Version)
		}
	}
	harness.Eventually(t, "the API server has the new version", limit, func(context.Context) error {
		version, err := s.Kubectl(t, "get", "--raw", "/version")
		if err == nil && !strings.Contains(version, `"`+harness.KubernetesVersion+`"`) {
			err = fmt.Errorf("its version is %s", version)
		}
		return err
	})
}

// templateWithVolumes copies the template of the machines, adds a volume, and returns the name of the copy.
func (s *subject) templateWithVolumes(t *testing.T) string {
	t.Helper()
	cp, err := s.controlPlane(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	template := &infrav1.CapstanMachineTemplate{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: s.Namespace, Name: cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name}, template); err != nil {
		t.Fatal(err)
	}
	other := &infrav1.CapstanMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name + "-other"}, Spec: template.Spec}
	other.Spec.Template.Spec.Volumes = harness.DataVolume()
	if err := plane.Client.Create(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	return other.Name
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

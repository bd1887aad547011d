package controlplane

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// TestWatchLabel_CP22: the objects of a control plane have its watch label, so that the same managers reconcile them. A changed
// label is changed on them in place.
func TestWatchLabel_CP22(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Labels = map[string]string{clusterv1.WatchLabel: "one"}
	})
	cluster.SetInfraEndpoint(somewhere)
	expect.True(t, "the first Machine", func() bool { return handedOver(t, cluster) })
	machine := machinesOf(t, cluster)[0]
	everywhere := func(value string) func() bool {
		return func() bool {
			for _, obj := range []client.Object{&machine, &bootstrapv1.CapstanConfig{ObjectMeta: cluster.Meta(machine.Name)}, &infrav1.CapstanMachine{ObjectMeta: cluster.Meta(machine.Name)}} {
				if cluster.Get(obj) != nil || obj.GetLabels()[clusterv1.WatchLabel] != value {
					return false
				}
			}
			return true
		}
	}
	if !everywhere("one")() {
		t.Error("an object was created without the label")
	}
	cluster.Change(cp, func() { cp.Labels[clusterv1.WatchLabel] = "two" })
	expect.True(t, "the other label", everywhere("two"))
	cluster.Change(cp, func() { delete(cp.Labels, clusterv1.WatchLabel) })
	expect.True(t, "no label", everywhere(""))
	if err := cluster.Get(cp); err != nil || !testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionFalse, "") || len(machinesOf(t, cluster)) != 1 {
		t.Errorf("%d Machines, %v, %v", len(machinesOf(t, cluster)), cp.Status.Conditions, err)
	}
}

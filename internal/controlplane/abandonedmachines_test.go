package controlplane

import (
	"context"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// Row ALL-15: if core does not remove its finalizer, for example because another version of core replaced it, Capstan removes it.
// It waits until all other objects of the Machine have been absent for a long time.
func TestAbandonedMachineIsReleased_ALL15(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	machine, config := cluster.Machine("abandoned", func(m *clusterv1.Machine) { m.Finalizers = []string{clusterv1.MachineFinalizer} }, nil)
	r := &abandonment{clients: &clients{Client: env.Client, LiveClient: env.Client}, recorder: &recorder{}}
	infra := &infrav1.CapstanMachine{ObjectMeta: cluster.Meta(machine.Name)}
	cluster.Create(infra)
	start := time.Now()
	step := func(what string, after time.Duration, wantAgain bool, wantFinalizers int) {
		t.Helper()
		stored := &clusterv1.Machine{}
		if err := env.Client.Get(context.Background(), client.ObjectKeyFromObject(machine), stored); err != nil {
			t.Fatal(err)
		}
		s := &scope{ControlPlane: &model.ControlPlane{Object: &controlplanev1.CapstanControlPlane{}, Machines: collections.FromMachines(stored), Now: start.Add(after)}}
		again, err := r.releaseAbandoned(context.Background(), s)
		if err != nil || again > 0 != wantAgain || len(stored.Finalizers) != wantFinalizers {
			t.Fatalf("%s: again in %s, finalizers %v, %v", what, again, stored.Finalizers, err)
		}
	}
	remove := func(o client.Object) {
		t.Helper()
		if err := env.Client.Delete(context.Background(), o); err != nil {
			t.Fatal(err)
		}
	}
	step("not deleted", 24*time.Hour, false, 1)
	remove(machine)
	step("deleted, with its CapstanConfig and CapstanMachine", 24*time.Hour, false, 1)
	remove(infra)
	step("deleted, with its CapstanConfig", 24*time.Hour, false, 1)
	cluster.Create(&infrav1.CapstanMachine{ObjectMeta: cluster.Meta(machine.Name)})
	remove(config)
	step("deleted, with its CapstanMachine", 24*time.Hour, false, 1)
	remove(&infrav1.CapstanMachine{ObjectMeta: cluster.Meta(machine.Name)})
	step("nothing else is left", 24*time.Hour, true, 1)
	step("core has had too little time", 24*time.Hour+abandonedAfter-time.Second, true, 1)
	step("core does not come", 24*time.Hour+abandonedAfter, false, 0)
	s := &scope{ControlPlane: &model.ControlPlane{Object: &controlplanev1.CapstanControlPlane{}}}
	if _, err := r.releaseAbandoned(context.Background(), s); err != nil || len(r.since.at) > 0 {
		t.Errorf("expected no memory of the Machine, found %v, %v", r.since.at, err)
	}
}

// It lists the reasons not to release a deleted Machine.
func TestOnlyCoresFinalizer_ALL15(t *testing.T) {
	tests := map[string]struct {
		change func(*clusterv1.Machine)
		want   bool
	}{
		"core's finalizer only": {func(*clusterv1.Machine) {}, true},
		"not deleted":           {func(m *clusterv1.Machine) { m.DeletionTimestamp = nil }, false},
		"another finalizer":     {func(m *clusterv1.Machine) { m.Finalizers = append(m.Finalizers, "example.com/x") }, false},
		"a hook": {func(m *clusterv1.Machine) {
			m.Annotations = map[string]string{controlplanev1.PreTerminateHookAnnotation: ""}
		}, false},
		"a Node that core may try for ever":    {func(m *clusterv1.Machine) { m.Spec.Deletion.NodeDeletionTimeoutSeconds = ptr.To[int32](0) }, false},
		"a Node that core tries for some time": {func(m *clusterv1.Machine) { m.Spec.Deletion.NodeDeletionTimeoutSeconds = ptr.To[int32](20) }, true},
	}
	for name, tt := range tests {
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{Time: time.Unix(1, 0)}, Finalizers: []string{clusterv1.MachineFinalizer}}}
		tt.change(m)
		if got := onlyCoresFinalizer(m) && !triesForever(m); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

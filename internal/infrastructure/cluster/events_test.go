package cluster

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/testevents"
)

// TestOfMachine: a cluster is reconciled for the events of its control plane machines, and while it is being deleted for those of all
// machines. The events of other machines, of which there can be thousands, cost nothing.
func TestOfMachine(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clusterv1.AddToScheme, infrav1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	machine := func(name string, labels map[string]string) client.Object {
		return &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: labels}}
	}
	cluster := func(name string, leaving bool) []client.Object {
		c := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		c.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{Kind: "CapstanCluster", Name: name}
		infra := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Finalizers: []string{infrav1.ClusterFinalizer}}}
		if leaving {
			infra.DeletionTimestamp = ptr.To(metav1.Now())
		}
		return []client.Object{c, infra}
	}
	r := &Reconciler{Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(append(cluster("stays", false), cluster("leaves", true)...)...).WithObjects(
		machine("member", map[string]string{clusterv1.MachineControlPlaneLabel: ""}), machine("worker", nil),
	).Build()}
	for name, tc := range map[string]struct {
		cluster, owner string
		pool           bool
		want           int
	}{
		"control plane machine":                      {"stays", "member", false, 1},
		"worker":                                     {"stays", "worker", false, 0},
		"machine of a pool":                          {"stays", "", true, 0},
		"no Machine yet":                             {"stays", "", false, 0},
		"the Machine is unknown":                     {"stays", "new", false, 1},
		"worker of a cluster in deletion":            {"leaves", "worker", false, 1},
		"without a Machine in a cluster in deletion": {"leaves", "", false, 1},
		"machine of a pool in a cluster in deletion": {"leaves", "", true, 1},
		"of an unknown cluster":                      {"other", "member", false, 0},
	} {
		m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m", Labels: map[string]string{clusterv1.ClusterNameLabel: tc.cluster}}}
		if tc.owner != "" {
			m.OwnerReferences = []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Machine", Name: tc.owner}}
		}
		if tc.pool {
			m.Labels[infrav1.MachinePoolLabel] = "pool"
		}
		if got := r.ofMachine(t.Context(), m); len(got) != tc.want {
			t.Errorf("%s: got %v, want %d requests", name, got, tc.want)
		}
	}
}

// TestControlPlanePrepared: a cluster is reconciled once for each control plane Machine that could boot now.
func TestControlPlanePrepared(t *testing.T) {
	unprepared := func() *clusterv1.Machine {
		return &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{clusterv1.MachineControlPlaneLabel: ""}}}
	}
	withData := func(m *clusterv1.Machine) { m.Spec.Bootstrap.DataSecretName = ptr.To("data") }
	provisioned := func(m *clusterv1.Machine) { m.Status.Initialization.InfrastructureProvisioned = ptr.To(true) }
	prepared := func() *clusterv1.Machine {
		m := unprepared()
		withData(m)
		return m
	}
	p := controlPlanePrepared()
	for name, tc := range map[string]struct {
		before *clusterv1.Machine
		change func(*clusterv1.Machine)
		want   bool
	}{
		"its bootstrap data appears":        {unprepared(), withData, true},
		"another write without data":        {unprepared(), func(m *clusterv1.Machine) { m.Status.Phase = "Pending" }, false},
		"another write with data":           {prepared(), func(m *clusterv1.Machine) { m.Status.Phase = "Provisioning" }, false},
		"it runs":                           {prepared(), provisioned, false},
		"the bootstrap data of a worker":    {&clusterv1.Machine{}, withData, false},
		"it becomes a control plane member": {&clusterv1.Machine{Spec: prepared().Spec}, func(m *clusterv1.Machine) { m.Labels = prepared().Labels }, true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := testenv.Passes(p, tc.before, tc.change); got != tc.want {
				t.Errorf("passes: %v, want %v", got, tc.want)
			}
		})
	}
	running := prepared()
	provisioned(running)
	if !p.Create(event.CreateEvent{Object: prepared()}) || p.Create(event.CreateEvent{Object: unprepared()}) || p.Create(event.CreateEvent{Object: running}) {
		t.Error("of the Machines that appear, exactly the prepared ones must reconcile their cluster")
	}
	if p.Delete(event.DeleteEvent{Object: prepared()}) {
		t.Error("a Machine that disappears reconciles its cluster")
	}
}

// TestFailedReads_ALL13: an event whose read fails is lost, so the log shows it.
func TestFailedReads_ALL13(t *testing.T) {
	ofObject := func(mapper func(*Reconciler, context.Context, client.Object) []reconcile.Request, o client.Object) testevents.Mapper {
		return func(ctx context.Context, c client.Client) []reconcile.Request {
			return mapper(&Reconciler{Client: c}, ctx, o)
		}
	}
	ofEvent := func(e connections.Event) testevents.Mapper {
		return func(ctx context.Context, c client.Client) []reconcile.Request {
			return (&Reconciler{Client: c}).ofEvent(ctx, e)
		}
	}
	spanning := &infrav1.CapstanCluster{}
	spanning.Spec.Network.Overlay.VNI = 5000
	labelled := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{clusterv1.ClusterNameLabel: "c"}}}
	testevents.LogFailedReads(t, map[string]testevents.Mapper{
		"another cluster":           ofObject((*Reconciler).rivals, spanning),
		"a labelled object":         ofObject((*Reconciler).ofLabel, labelled),
		"a machine":                 ofObject((*Reconciler).ofMachine, labelled),
		"a host":                    ofObject((*Reconciler).all, &infrav1.CapstanHost{}),
		"a Namespace":               ofObject((*Reconciler).ofNamespace, &corev1.Namespace{}),
		"a load balancer on a host": ofEvent(connections.Event{LoadBalancer: &hostpb.LoadBalancer{}}),
		"a connection":              ofEvent(connections.Event{Connection: true}),
		"an object without a Cluster": func(ctx context.Context, c client.Client) []reconcile.Request {
			return (&Reconciler{Client: c}).withoutCluster(ctx, client.ObjectKey{})
		},
	})
}

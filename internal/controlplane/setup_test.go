package controlplane

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv"
)

func TestClusterChanged(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*clusterv1.Cluster)
		want   bool
	}{
		"condition": {change: func(c *clusterv1.Cluster) {
			conditions.Set(c, metav1.Condition{Type: clusterv1.AvailableCondition, Status: metav1.ConditionTrue, Reason: "A"})
		}},
		"phase":   {change: func(c *clusterv1.Cluster) { c.Status.Phase = "Provisioned" }},
		"workers": {change: func(c *clusterv1.Cluster) { c.Status.Workers = &clusterv1.WorkersStatus{Replicas: ptr.To[int32](1)} }},
		"infrastructure": {change: func(c *clusterv1.Cluster) {
			c.Status.Initialization.InfrastructureProvisioned = ptr.To(true)
		}, want: true},
		"failure domains": {change: func(c *clusterv1.Cluster) {
			c.Status.FailureDomains = []clusterv1.FailureDomain{{Name: "a", ControlPlane: ptr.To(true)}}
		}, want: true},
		"spec":   {change: func(c *clusterv1.Cluster) { c.Generation++ }, want: true},
		"resync": {change: func(c *clusterv1.Cluster) { c.ResourceVersion = "1" }, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := testenv.Passes(clusterChanged(), &clusterv1.Cluster{}, tc.change); got != tc.want {
				t.Errorf("passes: %v", got)
			}
		})
	}
}

// TestLeaving: a worker that leaves is an event, also if its deletion is known only from its absence after a gap in the watch.
func TestLeaving(t *testing.T) {
	stays := &clusterv1.Machine{}
	goes := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: ptr.To(metav1.Now())}}
	for name, tc := range map[string]struct{ got, want bool }{
		"created":             {leaving().Create(event.CreateEvent{Object: stays}), false},
		"changed":             {leaving().Update(event.UpdateEvent{ObjectOld: stays, ObjectNew: stays}), false},
		"seen first as going": {leaving().Create(event.CreateEvent{Object: goes}), true},
		"begins to go":        {leaving().Update(event.UpdateEvent{ObjectOld: stays, ObjectNew: goes}), true},
		"gone":                {leaving().Delete(event.DeleteEvent{Object: goes}), true},
		"gone after a gap":    {leaving().Delete(event.DeleteEvent{Object: stays, DeleteStateUnknown: true}), true},
	} {
		if tc.got != tc.want {
			t.Errorf("%s: passes: %v", name, tc.got)
		}
	}
}

// TestWorkerToControlPlane: a worker that leaves is an event for a control plane that is being deleted. The last known state of the worker can
// have no time of deletion.
func TestWorkerToControlPlane(t *testing.T) {
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "demo"}}
	cluster.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{
		APIGroup: controlplanev1.GroupVersion.Group, Kind: controlplanev1.ControlPlaneKind, Name: "demo",
	}
	worker, member := map[string]string{clusterv1.ClusterNameLabel: "demo"}, map[string]string{clusterv1.ClusterNameLabel: "demo", clusterv1.MachineControlPlaneLabel: ""}
	for name, tc := range map[string]struct {
		labels   map[string]string
		deleting bool
		want     int
	}{
		"cluster stays":         {labels: worker},
		"cluster goes":          {labels: worker, deleting: true, want: 1},
		"control plane Machine": {labels: member, deleting: true},
	} {
		cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "demo", Finalizers: []string{"test/stays"}}}
		if tc.deleting {
			cp.DeletionTimestamp = ptr.To(metav1.Now())
		}
		r := &Reconciler{clients: &clients{Client: fake.NewClientBuilder().WithScheme(env.Scheme).WithObjects(cluster, cp).Build()}}
		machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "w", Labels: tc.labels}}
		if got := r.workerToControlPlane(t.Context(), machine); len(got) != tc.want {
			t.Errorf("%s: got %v, want %d requests", name, got, tc.want)
		}
	}
}

// TestControlPlaneData: the bootstrap data of a control plane machine reconciles its control plane. The data of a worker does not.
func TestControlPlaneData(t *testing.T) {
	for role, want := range map[bootstrapv1.Role]bool{
		bootstrapv1.RoleInit: true, bootstrapv1.RoleControlPlane: true, bootstrapv1.RoleWorker: false, "": false,
	} {
		config := &bootstrapv1.CapstanConfig{Spec: bootstrapv1.CapstanConfigSpec{Role: role}}
		got := testenv.Passes(reconciling.Became(hasControlPlaneData), config, func(c *bootstrapv1.CapstanConfig) {
			c.Status.Initialization.DataSecretCreated, c.Status.DataSecretName = ptr.To(true), "data"
		})
		if got != want {
			t.Errorf("role %q: passes: %v", role, got)
		}
	}
}

// TestInfraClusterToControlPlane: the infrastructure's object is an event for the control plane until the Cluster has both the endpoint and
// the failure domains.
func TestInfraClusterToControlPlane(t *testing.T) {
	for name, tc := range map[string]struct {
		endpoint    clusterv1.APIEndpoint
		provisioned bool
		want        int
	}{
		"new":         {want: 1},
		"endpoint":    {endpoint: somewhere, want: 1},
		"provisioned": {provisioned: true, want: 1},
		"both":        {endpoint: somewhere, provisioned: true},
	} {
		cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "demo", UID: "1"}}
		cluster.Spec.ControlPlaneEndpoint = tc.endpoint
		cluster.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{
			APIGroup: controlplanev1.GroupVersion.Group, Kind: controlplanev1.ControlPlaneKind, Name: "demo",
		}
		cluster.Status.Initialization.InfrastructureProvisioned = ptr.To(tc.provisioned)
		infra := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "demo", OwnerReferences: []metav1.OwnerReference{
			*metav1.NewControllerRef(cluster, clusterv1.GroupVersion.WithKind("Cluster")),
		}}}
		r := &infrastructure{clients: &clients{Client: fake.NewClientBuilder().WithScheme(env.Scheme).WithObjects(cluster).Build()}}
		if got := r.infraClusterToControlPlane(t.Context(), infra); len(got) != tc.want {
			t.Errorf("%s: got %v, want %d requests", name, got, tc.want)
		}
	}
}

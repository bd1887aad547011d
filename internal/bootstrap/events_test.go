package bootstrap

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv"
)

// TestMachineChanged: of a Machine, only what findOwner reads reconciles its config.
func TestMachineChanged(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*clusterv1.Machine)
		want   bool
	}{
		"condition": {change: func(m *clusterv1.Machine) {
			conditions.Set(m, metav1.Condition{Type: clusterv1.ReadyCondition, Status: metav1.ConditionTrue, Reason: "A"})
		}},
		"phase":      {change: func(m *clusterv1.Machine) { m.Status.Phase = "Running" }},
		"addresses":  {change: func(m *clusterv1.Machine) { m.Status.Addresses = clusterv1.MachineAddresses{{Address: "10.0.0.1"}} }},
		"data":       {change: func(m *clusterv1.Machine) { m.Spec.Bootstrap.DataSecretName = ptr.To("a"); m.Generation++ }},
		"provider":   {change: func(m *clusterv1.Machine) { m.Spec.ProviderID = "a"; m.Generation++ }},
		"annotation": {change: func(m *clusterv1.Machine) { m.Annotations = map[string]string{"a": "b"} }},
		"finalizer":  {change: func(m *clusterv1.Machine) { m.Finalizers = []string{"a"} }},
		"resync":     {change: func(m *clusterv1.Machine) { m.ResourceVersion = "1" }},
		"node":       {change: func(m *clusterv1.Machine) { m.Status.NodeRef.Name = "a" }, want: true},
		"infrastructure": {change: func(m *clusterv1.Machine) {
			m.Status.Initialization.InfrastructureProvisioned = ptr.To(true)
		}, want: true},
		"version":       {change: func(m *clusterv1.Machine) { m.Spec.Version = "v1.36.3" }, want: true},
		"cluster":       {change: func(m *clusterv1.Machine) { m.Spec.ClusterName = "a" }, want: true},
		"control plane": {change: func(m *clusterv1.Machine) { m.Labels = map[string]string{clusterv1.MachineControlPlaneLabel: ""} }, want: true},
		"deletion":      {change: func(m *clusterv1.Machine) { m.DeletionTimestamp = ptr.To(metav1.Now()) }, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := testenv.Passes(machineChanged(), &clusterv1.Machine{}, tc.change); got != tc.want {
				t.Errorf("passes: %v, want %v", got, tc.want)
			}
		})
	}
	passCreateAndDelete(t, machineChanged(), &clusterv1.Machine{})
}

// passCreateAndDelete: an object that appears or disappears must reconcile its configs.
func passCreateAndDelete(t *testing.T, p predicate.Predicate, o client.Object) {
	t.Helper()
	if !p.Create(event.CreateEvent{Object: o}) || !p.Delete(event.DeleteEvent{Object: o}) {
		t.Errorf("%T: the creation and the deletion must pass", o)
	}
}

// TestControlPlaneChanged: the annotations that a CapstanControlPlane gets on its way up reconcile no config. Those that let a config begin
// the cluster do, such as the annotations of a restore.
func TestControlPlaneChanged(t *testing.T) {
	annotate := func(name, value string) func(*controlplanev1.CapstanControlPlane) {
		return func(c *controlplanev1.CapstanControlPlane) { metav1.SetMetaDataAnnotation(&c.ObjectMeta, name, value) }
	}
	remove := func(name string) func(*controlplanev1.CapstanControlPlane) {
		return func(c *controlplanev1.CapstanControlPlane) { delete(c.Annotations, name) }
	}
	nothing := func(*controlplanev1.CapstanControlPlane) {}
	const first, initialized, restored = controlplanev1.FirstMachineAnnotation, controlplanev1.InitializedAnnotation, controlplanev1.RestoredAnnotation
	for name, tc := range map[string]struct {
		before, change func(*controlplanev1.CapstanControlPlane)
		want           bool
	}{
		"spec":   {nothing, func(c *controlplanev1.CapstanControlPlane) { c.Generation++ }, true},
		"status": {nothing, func(c *controlplanev1.CapstanControlPlane) { c.Status.Version = "v1.36.3" }, false},
		"the API server answers": {nothing, func(c *controlplanev1.CapstanControlPlane) {
			c.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
		}, true},
		"owner":              {nothing, func(c *controlplanev1.CapstanControlPlane) { c.OwnerReferences = []metav1.OwnerReference{{Name: "a"}} }, false},
		"another annotation": {nothing, annotate("a", "b"), false},
		"another label":      {nothing, func(c *controlplanev1.CapstanControlPlane) { c.Labels = map[string]string{"a": "b"} }, false},
		"resync":             {nothing, func(c *controlplanev1.CapstanControlPlane) { c.ResourceVersion = "1" }, false},
		"the label of the cluster": {nothing, func(c *controlplanev1.CapstanControlPlane) {
			c.Labels = map[string]string{clusterv1.ClusterNameLabel: "a"}
		}, true},
		"the pause":                       {nothing, annotate(clusterv1.PausedAnnotation, ""), false},
		"the end of the pause":            {annotate(clusterv1.PausedAnnotation, ""), remove(clusterv1.PausedAnnotation), true},
		"a first Machine":                 {nothing, annotate(first, `{"name":"a"}`), false},
		"another first Machine":           {annotate(first, `{"name":"a"}`), annotate(first, `{"name":"b"}`), true},
		"no first Machine any more":       {annotate(first, `{"name":"a"}`), remove(first), true},
		"initialized":                     {nothing, annotate(initialized, "true"), false},
		"no longer initialized":           {annotate(initialized, ""), remove(initialized), true},
		"restored":                        {nothing, annotate(restored, "r"), true},
		"restored from another backup":    {annotate(restored, "r"), annotate(restored, "s"), true},
		"no longer restored":              {annotate(restored, "r"), remove(restored), true},
		"another write when all is there": {annotate(initialized, "true"), annotate("a", "b"), false},
	} {
		t.Run(name, func(t *testing.T) {
			before := &controlplanev1.CapstanControlPlane{}
			tc.before(before)
			if got := testenv.Passes(controlPlaneChanged(), before, tc.change); got != tc.want {
				t.Errorf("passes: %v, want %v", got, tc.want)
			}
		})
	}
	passCreateAndDelete(t, controlPlaneChanged(), &controlplanev1.CapstanControlPlane{})
}

// TestClusterChanged: the status of a Cluster matters only to workers of a control plane of another provider.
func TestClusterChanged(t *testing.T) {
	ours := clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: "CapstanControlPlane", Name: "demo"}
	other := clusterv1.ContractVersionedObjectReference{APIGroup: "controlplane.cluster.x-k8s.io", Kind: "KubeadmControlPlane", Name: "demo"}
	initialized := func(c *clusterv1.Cluster) { c.Status.Initialization.ControlPlaneInitialized = ptr.To(true) }
	for name, tc := range map[string]struct {
		controlPlane clusterv1.ContractVersionedObjectReference
		change       func(*clusterv1.Cluster)
		want         bool
	}{
		"spec":                               {ours, func(c *clusterv1.Cluster) { c.Generation++ }, true},
		"phase":                              {other, func(c *clusterv1.Cluster) { c.Status.Phase = "Provisioned" }, false},
		"a CapstanControlPlane is ready":     {ours, initialized, false},
		"another control plane is ready":     {other, initialized, true},
		"machines without control plane ref": {clusterv1.ContractVersionedObjectReference{}, initialized, true},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := &clusterv1.Cluster{}
			cluster.Spec.ControlPlaneRef = tc.controlPlane
			if got := testenv.Passes(clusterChanged(), cluster, tc.change); got != tc.want {
				t.Errorf("passes: %v, want %v", got, tc.want)
			}
		})
	}
	passCreateAndDelete(t, clusterChanged(), &clusterv1.Cluster{})
}

// configsOfDemo returns a reconciler with configs of each role of the cluster `demo`, in several states of their token.
func configsOfDemo(t *testing.T) *Reconciler {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := bootstrapv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	b := fake.NewClientBuilder().WithScheme(scheme)
	add := func(name string, role bootstrapv1.Role, token metav1.ConditionStatus, reason string) {
		config := &bootstrapv1.CapstanConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: "demo"}}}
		config.Spec.Role = role
		if reason != "" {
			reconciling.SetCondition(config, bootstrapv1.BootstrapTokenAvailableCondition, token, reason, "")
		}
		b.WithObjects(config)
	}
	add("init", bootstrapv1.RoleInit, "", "")
	add("member", bootstrapv1.RoleControlPlane, "", "")
	add("new", bootstrapv1.RoleWorker, "", "")
	add("default", "", "", "")
	add("waits", bootstrapv1.RoleWorker, metav1.ConditionFalse, bootstrapv1.BootstrapTokenWaitingReason)
	add("valid", "", metav1.ConditionTrue, bootstrapv1.BootstrapTokenAvailableReason)
	add("joined", bootstrapv1.RoleWorker, metav1.ConditionFalse, bootstrapv1.BootstrapTokenRemovedReason)
	add("was-worker", bootstrapv1.RoleControlPlane, metav1.ConditionTrue, bootstrapv1.BootstrapTokenAvailableReason)
	return &Reconciler{Client: reconciling.Live(b.Build())}
}

func names(requests []ctrl.Request) []string {
	var out []string
	for _, req := range requests {
		out = append(out, req.Name)
	}
	slices.Sort(out)
	return out
}

// TestConnectionToConfigs: a connection to a workload cluster reconciles the configs whose token is not settled.
func TestConnectionToConfigs(t *testing.T) {
	got := names(configsOfDemo(t).connectionToConfigs(t.Context(), &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}}))
	if want := []string{"default", "new", "valid", "waits", "was-worker"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestSecretToConfigs: a Secret of a cluster reconciles the configs that can use it.
func TestSecretToConfigs(t *testing.T) {
	r := configsOfDemo(t)
	everyone := []string{"default", "init", "joined", "member", "new", "valid", "waits", "was-worker"}
	members := []string{"init", "member", "was-worker"}
	for name, want := range map[string][]string{
		"demo-ca": everyone, "demo-kubeconfig": everyone, "of-a-user": everyone, "other-etcd": everyone,
		"demo-etcd": members, "demo-sa": members, "demo-proxy": members, "demo-apiserver-etcd-client": members, "demo-encryption": members,
	} {
		s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: "demo"}}}
		if got := names(r.secretToConfigs(t.Context(), s)); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
		s.OwnerReferences = []metav1.OwnerReference{{Kind: "CapstanConfig", Name: "new", Controller: ptr.To(true)}}
		if got := names(r.secretToConfigs(t.Context(), s)); !slices.Equal(got, []string{"new"}) {
			t.Errorf("data in %s: got %v, want that of its config", name, got)
		}
		s.Labels, s.OwnerReferences = nil, nil
		if got := r.secretToConfigs(t.Context(), s); len(got) > 0 {
			t.Errorf("%s of no cluster: got %v", name, got)
		}
	}
}

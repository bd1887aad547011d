package csr

import (
	"context"
	"errors"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/reconciling"
)

// connections counts the attempts to reach a workload cluster, which all fail.
type connections struct {
	clustercache.ClusterCache
	attempts int
}

// Watch implements clustercache.ClusterCache.
func (c *connections) Watch(context.Context, client.ObjectKey, clustercache.Watcher) error {
	c.attempts++
	return clustercache.ErrClusterNotConnected
}

// attempts reconciles a Cluster with its control plane, and returns the number of attempts to reach the workload cluster.
func attempts(t *testing.T, opts reconciling.Options, change func(*clusterv1.Cluster, *controlplanev1.CapstanControlPlane)) int {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(clusterv1.AddToScheme(scheme), controlplanev1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
	cluster.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: "CapstanControlPlane", Name: "cp"}
	controlPlane := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "cp"}}
	change(cluster, controlPlane)
	workload := &connections{}
	opts.ClusterCache = workload
	r := &Reconciler{Options: opts, Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(cluster, controlPlane).Build()}
	if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(cluster)}); err != nil {
		t.Error(err)
	}
	return workload.attempts
}

// CP-22, ALL-07: the watch label of the control plane decides, as in the reconciler of control planes. The label of the Cluster does not
// matter.
func TestWatchFilter_CP22(t *testing.T) {
	for name, tc := range map[string]struct {
		filter, cluster, controlPlane string
		want                          int
	}{
		"no filter":                  {want: 1},
		"label of the control plane": {filter: "a", controlPlane: "a", want: 1},
		"two labels":                 {filter: "a", cluster: "b", controlPlane: "a", want: 1},
		"another label":              {filter: "a", controlPlane: "b"},
		"label of the Cluster":       {filter: "a", cluster: "a"},
	} {
		got := attempts(t, reconciling.Options{WatchFilter: tc.filter}, func(c *clusterv1.Cluster, cp *controlplanev1.CapstanControlPlane) {
			c.Labels, cp.Labels = map[string]string{clusterv1.WatchLabel: tc.cluster}, map[string]string{clusterv1.WatchLabel: tc.controlPlane}
		})
		if got != tc.want {
			t.Errorf("%s: %d attempts to reach the workload cluster, want %d", name, got, tc.want)
		}
	}
}

// ALL-08, CP-22: no certificate request is decided while the Cluster or its control plane is paused.
func TestPaused_ALL08(t *testing.T) {
	annotation := map[string]string{clusterv1.PausedAnnotation: ""}
	for name, tc := range map[string]struct {
		change   func(*clusterv1.Cluster, *controlplanev1.CapstanControlPlane)
		attempts int
	}{
		"runs":                 {func(*clusterv1.Cluster, *controlplanev1.CapstanControlPlane) {}, 1},
		"paused by spec":       {func(c *clusterv1.Cluster, _ *controlplanev1.CapstanControlPlane) { c.Spec.Paused = ptr.To(true) }, 0},
		"paused by annotation": {func(c *clusterv1.Cluster, _ *controlplanev1.CapstanControlPlane) { c.Annotations = annotation }, 0},
		"paused control plane": {func(_ *clusterv1.Cluster, cp *controlplanev1.CapstanControlPlane) { cp.Annotations = annotation }, 0},
	} {
		if got := attempts(t, reconciling.Options{}, tc.change); got != tc.attempts {
			t.Errorf("%s: %d attempts to reach the workload cluster, want %d", name, got, tc.attempts)
		}
	}
}

// ALL-08: the end of a pause starts a reconcile, and other updates do not.
func TestResumed_ALL08(t *testing.T) {
	paused := metav1.ObjectMeta{Annotations: map[string]string{clusterv1.PausedAnnotation: ""}}
	for name, tc := range map[string]struct {
		old, now client.Object
		want     bool
	}{
		"Cluster resumed by spec": {&clusterv1.Cluster{Spec: clusterv1.ClusterSpec{Paused: ptr.To(true)}}, &clusterv1.Cluster{}, true},
		"Cluster resumed":         {&clusterv1.Cluster{ObjectMeta: paused}, &clusterv1.Cluster{}, true},
		"Cluster paused":          {&clusterv1.Cluster{}, &clusterv1.Cluster{ObjectMeta: paused}, false},
		"control plane resumed":   {&controlplanev1.CapstanControlPlane{ObjectMeta: paused}, &controlplanev1.CapstanControlPlane{}, true},
		"control plane paused":    {&controlplanev1.CapstanControlPlane{}, &controlplanev1.CapstanControlPlane{ObjectMeta: paused}, false},
		"control plane unchanged": {&controlplanev1.CapstanControlPlane{}, &controlplanev1.CapstanControlPlane{}, false},
	} {
		if got := resumed().Update(event.UpdateEvent{ObjectOld: tc.old, ObjectNew: tc.now}); got != tc.want {
			t.Errorf("%s: the update is passed: %v, want %v", name, got, tc.want)
		}
	}
}

// The time of a reconcile ends it, however many requests the API server of the cluster has.
func TestAnswerEndsWithItsTime(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	answer := func() error {
		return (&Reconciler{}).answer(ctx, client.ObjectKey{}, nil, &certificatesv1.CertificateSigningRequest{}, Cluster{})
	}
	if err := answer(); err != nil {
		t.Error(err)
	}
	cancel()
	if err := answer(); !errors.Is(err, context.Canceled) {
		t.Errorf("found %v, expected the end of the context", err)
	}
}

// workloadCache has one workload cluster.
type workloadCache struct {
	clustercache.ClusterCache
	workload client.Client
}

// GetUncachedClient implements clustercache.ClusterCache.
func (c workloadCache) GetUncachedClient(context.Context, client.ObjectKey) (client.Client, error) {
	return c.workload, nil
}

// The token of a pool obtains no kubelet certificate of a Node, and the certificate of its node agent only while the machine joins.
func TestTokenOfPoolAndNode(t *testing.T) {
	known := Cluster{Machines: []clusterv1.Machine{machine("p1", ofPool("pool")), machine("w1", nil)}, Pools: []clusterv1.MachinePool{pool("pool", "CapstanMachinePool", "pool-1")}}
	agentOf := func(node, token string) asked {
		return with(agent(), func(a *asked) { a.user, a.cn = "system:bootstrap:"+token, nodeconfig.AgentUserPrefix+node })
	}
	now := time.Now()
	for name, tc := range map[string]struct {
		asked asked
		age   time.Duration // 0: there is no Node.
		want  Verdict
	}{
		"a kubelet without a Node":          {kubelet("p1", "pppppp"), 0, Approved},
		"a kubelet with a new Node":         {kubelet("p1", "pppppp"), time.Second, Untouched},
		"an agent without a Node":           {agentOf("p1", "pppppp"), 0, Approved},
		"an agent before its Node":          {agentOf("p1", "pppppp"), -time.Minute, Approved},
		"an agent while its machine joins":  {agentOf("p1", "pppppp"), bootstrapv1.PoolTokenTTL - time.Minute, Approved},
		"an agent that joined long ago":     {agentOf("p1", "pppppp"), bootstrapv1.PoolTokenTTL + time.Minute, Untouched},
		"a Machine with a token of its own": {agentOf("w1", "aaaaaa"), 24 * time.Hour, Approved},
	} {
		t.Run(name, func(t *testing.T) {
			csr, known := request(t, tc.asked), known
			csr.CreationTimestamp = metav1.NewTime(now)
			known.Tokens = tokensOf([]corev1.Secret{data("pool-1", "pppppp"), data("w1", "aaaaaa")}, askedTokens([]certificatesv1.CertificateSigningRequest{*csr}))
			workload := fake.NewClientBuilder()
			if tc.age != 0 {
				joined := metav1.NewTime(now.Add(-tc.age))
				workload.WithObjects(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "p1", CreationTimestamp: joined}}, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", CreationTimestamp: joined}})
			}
			r := &Reconciler{Options: reconciling.Options{ClusterCache: workloadCache{workload: workload.Build()}}}
			if got, err := r.decide(t.Context(), client.ObjectKey{}, csr, known); err != nil || got.Verdict != tc.want {
				t.Errorf("%v, %v, want %s", got, err, tc.want)
			}
		})
	}
}

package csr

import (
	"context"
	"errors"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
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

// ALL-08: no certificate request of a paused Cluster is decided.
func TestPaused_ALL08(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := clusterv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		change   func(*clusterv1.Cluster)
		attempts int
	}{
		"runs":                 {func(*clusterv1.Cluster) {}, 1},
		"paused by spec":       {func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) }, 0},
		"paused by annotation": {func(c *clusterv1.Cluster) { c.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} }, 0},
	} {
		cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
		cluster.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: "CapstanControlPlane", Name: "c"}
		tc.change(cluster)
		workload := &connections{}
		r := &Reconciler{Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(cluster).Build(), ClusterCache: workload}
		if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(cluster)}); err != nil || workload.attempts != tc.attempts {
			t.Errorf("%s: %d attempts to reach the workload cluster, want %d; %v", name, workload.attempts, tc.attempts, err)
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

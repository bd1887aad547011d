package cluster

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
)

// A load balancer's host that is away returns. One whose CapstanHost was deleted must be replaced.
func TestMissingBalancerHost(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	away := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "away"}}
	r := &Reconciler{Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(away).Build(), Pool: connections.NewPool(t.Context(), nil)}
	for name, want := range map[string]string{"away": "Host away is not connected", "gone": "does not exist: name another host"} {
		c := &infrav1.CapstanCluster{}
		c.Spec.LoadBalancer.HostName = name
		if host, reason, why := r.balancerHost(t.Context(), c); host != nil || reason != infrav1.NoHostConnectedReason || !strings.Contains(why, want) {
			t.Errorf("host %s: found %s %q, want %q", name, reason, why, want)
		}
	}
}

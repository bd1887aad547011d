package controlplane

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

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

package cluster

import (
	"testing"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// ALL-15: the wait is bounded, and applies only to Capstan's own kind of control plane.
func TestHoldForPreparation_ALL15(t *testing.T) {
	for name, tc := range map[string]struct {
		kind     string
		prepared bool
		since    time.Duration
		want     time.Duration
	}{
		"CapstanControlPlane waits":       {kind: "CapstanControlPlane", since: 4 * time.Second, want: 6 * time.Second},
		"until all is prepared":           {kind: "CapstanControlPlane", prepared: true, since: time.Second},
		"but not longer than ten seconds": {kind: "CapstanControlPlane", since: 11 * time.Second},
		"KubeadmControlPlane never":       {kind: "KubeadmControlPlane"},
		"no control plane never":          {},
	} {
		t.Run(name, func(t *testing.T) {
			if got := holdForPreparation(clusterv1.ContractVersionedObjectReference{Kind: tc.kind}, tc.prepared, tc.since); got != tc.want {
				t.Errorf("holdForPreparation: got %s, want %s", got, tc.want)
			}
		})
	}
}

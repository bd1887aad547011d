package model

import (
	"testing"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
)

// TestVersions (CP-05): the versions in ascending order, with the replicas of each.
func TestVersions(t *testing.T) {
	got := Versions(collections.FromMachines(aMachine("a", "v1.36.10", true), aMachine("b", "v1.36.9", true), aMachine("c", "v1.36.10", true), aMachine("d", "", true)))
	want := []clusterv1.StatusVersion{{Version: "v1.36.9", Replicas: 1}, {Version: "v1.36.10", Replicas: 2}}
	if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("got %v", got)
	}
}

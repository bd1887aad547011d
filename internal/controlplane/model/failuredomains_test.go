package model

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// TestDomainsOf (CP-16, IC-04): the shapes of both contracts.
func TestDomainsOf(t *testing.T) {
	for name, c := range map[string]struct {
		status map[string]any
		want   string
		known  bool
	}{
		"v1beta2": {map[string]any{"failureDomains": []any{
			map[string]any{"name": "b", "controlPlane": true}, map[string]any{"name": "a", "controlPlane": false},
		}}, "b:true a:false", true},
		"v1beta1": {map[string]any{"failureDomains": map[string]any{
			"b": map[string]any{"controlPlane": true, "attributes": map[string]any{"k": "v"}}, "a": map[string]any{"controlPlane": false},
		}}, "a:false b:true", true},
		"none yet":       {map[string]any{}, "", false},
		"none, v1beta2":  {map[string]any{"initialization": map[string]any{"provisioned": true}}, "", true},
		"none, v1beta1":  {map[string]any{"ready": true}, "", true},
		"something else": {map[string]any{"failureDomains": "garbage"}, "", false},
		"an empty map":   {map[string]any{"failureDomains": map[string]any{}}, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := &clusterv1.Cluster{}
			cluster.Spec.InfrastructureRef.Name = "demo"
			s := &ControlPlane{Cluster: cluster, InfraCluster: &unstructured.Unstructured{Object: map[string]any{"status": c.status}}}
			var got []string
			for _, d := range s.FailureDomains() {
				got = append(got, fmt.Sprintf("%s:%v", d.Name, *d.ControlPlane))
			}
			if strings.Join(got, " ") != c.want || s.DomainsKnown() != c.known {
				t.Errorf("got %v, known %v", got, s.DomainsKnown())
			}
		})
	}
}

// TestPlaceByStatus (CP-16): the actual failure domain of a Machine counts, not only the requested one.
func TestPlaceByStatus(t *testing.T) {
	domains := []clusterv1.FailureDomain{{Name: "a"}, {Name: "b"}, {Name: "c"}}
	in := func(spec, status string) *clusterv1.Machine {
		m := aMachine(fmt.Sprint(spec, status), "", true)
		m.Spec.FailureDomain, m.Status.FailureDomain = spec, status
		return m
	}
	for _, c := range []struct {
		machines []*clusterv1.Machine
		want     string
	}{
		{nil, "a"}, {[]*clusterv1.Machine{in("a", "")}, "b"}, {[]*clusterv1.Machine{in("", "a")}, "b"}, {[]*clusterv1.Machine{in("", "a"), in("b", "b")}, "c"},
		{[]*clusterv1.Machine{in("c", "a")}, "b"}, {[]*clusterv1.Machine{in("", "")}, "a"},
	} {
		if got := PlaceMachine(domains, c.machines, nil); got != c.want {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
}

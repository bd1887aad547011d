package cluster

import (
	"maps"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// TestDecisions: a record counts until the cache contains it, or has lost the object.
func TestDecisions(t *testing.T) {
	at := func(uid, version, network string) infrav1.CapstanCluster {
		c := infrav1.CapstanCluster{}
		c.UID, c.ResourceVersion, c.Spec.Network.MachineCIDR = types.UID(uid), version, network
		return c
	}
	for name, test := range map[string]struct {
		recorded, cached []infrav1.CapstanCluster
		want             map[types.UID]string
		pending          []types.UID
	}{
		"no record":             {nil, []infrav1.CapstanCluster{at("a", "5", "10.0.0.0/24")}, map[types.UID]string{"a": "10.0.0.0/24"}, nil},
		"not in the cache":      {[]infrav1.CapstanCluster{at("a", "10", "10.0.1.0/24")}, []infrav1.CapstanCluster{at("a", "9", ""), at("b", "8", "10.0.0.0/24")}, map[types.UID]string{"a": "10.0.1.0/24", "b": "10.0.0.0/24"}, []types.UID{"a"}},
		"in the cache":          {[]infrav1.CapstanCluster{at("a", "10", "10.0.1.0/24")}, []infrav1.CapstanCluster{at("a", "10", "10.0.1.0/24")}, map[types.UID]string{"a": "10.0.1.0/24"}, nil},
		"changed since":         {[]infrav1.CapstanCluster{at("a", "9", "10.0.1.0/24")}, []infrav1.CapstanCluster{at("a", "10", "10.0.2.0/24")}, map[types.UID]string{"a": "10.0.2.0/24"}, nil},
		"recorded twice":        {[]infrav1.CapstanCluster{at("a", "9", "10.0.1.0/24"), at("a", "10", "10.0.2.0/24")}, []infrav1.CapstanCluster{at("a", "9", "10.0.1.0/24")}, map[types.UID]string{"a": "10.0.2.0/24"}, []types.UID{"a"}},
		"deleted":               {[]infrav1.CapstanCluster{at("a", "10", "10.0.1.0/24")}, nil, map[types.UID]string{}, nil},
		"a successor":           {[]infrav1.CapstanCluster{at("a", "10", "10.0.1.0/24")}, []infrav1.CapstanCluster{at("a2", "12", "")}, map[types.UID]string{"a2": ""}, nil},
		"no comparable version": {[]infrav1.CapstanCluster{at("a", "new", "10.0.1.0/24")}, []infrav1.CapstanCluster{at("a", "9", "")}, map[types.UID]string{"a": ""}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			d := decisions{}
			for i := range test.recorded {
				d.note(&test.recorded[i])
			}
			d.apply(test.cached)
			got := map[types.UID]string{}
			for _, c := range test.cached {
				got[c.UID] = c.Spec.Network.MachineCIDR
			}
			if !maps.Equal(got, test.want) {
				t.Errorf("the clusters have the networks %v, expected %v", got, test.want)
			}
			if got := slices.Sorted(maps.Keys(d.recorded)); !slices.Equal(got, test.pending) {
				t.Errorf("records of %v are pending, expected %v", got, test.pending)
			}
		})
	}
}

package cluster

import (
	"testing"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// IC-10, IC-14: the endpoint of the Cluster fills the empty fields. A field that is set stays, and no incomplete endpoint is recorded.
func TestAdoptEndpoint_IC10(t *testing.T) {
	type endpoint = clusterv1.APIEndpoint
	for name, tc := range map[string]struct{ own, cluster, want endpoint }{
		"none":                          {},
		"of the Cluster":                {cluster: endpoint{Host: "a", Port: 1}, want: endpoint{Host: "a", Port: 1}},
		"its own":                       {own: endpoint{Host: "b", Port: 2}, cluster: endpoint{Host: "a", Port: 1}, want: endpoint{Host: "b", Port: 2}},
		"its own host":                  {own: endpoint{Host: "b"}, want: endpoint{Host: "b"}},
		"its own port":                  {own: endpoint{Port: 2}, want: endpoint{Port: 2}},
		"its own host, the Cluster's":   {own: endpoint{Host: "b"}, cluster: endpoint{Host: "a", Port: 1}, want: endpoint{Host: "b", Port: 1}},
		"its own port, the Cluster's":   {own: endpoint{Port: 2}, cluster: endpoint{Host: "a", Port: 1}, want: endpoint{Host: "a", Port: 2}},
		"only the host of the Cluster":  {cluster: endpoint{Host: "a"}},
		"only the port of the Cluster":  {cluster: endpoint{Port: 1}},
		"its port and the other's host": {own: endpoint{Port: 2}, cluster: endpoint{Host: "a"}, want: endpoint{Host: "a", Port: 2}},
	} {
		s := &scope{cluster: &clusterv1.Cluster{}, capstan: &infrav1.CapstanCluster{}}
		s.cluster.Spec.ControlPlaneEndpoint, s.capstan.Spec.ControlPlaneEndpoint = tc.cluster, tc.own
		if adoptEndpoint(s); s.capstan.Spec.ControlPlaneEndpoint != tc.want {
			t.Errorf("%s: %+v, want %+v", name, s.capstan.Spec.ControlPlaneEndpoint, tc.want)
		}
	}
}

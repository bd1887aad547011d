package services

import (
	"testing"

	"k8s.io/utils/ptr"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

func TestNeedsPulses(t *testing.T) {
	pool := infrav1.IPPoolReference{Name: "p"}
	for name, c := range map[string]struct {
		lb      *infrav1.ServiceLoadBalancerSpec
		present bool
		record  string
		want    bool
	}{
		"can get an address":                    {&infrav1.ServiceLoadBalancerSpec{AddressesFromPool: pool}, true, "", true},
		"can get an IPv6 address":               {&infrav1.ServiceLoadBalancerSpec{IPv6AddressesFromPool: pool}, true, "other", true},
		"nothing of the cluster":                {&infrav1.ServiceLoadBalancerSpec{AddressesFromPool: pool}, false, "other", false},
		"had its last machine":                  {&infrav1.ServiceLoadBalancerSpec{AddressesFromPool: pool}, false, "other,h", true},
		"no Services":                           {nil, true, "", false},
		"no Services any more":                  {nil, true, "h", true},
		"ports of the hosts, which do not move": {&infrav1.ServiceLoadBalancerSpec{HostPorts: ptr.To(true)}, true, "", false},
	} {
		s := &scope{capstan: &infrav1.CapstanCluster{}}
		s.setClaims([]capiipamv1.IPAddressClaim{recordedBy("c", c.record)})
		s.capstan.Spec.Services.LoadBalancer = c.lb
		if got := s.needsPulses(&host{name: "h", present: c.present}); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

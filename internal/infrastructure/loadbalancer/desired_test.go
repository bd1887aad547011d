package loadbalancer_test

import (
	"slices"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
)

// IC-10: the addresses of the load balancer of a host, and the endpoint that its machines reach through it.
func TestDesired_IC10(t *testing.T) {
	first := loadbalancer.Host{Name: "first", Tunnel: "192.0.2.1"}
	other := loadbalancer.Host{Name: "other", Tunnel: "192.0.2.2"}
	bind := func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.BindAddress = "198.51.100.1" }
	endpoint := func(host string, port int32) func(*infrav1.CapstanCluster) {
		return func(c *infrav1.CapstanCluster) {
			c.Spec.ControlPlaneEndpoint.Host, c.Spec.ControlPlaneEndpoint.Port = host, port
		}
	}
	six := func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = "fd00:1::/64" }
	spans := func(c *infrav1.CapstanCluster) { c.Spec.Network.Overlay.VNI = 5000 }
	for name, tc := range map[string]struct {
		on       loadbalancer.Host
		changes  []func(*infrav1.CapstanCluster)
		listen   []string
		endpoint string
	}{
		"one box":                              {first, nil, []string{":6443"}, ""},
		"one box, another address":             {first, []func(*infrav1.CapstanCluster){bind, endpoint("198.51.100.1", 6443)}, []string{":6443", "198.51.100.1:6443"}, ""},
		"one box, endpoint of a tunnel":        {first, []func(*infrav1.CapstanCluster){endpoint("192.0.2.1", 6443)}, []string{":6443"}, ""},
		"no endpoint yet":                      {first, []func(*infrav1.CapstanCluster){spans}, []string{":6443", "192.0.2.1:6443"}, ""},
		"no endpoint yet, elsewhere":           {other, []func(*infrav1.CapstanCluster){spans}, []string{":6443"}, ""},
		"tunnel":                               {first, []func(*infrav1.CapstanCluster){spans, endpoint("192.0.2.1", 20001)}, []string{":20001", "192.0.2.1:20001"}, ""},
		"tunnel, elsewhere":                    {other, []func(*infrav1.CapstanCluster){spans, endpoint("192.0.2.1", 20001)}, []string{":20001"}, "192.0.2.1:20001"},
		"tunnel, after a move":                 {other, []func(*infrav1.CapstanCluster){spans, endpoint("192.0.2.2", 20001)}, []string{":20001", "192.0.2.2:20001"}, ""},
		"address of a host":                    {first, []func(*infrav1.CapstanCluster){spans, bind, endpoint("198.51.100.1", 6443)}, []string{":6443", "198.51.100.1:6443"}, ""},
		"address of a host, elsewhere":         {other, []func(*infrav1.CapstanCluster){spans, bind, endpoint("198.51.100.1", 6443)}, []string{":6443"}, "198.51.100.1:6443"},
		"gateway":                              {other, []func(*infrav1.CapstanCluster){spans, endpoint("10.1.0.1", 6443)}, []string{":6443"}, ""},
		"name":                                 {other, []func(*infrav1.CapstanCluster){spans, endpoint("api.example.com", 6443)}, []string{":6443"}, ""},
		"loopback":                             {other, []func(*infrav1.CapstanCluster){spans, endpoint("127.0.0.1", 6443)}, []string{":6443"}, ""},
		"IPv6":                                 {other, []func(*infrav1.CapstanCluster){spans, endpoint("2001:db8::1", 6443)}, []string{":6443"}, ""},
		"IPv6 tunnel":                          {loadbalancer.Host{Name: "first", Tunnel: "2001:db8::1"}, []func(*infrav1.CapstanCluster){spans}, []string{":6443"}, ""},
		"IPv6 only, no endpoint yet":           {loadbalancer.Host{Name: "first", Tunnel: "2001:db8::1"}, []func(*infrav1.CapstanCluster){spans, six}, []string{":6443", "[2001:db8::1]:6443"}, ""},
		"IPv6 only, tunnel elsewhere":          {loadbalancer.Host{Name: "other", Tunnel: "2001:db8::2"}, []func(*infrav1.CapstanCluster){spans, six, endpoint("2001:db8::1", 20001)}, []string{":20001"}, "[2001:db8::1]:20001"},
		"IPv6 only, IPv4 tunnel":               {first, []func(*infrav1.CapstanCluster){spans, six}, []string{":6443"}, ""},
		"IPv6 only, gateway":                   {other, []func(*infrav1.CapstanCluster){spans, six, endpoint("fd00:1::1", 6443)}, []string{":6443"}, ""},
		"the user's own load balancer before":  {first, []func(*infrav1.CapstanCluster){spans, endpoint("203.0.113.1", 443), func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.Port = 6443 }}, []string{":6443"}, "203.0.113.1:443"},
		"address of the network, on all hosts": {other, []func(*infrav1.CapstanCluster){spans, endpoint("10.1.0.9", 6443), func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.Address = "10.1.0.9" }}, []string{":6443", "10.1.0.9:6443"}, ""},
	} {
		c := &infrav1.CapstanCluster{}
		c.Spec.LoadBalancer.HostName, c.Spec.Network.MachineCIDR = "first", "10.1.0.0/16"
		for _, change := range tc.changes {
			change(c)
		}
		lb := loadbalancer.Desired(c, client.ObjectKey{}, nil, tc.on)
		if !slices.Equal(lb.GetListen(), tc.listen) || lb.GetEndpoint() != tc.endpoint {
			t.Errorf("%s: %v, %q; want %v, %q", name, lb.GetListen(), lb.GetEndpoint(), tc.listen, tc.endpoint)
		}
	}
}

package loadbalancer

import (
	"testing"

	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

func virtualCluster(host string) *infrav1.CapstanCluster {
	c := &infrav1.CapstanCluster{}
	c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: host, Port: 6443}
	c.Spec.Network.MachineCIDR, c.Spec.Network.Overlay.VNI = "10.200.8.0/21", 5000
	c.Spec.LoadBalancer.HostName = "first"
	return c
}

// ALL-18: only an address that the administrator of the host allows is virtual.
func TestIsVirtual_ALL18(t *testing.T) {
	allowed := []string{"203.0.113.64/28", "198.51.100.7/32"}
	for host, want := range map[string]bool{
		"203.0.113.64": true, "203.0.113.79": true, "198.51.100.7": true,
		"203.0.113.80": false, "198.51.100.8": false, "api.example.com": false, "": false, "::ffff:203.0.113.64": false, "203.0.113.064": false,
	} {
		if got := IsVirtual(virtualCluster(host), allowed); got != want {
			t.Errorf("%q: %v", host, got)
		}
	}
	for host, want := range map[string]bool{
		"2001:db8::5": true, "2001:db8::6": false, "2001:DB8::5": false, "2001:db8:0::5": false, "2001:db8::5%eth0": false, "203.0.113.64": false,
	} {
		c := virtualCluster(host)
		c.Spec.Network.MachineCIDR = "fd00:1::/64"
		if got := IsVirtual(c, append(allowed, "2001:db8::5/128")); got != want {
			t.Errorf("IPv6 only, %q: %v", host, got)
		}
	}
	for name, change := range map[string]func(*infrav1.CapstanCluster){
		"IPv6":                          func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = "fd00:1::/64" },
		"one box":                       func(c *infrav1.CapstanCluster) { c.Spec.Network.Overlay.VNI = 0 },
		"external":                      func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.Mode = infrav1.LoadBalancerExternal },
		"its own address":               func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.BindAddress = "203.0.113.64" },
		"a pool without an address yet": func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.AddressFromPool = &infrav1.IPPoolReference{} },
		"a pool with another address": func(c *infrav1.CapstanCluster) {
			c.Spec.LoadBalancer.AddressFromPool, c.Spec.LoadBalancer.Address = &infrav1.IPPoolReference{}, "203.0.113.65"
		},
		"a pool in the machine network": func(c *infrav1.CapstanCluster) {
			c.Spec.Network.MachineCIDR = "203.0.113.0/24"
			c.Spec.LoadBalancer.AddressFromPool, c.Spec.LoadBalancer.Address = &infrav1.IPPoolReference{}, "203.0.113.64"
		},
	} {
		c := virtualCluster("203.0.113.64")
		if change(c); IsVirtual(c, allowed) {
			t.Errorf("%s: virtual", name)
		}
	}
	fromPool := virtualCluster("203.0.113.64")
	fromPool.Spec.LoadBalancer.AddressFromPool, fromPool.Spec.LoadBalancer.Address = &infrav1.IPPoolReference{}, "203.0.113.64"
	if !IsVirtual(fromPool, allowed) || Additional(fromPool, Host{Name: "first"}) != "" {
		t.Error("the address of a pool is virtual, and no host listens on it without holding it")
	}
	if IsVirtual(fromPool, nil) {
		t.Error("the address of a pool is virtual on a host that does not allow it")
	}
}

// ALL-18: a namespace that no host admits cannot keep an address from others by writing it into its objects.
func TestReserves_ALL18(t *testing.T) {
	listed := []infrav1.CapstanHost{{Spec: infrav1.CapstanHostSpec{VirtualAddresses: []string{"203.0.113.64/28"}}}}
	provisioned := func(c *infrav1.CapstanCluster) { c.Status.Initialization.Provisioned = ptr.To(true) }
	external := func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.Mode = infrav1.LoadBalancerExternal }
	for name, tc := range map[string]struct {
		host      string
		admitting []infrav1.CapstanHost
		held      bool
		changes   []func(*infrav1.CapstanCluster)
		want      bool
	}{
		"admitted":                         {host: "203.0.113.64", admitting: listed, want: true},
		"no host admits it":                {host: "203.0.113.64"},
		"on a host, not admitted any more": {host: "203.0.113.64", held: true, want: true},
		"provisioned, no host admits it":   {host: "203.0.113.64", changes: []func(*infrav1.CapstanCluster){provisioned}},
		"provisioned, not listed":          {host: "203.0.113.80", admitting: listed, changes: []func(*infrav1.CapstanCluster){provisioned}},
		"not listed":                       {host: "203.0.113.80", admitting: listed},
		"external":                         {host: "203.0.113.64", admitting: listed, changes: []func(*infrav1.CapstanCluster){external, provisioned}},
		"one box": {host: "203.0.113.64", admitting: listed, changes: []func(*infrav1.CapstanCluster){
			func(c *infrav1.CapstanCluster) { c.Spec.Network.Overlay.VNI = 0 },
		}},
	} {
		c := virtualCluster(tc.host)
		for _, change := range tc.changes {
			change(c)
		}
		if got := Reserves(c, tc.admitting, tc.held); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// Two hosts never have a virtual address at the same time: as long as the first may have it without an election, or this is not
// known, no other host takes part in one.
func TestVirtualAddress(t *testing.T) {
	reported := func(first bool) *hostpb.LoadBalancer {
		return &hostpb.LoadBalancer{VirtualAddress: &hostpb.VirtualAddress{Address: "203.0.113.64", First: first}}
	}
	without := &hostpb.LoadBalancer{}
	elsewhere := &hostpb.LoadBalancer{VirtualAddress: &hostpb.VirtualAddress{Address: "203.0.113.65"}}
	for name, tc := range map[string]struct {
		host    string
		reports Reports
		want    string
	}{
		"the first, before the API server answers":          {"first", Reports{}, "first"},
		"the first, after that":                             {"first", Reports{Initialized: true, Current: reported(true), First: reported(true)}, "elected"},
		"the first, in a new management cluster":            {"first", Reports{Current: reported(false), First: reported(false)}, "elected"},
		"another, before the API server answers":            {"other", Reports{First: reported(true)}, "none"},
		"another, before the first takes part":              {"other", Reports{Initialized: true, Current: without, First: reported(true)}, "none"},
		"another, after that":                               {"other", Reports{Initialized: true, Current: without, First: reported(false)}, "elected"},
		"another, the first is unknown":                     {"other", Reports{Initialized: true, Current: without}, "none"},
		"another, the first is unknown, but it takes part":  {"other", Reports{Initialized: true, Current: reported(false)}, "elected"},
		"another, that was the first before it was changed": {"other", Reports{Initialized: true, Current: reported(true), First: reported(true)}, "none"},
		"a third takes part":                                {"other", Reports{Initialized: true, Current: without, Others: []*hostpb.LoadBalancer{nil, without, reported(false)}}, "elected"},
		"a third takes part, the first has no address":      {"other", Reports{Initialized: true, First: without, Others: []*hostpb.LoadBalancer{reported(false)}}, "elected"},
		"a third takes part, the first says otherwise":      {"other", Reports{Initialized: true, Current: without, First: reported(true), Others: []*hostpb.LoadBalancer{reported(false)}}, "none"},
		"a third takes part, in a new management cluster":   {"other", Reports{Current: without, Others: []*hostpb.LoadBalancer{reported(false)}}, "none"},
		"a third was the first":                             {"other", Reports{Initialized: true, Current: without, Others: []*hostpb.LoadBalancer{reported(true)}}, "none"},
		"a third has another address":                       {"other", Reports{Initialized: true, Current: without, Others: []*hostpb.LoadBalancer{elsewhere}}, "none"},
		"no third takes part":                               {"other", Reports{Initialized: true, Current: without, Others: []*hostpb.LoadBalancer{nil, without}}, "none"},
	} {
		t.Run(name, func(t *testing.T) {
			h := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: tc.host}, Spec: infrav1.CapstanHostSpec{VirtualAddresses: []string{"203.0.113.64/28"}}}
			want := map[string]*hostpb.VirtualAddress{
				"first": {Address: "203.0.113.64", First: true}, "elected": {Address: "203.0.113.64"},
			}[tc.want]
			if got := VirtualAddress(virtualCluster("203.0.113.64"), h, tc.reports); !proto.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
			h.Spec.VirtualAddresses = nil
			if got := VirtualAddress(virtualCluster("203.0.113.64"), h, tc.reports); got != nil {
				t.Errorf("%v on a host that does not allow it", got)
			}
		})
	}
}

// ALL-18: in a LAN, the endpoint is an address of the LAN that the administrator of the host allows, also one of a pool, and the load
// balancer listens there only. Whether the host has a tunnel address does not matter.
func TestInLAN_ALL18(t *testing.T) {
	inLAN := func(host string) *infrav1.CapstanCluster {
		c := virtualCluster(host)
		c.Spec.Network.MachineCIDR, c.Spec.Network.Overlay.VNI, c.Spec.Network.LAN.Name = "192.0.2.0/24", 0, "lab"
		return c
	}
	h := &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{VirtualAddresses: []string{"203.0.113.64/28", "192.0.2.64/28", "192.0.0.0/16", "2001:db8::/122"}}}
	for host, want := range map[string]bool{"": true, "192.0.2.64": true, "192.0.2.63": false, "203.0.113.64": false, "2001:db8::1": false, "lab.example.com": false} {
		if got := Serves(inLAN(host), h); got != want {
			t.Errorf("%q: %v", host, got)
		}
	}
	if Serves(inLAN(""), &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{VirtualAddresses: []string{"203.0.113.64/28"}}}) {
		t.Error("a host without addresses of the LAN")
	}
	c := inLAN("192.0.2.64")
	c.Spec.LoadBalancer.AddressFromPool, c.Spec.LoadBalancer.Address = &infrav1.IPPoolReference{}, "192.0.2.64"
	want := &hostpb.LoadBalancer{
		Listen: []string{"192.0.2.64:6443"}, Endpoint: "192.0.2.64:6443", VirtualAddress: &hostpb.VirtualAddress{Address: "192.0.2.64", First: true},
	}
	h.Name = c.Spec.LoadBalancer.HostName
	on := Host{Name: h.Name, Tunnel: "192.0.2.5", Virtual: VirtualAddress(c, h, Reports{})}
	if got := Desired(c, client.ObjectKey{}, nil, on); !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if c.Spec.LoadBalancer.Mode = infrav1.LoadBalancerExternal; IsVirtual(c, h.Spec.VirtualAddresses) || Moves(c) {
		t.Error("an external endpoint is virtual")
	}
}

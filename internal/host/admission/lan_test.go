package admission

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
)

// A host refuses a LAN that could disturb its own links, and one with anything that has no effect there.
func TestCheckLAN(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*hostpb.MachineSpec)
		says   string // empty if the request is accepted
	}{
		"good":                {func(*hostpb.MachineSpec) {}, ""},
		"no pods":             {func(s *hostpb.MachineSpec) { s.Network.Lan.Pods = nil }, ""},
		"no bridge":           {func(s *hostpb.MachineSpec) { s.Network.Lan.Bridge = "" }, "not the name of a bridge"},
		"path":                {func(s *hostpb.MachineSpec) { s.Network.Lan.Bridge = "../x" }, "not the name of a bridge"},
		"rule":                {func(s *hostpb.MachineSpec) { s.Network.Lan.Bridge = "a accept" }, "not the name of a bridge"},
		"long name":           {func(s *hostpb.MachineSpec) { s.Network.Lan.Bridge = strings.Repeat("b", 16) }, "not the name of a bridge"},
		"bridge of a cluster": {func(s *hostpb.MachineSpec) { s.Network.Lan.Bridge = "cap0123456789" }, "link of capstand"},
		"link":                {func(s *hostpb.MachineSpec) { s.Network.Lan.Bridge = "capwg" }, "link of capstand"},
		"overlay": {func(s *hostpb.MachineSpec) {
			s.Network.Overlay = &hostpb.Overlay{Vni: 5000, Address: "192.0.2.1", Mtu: 1450}
		}, "cannot have an overlay"},
		"dual stack": {func(s *hostpb.MachineSpec) {
			dualStack(s)
			s.Addresses[1].Gateway, s.Network.Lan.Pods = "fd00:1::1", []string{"10.244.0.0/16", "fd00:244::/48"}
		}, ""},
		"dual stack, one gateway": {dualStack, "address fd00:1::a has no gateway"},
		"another notation": {func(s *hostpb.MachineSpec) {
			dualStack(s)
			s.Addresses[1].Address, s.Addresses[1].Gateway = "fd00:1:0::A", "fd00:1::1"
		}, "expected the form fd00:1::a"},
		"IPv6 pods in the LAN": {func(s *hostpb.MachineSpec) {
			dualStack(s)
			s.Network.Lan.Pods = []string{"fd00::/16"}
		}, "outside of it"},
		"link-local pods": {func(s *hostpb.MachineSpec) {
			dualStack(s)
			s.Network.Lan.Pods = []string{"fe80::/64"}
		}, "of unicast addresses"},
		"no gateway":            {func(s *hostpb.MachineSpec) { s.Addresses[0].Gateway = "" }, "has no gateway"},
		"pods in the LAN":       {func(s *hostpb.MachineSpec) { s.Network.Lan.Pods = []string{"10.0.0.0/8"} }, "outside of it"},
		"pods everywhere":       {func(s *hostpb.MachineSpec) { s.Network.Lan.Pods = []string{"0.0.0.0/0"} }, "of unicast addresses"},
		"IPv6 pods":             {func(s *hostpb.MachineSpec) { s.Network.Lan.Pods = []string{"fd00::/64"} }, "expected a network of its address family"},
		"malformed pods":        {func(s *hostpb.MachineSpec) { s.Network.Lan.Pods = []string{"0.0.0.0/0 } accept"} }, "expected a network without host bits"},
		"VLAN":                  {func(s *hostpb.MachineSpec) { s.Network.Lan.Vlan = 4094 }, ""},
		"reserved VLAN":         {func(s *hostpb.MachineSpec) { s.Network.Lan.Vlan = 4095 }, "VLAN 4095 is not valid: expected 1 to 4094"},
		"large VLAN":            {func(s *hostpb.MachineSpec) { s.Network.Lan.Vlan = 65536 + 100 }, "is not valid"},
		"too many pod networks": {func(s *hostpb.MachineSpec) { s.Network.Lan.Pods = slices.Repeat([]string{"10.244.0.0/16"}, 9) }, "at most 8"},
	} {
		spec := goodSpec()
		spec.Network.Lan = &hostpb.LAN{Bridge: "br-lab", Pods: []string{"10.244.0.0/16"}}
		spec.Addresses[0].Gateway = "10.1.0.1"
		test.change(spec)
		err := CheckMachine(spec)
		if test.says == "" && err != nil || test.says != "" && (status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), test.says)) {
			t.Errorf("%s: got %v, want %q", name, err, test.says)
		}
	}
}

// Clusters share a LAN. A network does not move between a LAN and a network of its own. Hosts publish no Services in a LAN, and their load
// balancers listen at a virtual address of the LAN only.
func TestNetworksInLAN(t *testing.T) {
	in := func(id, bridge string) *hostpb.Network {
		n := &hostpb.Network{Id: id, Namespace: "default", Name: id, Cidr: "10.1.0.0/24"}
		if bridge != "" {
			n.Lan = &hostpb.LAN{Bridge: bridge}
		}
		return n
	}
	have := map[string]*hostpb.Network{"a": in("a", "br-lab")}
	if err := NoOverlap(in("b", "br-lab"), maps.Values(have)); err != nil {
		t.Errorf("a second cluster in the LAN: %v", err)
	}
	vlan := in("a", "br-lab")
	vlan.Lan.Vlan = 100
	for name, n := range map[string]*hostpb.Network{"another bridge": in("a", "br-x"), "another VLAN": vlan, "no LAN": in("a", "")} {
		if err := Network(n, maps.Values(have)); err == nil || !strings.Contains(err.Error(), "delete the machines") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, test := range map[string]struct {
		listen, endpoint, virtual string
		accepted                  bool
	}{
		"gateway":                   {":6443", "", "", false},
		"gateway, redirected":       {":6443", "10.1.0.9:6443", "10.1.0.9", false},
		"own address":               {"10.1.0.9:6443", "10.1.0.9:6443", "", false},
		"virtual address":           {"10.1.0.9:6443", "10.1.0.9:6443", "10.1.0.9", true},
		"virtual address elsewhere": {"10.2.0.9:6443", "10.2.0.9:6443", "10.2.0.9", false},
	} {
		lb := &hostpb.LoadBalancer{NetworkId: "a", Listen: []string{test.listen}, Endpoint: test.endpoint}
		if test.virtual != "" {
			lb.VirtualAddress = &hostpb.VirtualAddress{Address: test.virtual}
		}
		if err := BalancerNetwork(lb, have["a"]); test.accepted && err != nil || !test.accepted && status.Code(err) != codes.FailedPrecondition {
			t.Errorf("load balancer, %s: %v", name, err)
		}
	}
	services := &hostpb.SetServicesRequest{NetworkId: "a", Namespace: "default", Name: "a", Services: []*hostpb.PublishedService{{}}}
	if err := Services(services, have["a"]); err == nil || !strings.Contains(err.Error(), "is a LAN") {
		t.Errorf("Services: %v", err)
	}
}

// Backends of a load balancer are machines of its network: the process is in the network namespace of the host, and reaches its other programs.
func TestBackendsOfTheNetwork(t *testing.T) {
	isolated := &hostpb.Network{Id: "n", Cidr: "10.1.0.0/24"}
	lan := &hostpb.Network{Id: "n", Cidr: "10.1.0.0/24", Lan: &hostpb.LAN{Bridge: "br0"}}
	for address, want := range map[string]struct{ isolated, lan bool }{
		"10.1.0.10:6443":        {true, true},
		"10.1.0.1:6443":         {false, true},
		"10.2.0.10:6443":        {false, false},
		"127.0.0.1:6443":        {false, false},
		"[::1]:6443":            {false, false},
		"intranet.example:6443": {false, false},
		"10.1.0.10":             {false, false},
	} {
		lb := &hostpb.LoadBalancer{NetworkId: "n", Listen: []string{"10.1.0.9:6443"}, Endpoint: "10.1.0.9:6443",
			VirtualAddress: &hostpb.VirtualAddress{Address: "10.1.0.9"}, Backends: []*hostpb.Backend{{Name: "m", Address: address}}}
		for n, accepted := range map[*hostpb.Network]bool{isolated: want.isolated, lan: want.lan} {
			if err := BalancerNetwork(lb, n); (err == nil) != accepted || err != nil && status.Code(err) != codes.InvalidArgument {
				t.Errorf("%s, in a LAN %v: %v", address, n.Lan != nil, err)
			}
		}
	}
}

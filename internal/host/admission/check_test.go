package admission

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
)

func goodSpec() *hostpb.MachineSpec {
	return &hostpb.MachineSpec{
		Id: "m-1", Namespace: "default", Name: "one", Cpus: 1, MemoryBytes: 1 << 30, Image: HostImage, KubernetesVersion: "v1.36.3",
		Network:   &hostpb.Network{Id: "n-1", Namespace: "default", Name: "demo", Cidr: "10.1.0.0/24"},
		Addresses: []*hostpb.Address{{Address: "10.1.0.10", Prefix: 24}},
	}
}

func dualStack(s *hostpb.MachineSpec) {
	s.Network.Ipv6Cidr = "fd00:1::/64"
	s.Addresses = append(s.Addresses, &hostpb.Address{Address: "fd00:1::a", Prefix: 64})
}

// IPAM-08: a machine has one address of each family of its network.
func TestCheckMachine(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*hostpb.MachineSpec)
		says   string // empty if the request is accepted
	}{
		"good":     {func(*hostpb.MachineSpec) {}, ""},
		"all cpus": {func(s *hostpb.MachineSpec) { s.Cpus = 0 }, ""},
		"dual stack": {func(s *hostpb.MachineSpec) {
			dualStack(s)
			s.Addresses[1].Gateway = "fd00:1::1"
		}, ""},
		"IPv4 only in a dual stack network": {func(s *hostpb.MachineSpec) { s.Network.Ipv6Cidr = "fd00:1::/64" }, ""},
		"no IPv6 network": {func(s *hostpb.MachineSpec) {
			dualStack(s)
			s.Network.Ipv6Cidr = ""
		}, "one more than"},
		"two of IPv4": {func(s *hostpb.MachineSpec) {
			dualStack(s)
			s.Addresses[1] = &hostpb.Address{Address: "10.1.0.11", Prefix: 24}
		}, "not in the machine network fd00:1::/64"},
		"IPv6 only": {func(s *hostpb.MachineSpec) {
			s.Network.Cidr, s.Addresses = "fd00:1::/64", []*hostpb.Address{{Address: "fd00:1::a", Prefix: 64}}
		}, ""},
		"IPv4 in an IPv6 network": {func(s *hostpb.MachineSpec) { s.Network.Cidr = "fd00:1::/64" }, "not in the machine network fd00:1::/64"},
		"IPv6 twice": {func(s *hostpb.MachineSpec) {
			s.Network.Cidr, s.Network.Ipv6Cidr = "fd00:1::/64", "fd00:2::/64"
		}, "expected an IPv4 network first, or no second network"},
		"second IPv4 network": {func(s *hostpb.MachineSpec) { s.Network.Ipv6Cidr = "10.2.0.0/24" }, "is not IPv6"},
		"IPv6 gateway": {func(s *hostpb.MachineSpec) {
			dualStack(s)
			s.Addresses[1].Address = "fd00:1::1"
		}, "is the gateway"},
		"gateway elsewhere":  {func(s *hostpb.MachineSpec) { s.Addresses[0].Gateway = "10.2.0.1" }, "gateway"},
		"id leads elsewhere": {func(s *hostpb.MachineSpec) { s.Id = "../x" }, "id"},
		"no id":              {func(s *hostpb.MachineSpec) { s.Id = "" }, "id"},
		"name in capitals":   {func(s *hostpb.MachineSpec) { s.Name = "One" }, "name"},
		"negative cpus":      {func(s *hostpb.MachineSpec) { s.Cpus = -1 }, "cpus"},
		"hardly any memory":  {func(s *hostpb.MachineSpec) { s.MemoryBytes = 1 }, "memory"},
		"no network":         {func(s *hostpb.MachineSpec) { s.Network = nil }, "network"},
		"another prefix":     {func(s *hostpb.MachineSpec) { s.Addresses[0].Prefix = 16 }, "prefix"},
		"broadcast":          {func(s *hostpb.MachineSpec) { s.Addresses[0].Address = "10.1.0.255" }, "broadcast"},
		"the network itself": {func(s *hostpb.MachineSpec) { s.Addresses[0].Address = "10.1.0.0" }, "network or broadcast"},
		"second is no address": {func(s *hostpb.MachineSpec) {
			dualStack(s)
			s.Addresses[1].Address = "x"
		}, "not an IP address"},
	} {
		spec := goodSpec()
		test.change(spec)
		err := CheckMachine(spec)
		if test.says == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: got %v, want INVALID_ARGUMENT with %q", name, err, test.says)
		}
	}
}

// The cgroup of a machine has its id. It must not be that of a load balancer.
func TestReservedID(t *testing.T) {
	info := &hostpb.HostInfo{Cpus: 64, MemoryBytes: 64 << 30, Images: []string{HostImage}, KubernetesVersions: []string{"v1.36.3"}}
	for id, want := range map[string]codes.Code{"balancer-id-1": codes.InvalidArgument, "balancer": codes.OK, "a-balancer-1": codes.OK} {
		spec := goodSpec()
		spec.Id = id
		if err := NewMachine(spec, info, false, func(func(*hostpb.MachineSpec) bool) {}); status.Code(err) != want {
			t.Errorf("%s: %v, want %s", id, err, want)
		}
	}
}

func TestFitsAndProvided(t *testing.T) {
	info := &hostpb.HostInfo{
		Cpus:        1,
		MemoryBytes: 4 << 30, AllocatedMemoryBytes: 3 << 30, Images: []string{HostImage}, KubernetesVersions: []string{"v1.35.0", "v1.36.3"},
	}
	if err := fits(goodSpec(), info); err != nil {
		t.Errorf("a machine of exactly the free size was refused: %v", err)
	}
	info.AllocatedMemoryBytes++
	if err := fits(goodSpec(), info); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a machine one byte above the free size: %v", err)
	}
	info.AllocatedMemoryBytes = 0
	big := goodSpec()
	big.Cpus = 2
	if err := fits(big, info); status.Code(err) != codes.InvalidArgument {
		t.Errorf("more CPUs than the host has: %v", err)
	}
	if err := provided(goodSpec(), info); err != nil {
		t.Error(err)
	}
	spec := goodSpec()
	spec.KubernetesVersion = "1.36.3"
	if err := provided(spec, info); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "v1.35.0, v1.36.3") {
		t.Errorf("unknown version: %v", err)
	}
}

// The properties of a machine are immutable. Their notation can change.
func TestUnchanged(t *testing.T) {
	have, want := goodSpec(), goodSpec()
	want.Addresses[0].Gateway = "10.1.0.1"
	want.Network.Bridge = "cap0"
	if err := unchanged(have, want); err != nil {
		t.Errorf("the same properties in another notation: %v", err)
	}
	want.ProviderId = "capstan://other"
	if err := unchanged(have, want); status.Code(err) != codes.InvalidArgument {
		t.Errorf("another provider id: %v", err)
	}
}

func TestListenAddresses(t *testing.T) {
	for good, listen := range map[bool][][]string{
		true:  {{":6443"}, {":6443", "192.0.2.10:6443"}, {"10.1.0.1:6443", "[fd00::1]:6443"}},
		false: {{":6443", ":6443"}, {":6443", "0.0.0.0:443"}, {"127.0.0.1:6443"}, {"[::]:6443"}, {"169.254.0.1:6443"}, {"224.0.0.1:6443"}, {":6443", "host:1"}, {"6443"}},
	} {
		for _, l := range listen {
			if err := CheckLoadBalancer(&hostpb.LoadBalancer{Id: "network-1", Namespace: "default", Name: "demo", Listen: l}); (err == nil) != good {
				t.Errorf("%q: %v", l, err)
			}
		}
	}
}

package admission

import (
	"strings"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
)

// A Service has an address of a family that the machines have, and machines and clients of this family.
func TestFamilyOfService(t *testing.T) {
	network := func(ipv6 bool) *hostpb.Network {
		n := &hostpb.Network{Id: "n-1", Namespace: "default", Name: "demo", Cidr: "10.1.0.0/24"}
		if ipv6 {
			n.Ipv6Cidr = "fd00:1::/64"
		}
		return n
	}
	for name, test := range map[string]struct {
		address, machine, source string
		network                  *hostpb.Network
		says                     string // empty if the request is accepted
	}{
		"IPv4":                   {"192.0.2.10", "10.1.0.10", "198.51.100.0/24", network(true), ""},
		"IPv6":                   {"2001:db8::10", "fd00:1::a", "2001:db8:9::/64", network(true), ""},
		"IPv6 without a network": {"2001:db8::10", "fd00:1::a", "2001:db8:9::/64", network(false), "has no addresses of this family"},
		"IPv6 to an IPv4 one":    {"2001:db8::10", "10.1.0.10", "2001:db8:9::/64", network(true), "not in the machine network fd00:1::/64"},
		"IPv6 for IPv4 clients":  {"2001:db8::10", "fd00:1::a", "198.51.100.0/24", network(true), "source range"},
		"IPv4 for IPv6 clients":  {"192.0.2.10", "10.1.0.10", "2001:db8:9::/64", network(true), "source range"},
		"a mapped address":       {"::ffff:192.0.2.10", "10.1.0.10", "198.51.100.0/24", network(true), "global unicast"},
		"a zone":                 {"2001:db8::10%eth0", "fd00:1::a", "2001:db8:9::/64", network(true), "global unicast"},
		"link-local":             {"fe80::1", "fd00:1::a", "2001:db8:9::/64", network(true), "global unicast"},
		"another notation":       {"2001:db8:0::10", "fd00:1::a", "2001:db8:9::/64", network(true), "canonical form"},
		"rules for nftables":     {"192.0.2.10", "10.1.0.10", "0.0.0.0/0 accept", network(true), "source range"},
	} {
		err := Services(&hostpb.SetServicesRequest{NetworkId: "n-1", Namespace: "default", Name: "demo", Services: []*hostpb.PublishedService{{
			Name: "default/web", Address: test.address, Machines: []string{test.machine}, SourceRanges: []string{test.source},
			Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_TCP, Port: 80, NodePort: 30080}},
		}}}, test.network)
		if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, want %q", name, err, test.says)
		}
	}
}

// Services share an address of the host if they have different ports, and no other address.
func TestPlacesOfServices(t *testing.T) {
	network := &hostpb.Network{Id: "n-1", Namespace: "default", Name: "demo", Cidr: "10.1.0.0/24"}
	at := func(name, address string, hostPorts bool, protocol hostpb.PublishedPort_Protocol, port uint32) *hostpb.PublishedService {
		return &hostpb.PublishedService{Name: name, Address: address, HostPorts: hostPorts, Ports: []*hostpb.PublishedPort{{Protocol: protocol, Port: port, NodePort: 30080}}}
	}
	const tcp, udp = hostpb.PublishedPort_TCP, hostpb.PublishedPort_UDP
	first := at("a/web", "192.0.2.1", true, tcp, 80)
	for name, test := range map[string]struct {
		second *hostpb.PublishedService
		says   string // empty if the request is accepted
	}{
		"another port":           {at("a/other", "192.0.2.1", true, tcp, 81), ""},
		"another protocol":       {at("a/other", "192.0.2.1", true, udp, 80), ""},
		"another address":        {at("a/web", "192.0.2.2", true, tcp, 80), ""},
		"the same port":          {at("a/other", "192.0.2.1", true, tcp, 80), "TCP port 80 is there twice at the address 192.0.2.1"},
		"the same Service":       {at("a/web", "192.0.2.1", true, tcp, 81), "a/web is there twice"},
		"the whole address":      {at("a/other", "192.0.2.1", false, tcp, 81), "two Services have the address"},
		"another, whole address": {at("a/web", "192.0.2.2", false, tcp, 80), ""},
	} {
		for _, services := range [][]*hostpb.PublishedService{{first, test.second}, {test.second, first}} {
			err := Services(&hostpb.SetServicesRequest{NetworkId: "n-1", Namespace: "default", Name: "demo", Services: services}, network)
			if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("%s: %v, want %q", name, err, test.says)
			}
		}
	}
}

// Names are recorded and listed together for all clusters, so they are bounded.
func TestNameOfService(t *testing.T) {
	network := &hostpb.Network{Id: "n-1", Namespace: "default", Name: "demo", Cidr: "10.1.0.0/24"}
	for length, says := range map[int]string{hostpb.MaxServiceName: "", hostpb.MaxServiceName + 1: "at most 255", 3 << 20: "at most 255"} {
		err := Services(&hostpb.SetServicesRequest{NetworkId: "n-1", Namespace: "default", Name: "demo", Services: []*hostpb.PublishedService{{
			Name: strings.Repeat("x", length), Address: "192.0.2.1", HostPorts: true, Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_TCP, Port: 80, NodePort: 30080}},
		}}}, network)
		if (err == nil) != (says == "") || err != nil && (!strings.Contains(err.Error(), says) || len(err.Error()) > 1024) {
			t.Errorf("%d bytes: %v, want %q", length, err, says)
		}
	}
}

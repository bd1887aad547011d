package admission

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

func rackNetwork() *hostpb.Network {
	return &hostpb.Network{
		Id: "n-1", Namespace: "default", Name: "demo", Cidr: "10.1.0.0/24", Ipv6Cidr: "fd00:1::/64",
		Overlay: &hostpb.Overlay{Vni: 5000, Address: "192.0.2.1", Mtu: 1450},
	}
}

func peer(host string, addresses ...string) *hostpb.Peer {
	return &hostpb.Peer{Host: host, Addresses: addresses}
}

func TestPeers(t *testing.T) {
	for name, test := range map[string]struct {
		peers []*hostpb.Peer
		says  string // empty if the peers are accepted
	}{
		"none":                 {nil, ""},
		"two on one host":      {[]*hostpb.Peer{peer("192.0.2.2", "10.1.0.10", "fd00:1::a"), peer("192.0.2.2", "10.1.0.11")}, ""},
		"no address":           {[]*hostpb.Peer{peer("192.0.2.2")}, "expected 1 to 2"},
		"three addresses":      {[]*hostpb.Peer{peer("192.0.2.2", "10.1.0.10", "fd00:1::a", "fd00:1::b")}, "expected 1 to 2"},
		"IPv6 first":           {[]*hostpb.Peer{peer("192.0.2.2", "fd00:1::a", "10.1.0.10")}, "not in the machine network"},
		"the gateway":          {[]*hostpb.Peer{peer("192.0.2.2", "10.1.0.1")}, "is the gateway"},
		"the IPv6 gateway":     {[]*hostpb.Peer{peer("192.0.2.2", "10.1.0.10", "fd00:1::1")}, "is the gateway"},
		"the broadcast":        {[]*hostpb.Peer{peer("192.0.2.2", "10.1.0.255")}, "broadcast"},
		"another network":      {[]*hostpb.Peer{peer("192.0.2.2", "10.2.0.10")}, "not in the machine network"},
		"one address twice":    {[]*hostpb.Peer{peer("192.0.2.2", "10.1.0.10"), peer("192.0.2.3", "10.1.0.10")}, "two peers have address 10.1.0.10"},
		"another form":         {[]*hostpb.Peer{peer("192.0.2.2", "10.1.0.10", "fd00:1:0::a")}, "expected the form fd00:1::a"},
		"this host":            {[]*hostpb.Peer{peer("192.0.2.1", "10.1.0.10")}, "is this host"},
		"no host":              {[]*hostpb.Peer{peer("", "10.1.0.10")}, "not a tunnel address"},
		"host by name":         {[]*hostpb.Peer{peer("rack-2", "10.1.0.10")}, "not a tunnel address"},
		"host of all":          {[]*hostpb.Peer{peer("224.0.0.1", "10.1.0.10")}, "not a tunnel address"},
		"host with a zone":     {[]*hostpb.Peer{peer("fd00::2%eth0", "10.1.0.10")}, "not a tunnel address"},
		"host in IPv6":         {[]*hostpb.Peer{peer("fd00::2", "10.1.0.10")}, "of one family"},
		"mapped IPv4 as IPv6":  {[]*hostpb.Peer{peer("::ffff:192.0.2.2", "10.1.0.10")}, "not a tunnel address"},
		"loopback as the host": {[]*hostpb.Peer{peer("127.0.0.2", "10.1.0.10")}, "not a tunnel address"},
	} {
		t.Run(name, func(t *testing.T) {
			err := Peers(&hostpb.SetPeersRequest{NetworkId: "n-1", Namespace: "default", Name: "demo", Peers: test.peers}, rackNetwork(), false)
			if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %q", err, test.says)
			}
			if err != nil && refusal.Of(err).Reason != hostpb.Refusal_INVALID {
				t.Errorf("reason %s", refusal.Of(err).Reason)
			}
		})
	}
}

// A cluster can have as many machines on other hosts as a machine pool.
func TestPeersOfALargeCluster(t *testing.T) {
	n := rackNetwork()
	n.Cidr = "10.1.0.0/16"
	var all []*hostpb.Peer
	for i := range 10_001 {
		all = append(all, peer("192.0.2.2", fmt.Sprintf("10.1.%d.%d", 1+i/256, i%256)))
	}
	for count, says := range map[int]string{10_000: "", 10_001: "expected at most 10000"} {
		err := Peers(&hostpb.SetPeersRequest{NetworkId: "n-1", Namespace: "default", Name: "demo", Peers: all[:count]}, n, false)
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%d machines: got %v, want %q", count, err, says)
		}
	}
}

// A host without machines can have the network for its load balancer.
func TestPeerHosts(t *testing.T) {
	for host, good := range map[string]bool{"192.0.2.9": true, "192.0.2.1": false, "": false, "fd00::2": false, "0.0.0.0": false} {
		err := Peers(&hostpb.SetPeersRequest{NetworkId: "n-1", Namespace: "default", Name: "demo", Hosts: []string{host}}, rackNetwork(), false)
		if (err == nil) != good {
			t.Errorf("%q: got %v", host, err)
		}
	}
}

// A host that encrypts its overlays needs the keys of exactly the other hosts of the network.
func TestPeerKeys(t *testing.T) {
	const one, two = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=", "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI="
	for name, test := range map[string]struct {
		encrypts bool
		keys     map[string]string
		says     string // empty if the keys are accepted
		reason   hostpb.Refusal_Reason
	}{
		"no encryption":                    {says: ""},
		"all keys":                         {true, map[string]string{"192.0.2.2": one, "192.0.2.3": two}, "", 0},
		"only the other hosts encrypt":     {false, map[string]string{"192.0.2.2": one}, "this host does not", hostpb.Refusal_UNSUPPORTED},
		"the host of a machine has none":   {true, map[string]string{"192.0.2.3": two}, "host 192.0.2.2 of network n-1 has no key", hostpb.Refusal_UNSUPPORTED},
		"a host without machines has none": {true, map[string]string{"192.0.2.2": one}, "host 192.0.2.3 of network n-1 has no key", hostpb.Refusal_UNSUPPORTED},
		"one key of two hosts":             {true, map[string]string{"192.0.2.2": one, "192.0.2.3": one}, "one different key", hostpb.Refusal_INVALID},
		"a key of no host":                 {true, map[string]string{"192.0.2.2": one, "192.0.2.3": two, "192.0.2.4": "AwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwM="}, "host 192.0.2.4 has a key", hostpb.Refusal_INVALID},
		"not a key":                        {true, map[string]string{"192.0.2.2": "x", "192.0.2.3": two}, "is not a public key", hostpb.Refusal_INVALID},
		"the empty key":                    {true, map[string]string{"192.0.2.2": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", "192.0.2.3": two}, "is not a public key", hostpb.Refusal_INVALID},
	} {
		t.Run(name, func(t *testing.T) {
			req := &hostpb.SetPeersRequest{
				NetworkId: "n-1", Namespace: "default", Name: "demo",
				Peers: []*hostpb.Peer{peer("192.0.2.2", "10.1.0.10")}, Hosts: []string{"192.0.2.3"}, PublicKeys: test.keys,
			}
			err := Peers(req, rackNetwork(), test.encrypts)
			if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %q", err, test.says)
			}
			if err != nil && refusal.Of(err).Reason != test.reason {
				t.Errorf("reason %s, want %s", refusal.Of(err).Reason, test.reason)
			}
		})
	}
}

func TestSameOverlay(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(*hostpb.Network)
		subject string // empty if the network is accepted
	}{
		"the same":                  {func(*hostpb.Network) {}, ""},
		"removed":                   {func(n *hostpb.Network) { n.Overlay = nil }, "10.1.0.0/24"},
		"another VNI":               {func(n *hostpb.Network) { n.Overlay.Vni++ }, "10.1.0.0/24"},
		"another tunnel address":    {func(n *hostpb.Network) { n.Overlay.Address = "192.0.2.9" }, rackNetwork().Overlay.Address},
		"another MTU":               {func(n *hostpb.Network) { n.Overlay.Mtu = 1400 }, "10.1.0.0/24"},
		"VNI of another cluster":    {func(n *hostpb.Network) { n.Id = "n-2" }, "5000"},
		"other VNI, other network":  {func(n *hostpb.Network) { n.Id, n.Overlay.Vni = "n-2", 5001 }, ""},
		"no overlay, other network": {func(n *hostpb.Network) { n.Id, n.Overlay = "n-2", nil }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			have, want := rackNetwork(), proto.CloneOf(rackNetwork())
			test.change(want)
			err := sameOverlay(want, slices.Values([]*hostpb.Network{have}))
			if got := refusal.Of(err); got.Subject != test.subject || (err != nil) != (got.Reason == hostpb.Refusal_NETWORK_CONFLICT) {
				t.Errorf("got %v, want subject %q", err, test.subject)
			}
		})
	}
}

func TestCheckEndpoint(t *testing.T) {
	for endpoint, good := range map[string]bool{
		"": true, "192.0.2.1:6443": true, "[fd00::1]:6443": true, "192.0.2.1": false, "192.0.2.1:0": false, "api.example.com:6443": false,
		"127.0.0.1:6443": false, "0.0.0.0:6443": false, "[fe80::1%eth0]:6443": false, "192.0.2.1:6443 accept": false, "[::ffff:192.0.2.1]:6443": false,
	} {
		lb := &hostpb.LoadBalancer{Id: "n-1", Namespace: "default", Name: "demo", Listen: []string{":6443"}, Endpoint: endpoint}
		if err := CheckLoadBalancer(lb); (err == nil) != good {
			t.Errorf("%q: got %v", endpoint, err)
		}
	}
}

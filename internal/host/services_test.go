package host

import (
	"bytes"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/fencing"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// publishedServices is a host that has published the Services of a network on its uplink. It refuses the first address of
// the host itself.
type publishedServices struct {
	*testing.T
	host    *Host
	network *hostpb.Network
	uplink  netlink.Link
	request *hostpb.SetServicesRequest
	refused []*hostpb.RefusedAddress
}

func newPublishedServices(t *testing.T) *publishedServices {
	t.Helper()
	s := &publishedServices{T: t, host: onBox(t), network: proto.CloneOf(goodSpec().Network)}
	s.uplink = &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink"}, PeerName: "cable"}
	expect.NoError(t, netlink.LinkAdd(s.uplink))
	for _, address := range []string{"203.0.113.1/24", "203.0.113.2/24"} {
		expect.NoError(t, netlink.AddrAdd(s.uplink, s.address(address)))
	}
	expect.NoError(t, netlink.LinkSetUp(s.uplink))
	_, err := s.host.EnsureNetwork(t.Context(), s.network)
	expect.NoError(t, err)
	s.request = &hostpb.SetServicesRequest{NetworkId: s.network.Id, Namespace: s.network.Namespace, Name: s.network.Name, Services: []*hostpb.PublishedService{{
		Name: "default/web", Address: "203.0.113.100", Machines: []string{"10.1.0.20"},
		Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_TCP, Port: 80, NodePort: 30080}},
	}, {
		Name: "default/own", Address: "203.0.113.1", Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_UDP, Port: 53, NodePort: 30053}},
	}, {
		Name: "default/port", Address: "203.0.113.2", HostPorts: true, Machines: []string{"10.1.0.20"},
		Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_UDP, Port: 53, NodePort: 30054}},
	}}}
	answer, err := s.host.SetServices(t.Context(), s.request)
	expect.NoError(t, err)
	s.refused = answer.Refused
	s.published("after the request", true)
	return s
}

func (s *publishedServices) address(text string) *netlink.Addr {
	s.Helper()
	a, err := netlink.ParseAddr(text)
	expect.NoError(s, err)
	return a
}

// hasAddress reports whether the box has the address of the first Service.
func (s *publishedServices) hasAddress() bool {
	s.Helper()
	has, err := network.HasAddress(boxServices(s.request)[0].Address)
	expect.NoError(s, err)
	return has
}

// published checks that the box has the address and the rules of the Services, or nothing of them.
func (s *publishedServices) published(when string, want bool) {
	s.Helper()
	has := s.hasAddress()
	rules := strings.Contains(ruleset(s.T), "ip daddr 203.0.113.100 tcp dport 80 dnat ip to 10.1.0.20:30080")
	ports := strings.Contains(ruleset(s.T), "ip daddr 203.0.113.2 udp dport 53 dnat ip to 10.1.0.20:30054")
	if has != want || rules != want || ports != want {
		s.Errorf("%s: the box has the address: %v, its rule: %v, and that of the port: %v; want %v", when, has, rules, ports, want)
	}
}

// listed checks the recorded Services of all networks.
func (s *publishedServices) listed(want ...*hostpb.SetServicesRequest) {
	s.Helper()
	got, err := s.host.ListServices(s.Context(), &hostpb.ListServicesRequest{})
	expect.NoError(s, err)
	if !proto.Equal(got, &hostpb.ListServicesResponse{Lists: want}) {
		s.Errorf("listed Services: %v, want %v", got, want)
	}
}

func (s *publishedServices) hold() { s.host.holdServicesOnce(s.Context(), false) }

// removeAddress removes the address of the first Service, as another program does.
func (s *publishedServices) removeAddress() {
	s.Helper()
	expect.NoError(s, netlink.AddrDel(s.uplink, s.address("203.0.113.100/32")))
}

// reboot removes all objects in memory, and starts capstand again with its records.
func (s *publishedServices) reboot() {
	s.Helper()
	bridge, err := netlink.LinkByName(network.BridgeName(s.network.Id))
	expect.NoError(s, err)
	expect.NoError(s, netlink.LinkDel(bridge))
	s.removeAddress()
	expect.NoError(s, os.RemoveAll(filepath.Join(s.host.config.RunDir, "networks")))
	again := onBox(s.T)
	again.store, again.config, again.box = s.host.store, s.host.config, s.host.box
	expect.NoError(s, again.loadAll())
	again.recoverNetwork(again.networks.byID[s.network.Id])
	again.holdServicesOnce(s.Context(), true)
	s.host = again
}

// A host publishes the Services of a request, except those at an own address, and lists the request. A refusal that lasts is
// logged once.
func TestServicesArePublished(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	s := newPublishedServices(t)
	if r := s.refused; len(r) != 1 || r[0].Address != "203.0.113.1" || !strings.Contains(r[0].Message, "of the host itself") {
		t.Errorf("refused: %v", r)
	}
	s.listed(s.request)
	var lines bytes.Buffer
	s.host.log = slog.New(slog.NewTextHandler(&lines, nil))
	for range 3 {
		s.hold()
	}
	if n := strings.Count(lines.String(), "Cannot publish"); n != 1 || !strings.Contains(lines.String(), "203.0.113.1 ") {
		t.Errorf("%d lines about a refusal that lasts, want 1: %s", n, lines.String())
	}
}

// A withdrawal that cannot be recorded fails, and takes effect all the same. A later request publishes the Services again.
func TestServicesAreWithdrawnOnAFullDisk(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	s := newPublishedServices(t)
	record := s.host.store.path(networksDir, s.network.Id, servicesFile)
	expect.NoError(t, os.Rename(record, record+"-kept"))
	end := unrecordable(t, s.host, networksDir, filepath.Join(s.network.Id, servicesFile))
	none := &hostpb.SetServicesRequest{NetworkId: s.network.Id, Namespace: s.network.Namespace, Name: s.network.Name}
	if _, err := s.host.SetServices(t.Context(), none); err == nil {
		t.Error("a withdrawal without a record is no error")
	}
	s.hold()
	s.published("after a withdrawal on a full disk", false)
	s.listed()
	end()
	expect.NoError(t, os.Rename(record+"-kept", record))
	s.hold()
	s.published("before the withdrawal is recorded", false)
	_, err := s.host.SetServices(t.Context(), s.request)
	expect.NoError(t, err)
	s.listed(s.request)
	s.published("after a later request", true)
	s.reboot()
	s.published("after a reboot with the new record", true)
}

// After a reboot of the box, capstand gives the box the addresses and rules of the recorded Services again, and also after another
// program has removed them.
func TestServicesAreRestored(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	s := newPublishedServices(t)
	s.reboot()
	s.published("after a reboot", true)
	s.removeAddress()
	s.hold()
	s.published("after another program removed the address", true)
}

// A host without a network and without a manager gives up the addresses, because another host can have them.
func TestServicesOfADisconnectedHost(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	s := newPublishedServices(t)
	s.reboot()
	expect.NoError(t, netlink.LinkSetDown(s.uplink))
	fence, err := fencing.Open(s.host.store.path("fencing.json"), filepath.Join(t.TempDir(), "memory.json"), s.host.store.root, "/none/", s.host.log)
	expect.NoError(t, err)
	s.host.fence = fence
	disconnected := fence.Connected("plane")
	s.hold()
	s.published("without a network, with a manager", true)
	disconnected()
	s.hold()
	if s.hasAddress() {
		t.Error("without a network and a manager, the box keeps the address")
	}
	expect.NoError(t, netlink.LinkSetUp(s.uplink))
	s.hold()
	s.published("after the network returned", true)
}

// A deleted network takes its Services along. The host keeps its own addresses.
func TestServicesOfADeletedNetwork(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	s := newPublishedServices(t)
	s.reboot()
	_, err := s.host.DeleteNetwork(t.Context(), &hostpb.DeleteNetworkRequest{Id: s.network.Id, Namespace: s.network.Namespace, Name: s.network.Name})
	expect.NoError(t, err)
	s.published("after the deletion of the network", false)
	s.listed()
	expect.NoError(t, s.host.holdServicesOf(t.Context(), s.network.Id, true, false))
	if own, err := network.HasAddress(netip.MustParseAddr("203.0.113.2")); err != nil || !own {
		t.Errorf("the box lost its own address: %v", err)
	}
}

// A load balancer does not get a port that a Service has, because it would get no connections.
func TestPortsOfLoadBalancersAreUnpublished(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	uplink := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink"}, PeerName: "cable"}
	a, err := netlink.ParseAddr("203.0.113.2/24")
	expect.NoError(t, err)
	expect.NoError(t, netlink.LinkAdd(uplink))
	expect.NoError(t, netlink.AddrAdd(uplink, a))
	expect.NoError(t, netlink.LinkSetUp(uplink))
	h, n := onBox(t), proto.CloneOf(goodSpec().Network)
	_, err = h.EnsureNetwork(t.Context(), n)
	expect.NoError(t, err)
	answer, err := h.SetServices(t.Context(), &hostpb.SetServicesRequest{NetworkId: n.Id, Namespace: n.Namespace, Name: n.Name, Services: []*hostpb.PublishedService{{
		Name: "default/port", Address: "203.0.113.2", HostPorts: true,
		Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_TCP, Port: 6443, NodePort: 30054}},
	}}})
	if err != nil || len(answer.Refused) > 0 {
		t.Fatal(answer, err)
	}
	lb := &hostpb.LoadBalancer{Id: n.Id, NetworkId: n.Id, Namespace: n.Namespace, Name: n.Name, Listen: []string{":6443", "203.0.113.2:6443"}}
	_, err = h.EnsureLoadBalancer(t.Context(), lb)
	if err == nil || !strings.Contains(err.Error(), "a Service is published at 203.0.113.2:6443") {
		t.Errorf("a load balancer at the port of a Service: %v", err)
	}
}

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

// After a reboot of the box, capstand gives the box the addresses and rules of the recorded Services again. A deleted network
// takes them along.
func TestServicesAreRestored(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	uplink := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink"}, PeerName: "cable"}
	address := func(text string) *netlink.Addr {
		a, err := netlink.ParseAddr(text)
		expect.NoError(t, err)
		return a
	}
	expect.NoError(t, netlink.LinkAdd(uplink))
	expect.NoError(t, netlink.AddrAdd(uplink, address("203.0.113.1/24")))
	expect.NoError(t, netlink.AddrAdd(uplink, address("203.0.113.2/24")))
	expect.NoError(t, netlink.LinkSetUp(uplink))
	h, n := onBox(t), proto.CloneOf(goodSpec().Network)
	_, err := h.EnsureNetwork(t.Context(), n)
	expect.NoError(t, err)
	req := &hostpb.SetServicesRequest{NetworkId: n.Id, Namespace: n.Namespace, Name: n.Name, Services: []*hostpb.PublishedService{{
		Name: "default/web", Address: "203.0.113.100", Machines: []string{"10.1.0.20"},
		Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_TCP, Port: 80, NodePort: 30080}},
	}, {
		Name: "default/own", Address: "203.0.113.1", Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_UDP, Port: 53, NodePort: 30053}},
	}, {
		Name: "default/port", Address: "203.0.113.2", HostPorts: true, Machines: []string{"10.1.0.20"},
		Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_UDP, Port: 53, NodePort: 30054}},
	}}}
	answer, err := h.SetServices(t.Context(), req)
	expect.NoError(t, err)
	if r := answer.Refused; len(r) != 1 || r[0].Address != "203.0.113.1" || !strings.Contains(r[0].Message, "of the host itself") {
		t.Errorf("refused: %v", r)
	}
	published := func(what string, want bool) {
		t.Helper()
		has, err := network.HasAddress(boxServices(req)[0].Address)
		expect.NoError(t, err)
		rules := strings.Contains(ruleset(t), "ip daddr 203.0.113.100 tcp dport 80 dnat ip to 10.1.0.20:30080")
		ports := strings.Contains(ruleset(t), "ip daddr 203.0.113.2 udp dport 53 dnat ip to 10.1.0.20:30054")
		if has != want || rules != want || ports != want {
			t.Errorf("%s: the box has the address: %v, its rule: %v, and that of the port: %v; want %v", what, has, rules, ports, want)
		}
	}
	published("after the request", true)
	listed := func(want ...*hostpb.SetServicesRequest) {
		t.Helper()
		got, err := h.ListServices(t.Context(), &hostpb.ListServicesRequest{})
		expect.NoError(t, err)
		if !proto.Equal(got, &hostpb.ListServicesResponse{Lists: want}) {
			t.Errorf("listed Services: %v, want %v", got, want)
		}
	}
	listed(req)

	var lines bytes.Buffer
	log := h.log
	h.log = slog.New(slog.NewTextHandler(&lines, nil))
	for range 3 {
		h.holdServicesOnce(t.Context(), false)
	}
	if n := strings.Count(lines.String(), "Cannot publish"); n != 1 || !strings.Contains(lines.String(), "203.0.113.1 ") {
		t.Errorf("%d lines about a refusal that lasts, want 1: %s", n, lines.String())
	}
	h.log = log

	record := h.store.path(networksDir, n.Id, servicesFile)
	expect.NoError(t, os.Rename(record, record+"-kept"))
	end := unrecordable(t, h, networksDir, filepath.Join(n.Id, servicesFile))
	none := &hostpb.SetServicesRequest{NetworkId: n.Id, Namespace: n.Namespace, Name: n.Name}
	if _, err := h.SetServices(t.Context(), none); err == nil {
		t.Error("a withdrawal without a record is no error")
	}
	h.holdServicesOnce(t.Context(), false)
	published("after a withdrawal on a full disk", false)
	listed()
	end()
	expect.NoError(t, os.Rename(record+"-kept", record))
	h.holdServicesOnce(t.Context(), false)
	published("before the withdrawal is recorded", false)
	_, err = h.SetServices(t.Context(), req)
	expect.NoError(t, err)
	listed(req)

	bridge, err := netlink.LinkByName(network.BridgeName(n.Id))
	expect.NoError(t, err)
	expect.NoError(t, netlink.LinkDel(bridge))
	expect.NoError(t, netlink.AddrDel(uplink, address("203.0.113.100/32")))
	expect.NoError(t, os.RemoveAll(filepath.Join(h.config.RunDir, "networks")))
	again := onBox(t)
	again.store, again.config, again.box = h.store, h.config, h.box
	expect.NoError(t, again.loadAll())
	again.recoverNetwork(again.networks.byID[n.Id])
	again.holdServicesOnce(t.Context(), true)
	published("after a reboot", true)
	expect.NoError(t, netlink.AddrDel(uplink, address("203.0.113.100/32")))
	again.holdServicesOnce(t.Context(), false)
	published("after another program removed the address", true)

	expect.NoError(t, netlink.LinkSetDown(uplink))
	again.fence, err = fencing.Open(again.store.path("fencing.json"), filepath.Join(t.TempDir(), "memory.json"), again.store.root, "/none/", again.log)
	expect.NoError(t, err)
	disconnected := again.fence.Connected("plane")
	again.holdServicesOnce(t.Context(), false)
	published("without a network, with a manager", true)
	disconnected()
	again.holdServicesOnce(t.Context(), false)
	if has, err := network.HasAddress(boxServices(req)[0].Address); err != nil || has {
		t.Errorf("without a network and a manager, the box keeps the address: %v", err)
	}
	expect.NoError(t, netlink.LinkSetUp(uplink))
	again.holdServicesOnce(t.Context(), false)
	published("after the network returned", true)

	_, err = again.DeleteNetwork(t.Context(), &hostpb.DeleteNetworkRequest{Id: n.Id, Namespace: n.Namespace, Name: n.Name})
	expect.NoError(t, err)
	published("after the deletion of the network", false)
	h = again
	listed()
	expect.NoError(t, again.holdServicesOf(t.Context(), n.Id, true, false))
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

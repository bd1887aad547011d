package host

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/conformance"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// tunnelAddress adds the tunnel address to the namespace of the test.
func tunnelAddress(t *testing.T) {
	t.Helper()
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	address, err := netlink.ParseAddr(conformance.TunnelAddress + "/32")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(loopback, address); err != nil {
		t.Fatal(err)
	}
}

// overlayNetwork is a network across hosts, whose tunnel address the namespace of the test gets.
func overlayNetwork(t *testing.T) *hostpb.Network {
	t.Helper()
	tunnelAddress(t)
	n := proto.CloneOf(goodSpec().Network)
	n.Overlay = &hostpb.Overlay{Vni: 5000, Address: conformance.TunnelAddress, Mtu: 1400}
	return n
}

// peerOn is a request that one machine of a network is on another host.
func peerOn(n *hostpb.Network, host string) *hostpb.SetPeersRequest {
	return &hostpb.SetPeersRequest{NetworkId: n.Id, Namespace: n.Namespace, Name: n.Name, Peers: []*hostpb.Peer{{Addresses: []string{"10.1.0.20"}, Host: host}}}
}

// After a reboot of the box, capstand restores the last peers and the last redirection of the endpoint. Another capstand of the
// box may have set them.
func TestPeersAreRestored(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	h, n := onBox(t), overlayNetwork(t)
	if _, err := h.EnsureNetwork(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if _, err := h.SetPeers(t.Context(), peerOn(n, "192.0.2.2")); err != nil {
		t.Fatal(err)
	}
	lb := goodBalancer()
	lb.Endpoint = "192.0.2.9:20000"
	if _, err := h.balancers.admit(lb); err != nil {
		t.Fatal(err)
	}
	h.balancers.add(lb, []string{"10.1.0.1:6443"})

	recovered := func(host string) {
		t.Helper()
		again := onBox(t)
		again.store, again.config, again.box = h.store, h.config, h.box
		if err := again.loadAll(); err != nil {
			t.Fatal(err)
		}
		again.balancers.byID = h.balancers.byID
		again.recoverNetwork(again.networks.byID[n.Id])
		if got := tunnelTo(t, n.Id, "10.1.0.20"); got != host {
			t.Errorf("the machine is on %q, want %s", got, host)
		}
		if rules := ruleset(t); !strings.Contains(rules, "ip saddr "+host+" accept") || !strings.Contains(rules, "ip daddr 192.0.2.9 tcp dport 20000 dnat ip to 10.1.0.1:6443") {
			t.Errorf("after the restart: %s", rules)
		}
	}
	recovered("192.0.2.2")
	if err := h.box.SetPeers(t.Context(), n.Id, boxPeers(peerOn(n, "192.0.2.3"))); err != nil { // As another capstand of the box.
		t.Fatal(err)
	}
	recovered("192.0.2.3")
	reboot(t, h, n.Id)
	recovered("192.0.2.2")
	reboot(t, h, n.Id)
	unrepaired(t, h)
	if err := h.networks.unserve(t.Context(), lb); err != nil {
		t.Fatal(err)
	}
	if rules := ruleset(t); strings.Contains(rules, "dnat") {
		t.Errorf("without the load balancer: %s", rules)
	}
}

// unrepaired checks a capstand whose network could not be repaired at its start: fencing knows the other hosts, and the start of the first machine
// restores the peers.
func unrepaired(t *testing.T, h *Host) {
	t.Helper()
	if across := h.networks.acrossHosts(h.networks.overlays()); len(across) != 1 || len(across[0].Hosts) != 1 {
		t.Errorf("the other hosts of the networks: %v", across)
	}
	m := h.machines.add(goodSpec())
	defer delete(h.machines.byID, m.spec.Id)
	m.spec.Network = proto.CloneOf(h.networks.byID[m.spec.Network.Id])
	if err := m.ensureNetwork(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(h.box.NetNS(m.spec.Id), unix.MNT_DETACH) })
	if got := tunnelTo(t, m.spec.Network.Id, "10.1.0.20"); got != "192.0.2.2" {
		t.Errorf("after the repair, the machine is on %q", got)
	}
}

// Peers that cannot be recorded, as on a full disk, are in effect, and the caller gets the error.
func TestPeersWithoutARecord(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	h, n := onBox(t), overlayNetwork(t)
	if _, err := h.EnsureNetwork(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	end := unrecordable(t, h, networksDir, filepath.Join(n.Id, peersFile))
	req := peerOn(n, "192.0.2.2")
	if _, err := h.SetPeers(t.Context(), req); err == nil {
		t.Error("peers without a record are no error")
	}
	if got := tunnelTo(t, n.Id, "10.1.0.20"); got != "192.0.2.2" {
		t.Errorf("the machine is on %q", got)
	}
	end()
	if _, err := h.SetPeers(t.Context(), req); err != nil {
		t.Error(err)
	}
}

// A route that appears later, for example of a VPN, refuses new networks only. Those that exist are also restored after a reboot.
func TestRouteAppearsLater(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	h, n := onBox(t), overlayNetwork(t)
	var log bytes.Buffer
	h.log = slog.New(slog.NewTextHandler(&log, nil))
	_, err := h.EnsureNetwork(t.Context(), n)
	expect.NoError(t, err)
	vpn := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "vpn"}, PeerName: "cable"}
	address, err := netlink.ParseAddr("10.255.0.1/8")
	expect.NoError(t, err)
	expect.NoError(t, netlink.LinkAdd(vpn))
	expect.NoError(t, netlink.LinkSetUp(vpn))
	expect.NoError(t, netlink.AddrAdd(vpn, address))
	for range 2 {
		_, err = h.EnsureNetwork(t.Context(), n)
		expect.NoError(t, err)
	}
	if lines := strings.Count(log.String(), "10.0.0.0/8 of the host's route through vpn"); lines != 1 {
		t.Errorf("%d lines about the route, want 1: %s", lines, log.String())
	}
	other := &hostpb.Network{Id: "n-2", Namespace: n.Namespace, Name: "other", Cidr: "10.9.0.0/24"}
	if _, err := h.EnsureNetwork(t.Context(), other); refusal.Of(err).Reason != hostpb.Refusal_NETWORK_CONFLICT || refusal.Of(err).Subject != other.Cidr {
		t.Errorf("a new network: %v", err)
	}
	reboot(t, h, n.Id)
	h.recoverNetwork(h.networks.byID[n.Id])
	if _, err := netlink.LinkByName(network.BridgeName(n.Id)); err != nil {
		t.Errorf("after a reboot: %v", err)
	}
}

// A network with the address of the manager that requests it, of a name server, or of a tunnel to another host would cut the host off. A network
// that exists has the manager as one of its machines, and no check of it reads the peers of all networks.
func TestNetworkWithNeededAddresses(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	h, n := onBox(t), overlayNetwork(t)
	var log bytes.Buffer
	h.log = slog.New(slog.NewTextHandler(&log, nil))
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	write(t, conf, "nameserver 127.0.0.53\nnameserver 10.8.0.53\n")
	hostResolvConf = []string{conf}
	from := func(manager string) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{Addr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(manager))})
	}
	for _, manager := range []string{"192.0.2.9:1", "10.1.0.20:1"} {
		_, err := h.EnsureNetwork(from(manager), n)
		expect.NoError(t, err)
		peers := peerOn(n, "10.7.0.2")
		peers.Hosts = []string{"10.1.0.99"}
		_, err = h.SetPeers(t.Context(), peers)
		expect.NoError(t, err)
	}
	if strings.Contains(log.String(), "elsewhere") {
		t.Errorf("a manager or a tunnel in a network that exists is reported: %s", log.String())
	}
	for cidr, want := range map[string]string{
		"10.7.0.0/24": "10.7.0.2/32 of a tunnel to another host", "10.8.0.0/24": "10.8.0.53/32 of the host's name server", "10.9.0.0/24": "10.9.0.7/32 of the manager",
	} {
		other := &hostpb.Network{Id: "n-2", Namespace: n.Namespace, Name: "other", Cidr: cidr}
		_, err := h.EnsureNetwork(from("[::ffff:10.9.0.7]:1"), other)
		if r := refusal.Of(err); r.Reason != hostpb.Refusal_NETWORK_CONFLICT || r.Subject != cidr || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", cidr, err, want)
		}
	}
}

// reboot removes the state that a reboot removes.
func reboot(t *testing.T, h *Host, networkID string) {
	t.Helper()
	for _, name := range []string{network.TunnelName(networkID), network.BridgeName(networkID)} {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkDel(link)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.CommandContext(t.Context(), "nft", "flush", "ruleset").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.RemoveAll(filepath.Join(h.config.RunDir, "networks")); err != nil {
		t.Fatal(err)
	}
}

// tunnelTo returns the tunnel address to which frames for a machine go.
func tunnelTo(t *testing.T, networkID, address string) string {
	t.Helper()
	link, err := netlink.LinkByName(network.TunnelName(networkID))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := netlink.NeighList(link.Attrs().Index, 7) // AF_BRIDGE
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Flags&netlink.NTF_SELF != 0 && e.HardwareAddr.String() == network.MAC(networkID, address).String() {
			return e.IP.String()
		}
	}
	return ""
}

func ruleset(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

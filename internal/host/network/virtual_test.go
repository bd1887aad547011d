package network

import (
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// run runs a shell script in the namespace of the test.
func run(t *testing.T, script string) string {
	t.Helper()
	out, err := exec.Command("/bin/sh", "-euc", script).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
	return string(out)
}

// IC-10: a virtual address is unique, moves to this box in the neighbour tables of other stations, and expires without a
// renewal.
func TestVirtualAddress_IC10(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	run(t, `ip link set lo up
		ip link add lan type veth peer name other
		ip addr add 203.0.113.1/24 dev lan
		ip link set lan up
		ip link set other up
		ip addr add 10.9.0.1/24 dev lan
		ip link add capnet type bridge
		ip addr add 198.51.100.1/24 dev capnet
		ip link set capnet up
		ip link add `+BridgeName("one")+` type bridge
		ip addr add 10.200.0.1/21 dev `+BridgeName("one")+`
		ip link set `+BridgeName("one")+` up`)
	address := netip.MustParseAddr("203.0.113.100")
	link, err := VirtualLink(address)
	if err != nil || link.Attrs().Name != "lan" {
		t.Fatalf("%v, %v", link, err)
	}
	if err := ProbeVirtual(t.Context(), link, address); err != nil {
		t.Errorf("a free address: %v", err)
	}
	for _, bad := range []string{"203.0.113.1", "10.9.0.1", "192.0.2.5", "10.200.0.7"} {
		if _, err := VirtualLink(netip.MustParseAddr(bad)); err == nil {
			t.Errorf("%s is an address of the host, or in no network of it except that of machines, and was accepted", bad)
		}
	}
	if link, err := VirtualLink(netip.MustParseAddr("198.51.100.7")); err != nil || link.Attrs().Name != "capnet" {
		t.Errorf("a bridge of the administrator: %v, %v", link, err)
	}

	frames, err := listenRaw("other")
	if err != nil {
		t.Fatal(err)
	}
	if err := AnnounceVirtual(link, address); err != nil {
		t.Fatal(err)
	}
	frame := make([]byte, 256)
	for {
		n, _, err := unix.Recvfrom(frames, frame, 0)
		if err != nil {
			t.Fatalf("no announcement: %v", err)
		}
		if holder := holderOf(frame[:n], address, nil); holder.String() == link.Attrs().HardwareAddr.String() {
			break
		}
	}

	if err := HoldVirtual(link, address, 2*time.Second); err != nil {
		t.Fatal(err)
	}
	has := func() bool { return strings.Contains(run(t, "ip -4 addr"), "203.0.113.100/32") }
	if again, err := VirtualLink(address); err != nil || again.Attrs().Name != "lan" {
		t.Errorf("an address that this host holds: %v, %v", again, err)
	}
	if !has() {
		t.Fatal("the host does not have the address")
	}
	all, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if i := slices.IndexFunc(all, isVirtual); err != nil || i < 0 || all[i].ValidLft < 1 || all[i].ValidLft > 3 {
		t.Errorf("the term of the address is not two seconds: %+v, %v", all, err)
	}
	conn, err := net.Dial("udp", "203.0.113.50:9")
	if err != nil {
		t.Fatal(err)
	}
	if from := conn.LocalAddr().String(); !strings.HasPrefix(from, "203.0.113.1:") {
		t.Errorf("the host uses %s for its own connections", from)
	}
	checkEnd(t, link, address, has)
}

// checkEnd waits until the kernel removes a virtual address at the end of its term, then holds and releases the address.
func checkEnd(t *testing.T, link netlink.Link, address netip.Addr, has func() bool) {
	t.Helper()
	expect.True(t, "the kernel removes the address", func() bool { return !has() })
	if err := HoldVirtual(link, address, 3*time.Second); err != nil {
		t.Fatal(err)
	}
	if err := ReleaseVirtual(address); err != nil || has() {
		t.Errorf("the address was not released: %v", err)
	}
	if err := ReleaseVirtual(address); err != nil {
		t.Errorf("a second release: %v", err)
	}
}

// A BGP daemon on the box can announce the addresses of an interface without cables (docs/networking.md). A virtual address
// appears on it and disappears from it as on an Ethernet interface.
func TestVirtualAddressForBGP(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	run(t, `ip link add anycast type bridge
		ip addr add 198.18.5.1/28 dev anycast
		ip link set anycast up`)
	address := netip.MustParseAddr("198.18.5.7")
	link, err := VirtualLink(address)
	if err != nil || link.Attrs().Name != "anycast" {
		t.Fatalf("%v, %v", link, err)
	}
	if err := ProbeVirtual(t.Context(), link, address); err != nil {
		t.Errorf("probe: %v", err)
	}
	if err := HoldVirtual(link, address, 3*time.Second); err != nil {
		t.Fatal(err)
	}
	if err := AnnounceVirtual(link, address); err != nil {
		t.Errorf("announcement: %v", err)
	}
	if out := run(t, "ip -4 -o addr show dev anycast"); !strings.Contains(out, " 198.18.5.7/32 ") {
		t.Errorf("the interface has %s", out)
	}
	if err := ReleaseVirtual(address); err != nil {
		t.Error(err)
	}
	if out := run(t, "ip -4 -o addr show dev anycast"); strings.Contains(out, "198.18.5.7") {
		t.Errorf("after the release, the interface has %s", out)
	}
}

// A virtual address that another station has is refused.
func TestProbeVirtual(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	run(t, `ip link add lan type veth peer name other
		ip addr add 203.0.113.1/24 dev lan
		ip link set lan up
		ip link set other up
		echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore
		ip addr add 203.0.113.100/32 dev other
		echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter; echo 0 > /proc/sys/net/ipv4/conf/other/rp_filter`)
	link, err := netlink.LinkByName("lan")
	if err != nil {
		t.Fatal(err)
	}
	err = ProbeVirtual(t.Context(), link, netip.MustParseAddr("203.0.113.100"))
	if other, _ := netlink.LinkByName("other"); err == nil || !strings.Contains(err.Error(), other.Attrs().HardwareAddr.String()) {
		t.Errorf("%v", err)
	}
}

// station moves a link into a network namespace of its own, and returns the beginning of commands there.
func station(t *testing.T, link string) (in string) {
	t.Helper()
	client := exec.Command("unshare", "--net", "sleep", "60")
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = client.Process.Kill(), client.Wait() })
	pid := strconv.Itoa(client.Process.Pid)
	run(t, "until [ $(readlink /proc/"+pid+"/ns/net) != $(readlink /proc/self/ns/net) ]; do sleep 0.02; done; ip link set "+link+" netns "+pid)
	return "nsenter --target " + pid + " --net -- "
}

// greet answers connections like a load balancer.
func greet(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		_, _ = conn.Write([]byte("balancer"))
		_ = conn.Close()
	}
}

// On the box with a virtual address, all connections to it go to the load balancer. On other boxes, only connections of machines
// and of the box itself do.
func TestVirtualRedirection(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	b := box(t, t.TempDir(), "a")
	run(t, `ip link set lo up
		ip link add lan type veth peer name client
		ip addr add 203.0.113.1/24 dev lan
		ip link set lan up`)
	if err := b.Ensure(t.Context(), Network{ID: "n", CIDR: "10.231.7.0/24", Cluster: "default/n"}); err != nil {
		t.Fatal(err)
	}
	endpoint := netip.MustParseAddrPort("203.0.113.100:6443")
	if err := b.Redirect(t.Context(), "n", Redirect{Balancer: "n", Endpoint: endpoint, To: netip.MustParseAddrPort("10.231.7.1:7443"), Virtual: true}); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "10.231.7.1:7443")
	if err != nil {
		t.Fatal(err)
	}
	go greet(listener)
	const connect = `timeout 2 bash -c 'exec 3<>/dev/tcp/203.0.113.100/6443; head -c 8 <&3'`
	if got := run(t, connect); got != "balancer" {
		t.Errorf("from the box: %q", got)
	}
	link, err := VirtualLink(endpoint.Addr())
	if err != nil {
		t.Fatal(err)
	}
	in := station(t, "client")
	run(t, in+"ip addr add 203.0.113.2/24 dev client; "+in+"ip link set client up")
	if out, err := exec.Command("/bin/sh", "-c", in+connect).Output(); err == nil {
		t.Errorf("a client reaches a box that does not have the address: %q", out)
	}
	// A box that only forwards the packets of the client leaves them alone.
	run(t, in+"ip route add 203.0.113.100/32 via 203.0.113.1")
	if out, err := exec.Command("/bin/sh", "-c", in+connect).Output(); err == nil {
		t.Errorf("a box that does not have the address redirects a client that is not its own: %q", out)
	}
	run(t, in+"ip route del 203.0.113.100/32")
	if err := HoldVirtual(link, endpoint.Addr(), virtualLife); err != nil {
		t.Fatal(err)
	}
	run(t, in+"ip neigh flush all")
	if got := run(t, in+connect); got != "balancer" {
		t.Errorf("a client: %q", got)
	}
}

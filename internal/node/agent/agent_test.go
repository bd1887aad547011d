package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netns"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

func prefix(text string) netip.Prefix { return netip.MustParsePrefix(text) }
func addr(text string) netip.Addr     { return netip.MustParseAddr(text) }

var compare = cmp.Options{
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.AllowUnexported(node{}, route{}),
}

func TestWantedRoutes(t *testing.T) {
	nodes := []node{
		{name: "self", podCIDRs: []netip.Prefix{prefix("10.244.0.0/24")}, addresses: []netip.Addr{addr("10.0.0.1")}},
		{name: "b", podCIDRs: []netip.Prefix{prefix("10.244.2.0/24"), prefix("fd00:2::/64")}, addresses: []netip.Addr{addr("10.0.0.3"), addr("fd01::3")}},
		{name: "a", podCIDRs: []netip.Prefix{prefix("10.244.1.0/24"), prefix("fd00:1::/64")}, addresses: []netip.Addr{addr("10.0.0.2")}},
		{name: "no pods yet", addresses: []netip.Addr{addr("10.0.0.4")}},
		{name: "no address yet", podCIDRs: []netip.Prefix{prefix("10.244.9.0/24")}},
	}
	want := []route{
		{prefix("10.244.1.0/24"), addr("10.0.0.2")},
		{prefix("10.244.2.0/24"), addr("10.0.0.3")},
		{prefix("fd00:2::/64"), addr("fd01::3")},
	}
	if diff := cmp.Diff(want, wantedRoutes("self", nodes), compare); diff != "" {
		t.Error(diff)
	}
}

func TestStaleRoutes(t *testing.T) {
	a, b := route{prefix("10.244.1.0/24"), addr("10.0.0.2")}, route{prefix("10.244.2.0/24"), addr("10.0.0.3")}
	moved := route{a.to, addr("10.0.0.9")}
	// A route whose gateway changed was replaced. It must not be removed.
	if diff := cmp.Diff([]route{b}, staleRoutes([]route{a, b}, []route{moved}), compare); diff != "" {
		t.Error(diff)
	}
}

func TestNodeOf(t *testing.T) {
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Node",
		"metadata": map[string]any{"name": "a", "uid": "u", "resourceVersion": "7", "annotations": map[string]any{"big": "x"}},
		"spec":     map[string]any{"podCIDRs": []any{"10.244.1.0/24", "nonsense"}, "taints": []any{map[string]any{}}},
		"status": map[string]any{
			"addresses": []any{
				map[string]any{"type": "Hostname", "address": "a"}, map[string]any{"type": "InternalIP", "address": "10.0.0.2"},
			},
			"images": []any{map[string]any{"names": []any{"a"}}},
		},
	}}
	slim, err := stripNode(object)
	if err != nil {
		t.Fatal(err)
	}
	data, _ := json.Marshal(slim)
	want := `{"apiVersion":"v1","kind":"Node","metadata":{"name":"a","resourceVersion":"7","uid":"u"},"spec":{"podCIDRs":["10.244.1.0/24","nonsense"]},"status":{"addresses":[{"address":"a","type":"Hostname"},{"address":"10.0.0.2","type":"InternalIP"}]}}`
	if string(data) != want {
		t.Errorf("got  %s\nwant %s", data, want)
	}
	expected := node{name: "a", uid: "u", podCIDRs: []netip.Prefix{prefix("10.244.1.0/24")}, addresses: []netip.Addr{addr("10.0.0.2")}}
	if diff := cmp.Diff(expected, nodeOf(slim.(*unstructured.Unstructured)), compare); diff != "" {
		t.Error(diff)
	}
}

func TestCNI(t *testing.T) {
	path := filepath.Join(t.TempDir(), "10-capstan.conflist")
	pods := []netip.Prefix{prefix("10.244.1.0/24"), prefix("fd00::/64")}
	for i, want := range []bool{true, false} {
		changed, err := writeCNI(path, pods)
		if err != nil || changed != want {
			t.Errorf("write %d: changed %v, %v", i, changed, err)
		}
	}
	var config struct {
		Plugins []struct {
			Type   string
			IPMasq bool
			IPAM   struct {
				Ranges [][]struct{ Subnet string }
				Routes []struct{ Dst string }
			}
		}
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &config); err != nil {
		t.Fatal(err)
	}
	ptp := config.Plugins[0]
	if ptp.Type != "ptp" || ptp.IPMasq || len(ptp.IPAM.Ranges) != 2 || ptp.IPAM.Ranges[1][0].Subnet != "fd00::/64" ||
		ptp.IPAM.Routes[0].Dst != "0.0.0.0/0" || ptp.IPAM.Routes[1].Dst != "::/0" {
		t.Errorf("%s", data)
	}
}

func TestMasqueradeRules(t *testing.T) {
	want := []string{
		"ip saddr 10.244.0.0/16 ip daddr != { 10.244.0.0/16, 224.0.0.0/4 } masquerade fully-random",
		"ip6 saddr fd00::/56 ip6 daddr != { fd00::/56, ff00::/8 } masquerade fully-random",
	}
	if diff := cmp.Diff(want, masqueradeRules([]netip.Prefix{prefix("10.244.0.0/16"), prefix("fd00::/56")})); diff != "" {
		t.Error(diff)
	}
}

// A pod sends with its own addresses only. Another pod receives its packets with the address of the sender.
func TestForgedSources(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	machine, err := netns.Get()
	expect.NoError(t, err)
	podNetworks := []netip.Prefix{prefix("10.244.0.0/16"), prefix("fd00::/56")}
	expect.NoError(t, forward([]netip.Addr{addr("fd00::1")}))
	expect.NoError(t, masquerade(t.Context(), podNetworks))
	pod := func(link string, addresses ...string) netns.NsHandle {
		ns, err := testnetns.New()
		expect.NoError(t, err)
		expect.NoError(t, testnetns.Cable(testnetns.End{NS: machine, Name: link}, testnetns.End{NS: ns, Name: "eth0"}))
		for i, gateway := range []string{"169.254.0.1", "fd01::1"} { // as ptp does
			own, to := netip.PrefixFrom(addr(addresses[i]), addr(addresses[i]).BitLen()), netip.PrefixFrom(addr(gateway), addr(gateway).BitLen())
			expect.NoError(t, testnetns.In(ns, func() error {
				if err := testnetns.Connect("eth0", own, to, netip.Addr{}); err != nil {
					return err
				}
				return testnetns.Connect("eth0", netip.Prefix{}, podNetworks[i], addr(gateway))
			}))
			expect.NoError(t, testnetns.Connect(link, to, own, netip.Addr{}))
		}
		return ns
	}
	sender, receiver := pod("veth1", "10.244.0.5", "fd00::5"), pod("veth2", "10.244.0.6", "fd00::6")
	for to, from := range map[string]string{"10.244.0.6": "10.244.0.5", "fd00::6": "fd00::5"} {
		forged := addr(from).Next().Next()
		unused := map[bool]netip.Prefix{true: prefix("192.0.2.0/24"), false: prefix("2001:db8::/64")}[forged.Is4()]
		expect.NoError(t, testnetns.In(sender, func() error {
			return testnetns.Connect("lo", netip.PrefixFrom(forged, forged.BitLen()), unused, netip.Addr{})
		}))
		if got := firstPacket(t, sender, receiver, to, forged.String(), from); got != from {
			t.Errorf("the first packet to %s comes from %s, want %s", to, got, from)
		}
	}
}

// firstPacket sends a UDP packet from each source, and returns the source of the first one that arrives.
func firstPacket(t *testing.T, sender, receiver netns.NsHandle, to string, sources ...string) string {
	t.Helper()
	at := netip.AddrPortFrom(addr(to), 9)
	var listener net.PacketConn
	expect.NoError(t, testnetns.In(receiver, func() (err error) { listener, err = net.ListenPacket("udp", at.String()); return err }))
	defer func() { _ = listener.Close() }()
	for _, source := range sources {
		expect.NoError(t, testnetns.In(sender, func() error {
			conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr(source), 0)), net.UDPAddrFromAddrPort(at))
			if err != nil {
				return err
			}
			_, err = conn.Write([]byte("x"))
			return errors.Join(err, conn.Close())
		}))
	}
	expect.NoError(t, listener.SetReadDeadline(time.Now().Add(15*time.Second)))
	_, from, err := listener.ReadFrom(make([]byte, 1))
	expect.NoError(t, err)
	return netip.MustParseAddrPort(from.String()).Addr().String()
}

func TestDNSSlices(t *testing.T) {
	slices := dns.slices("m", "uid", []netip.Addr{addr("10.0.0.2"), addr("10.0.0.3"), addr("fd00::2")}, false)
	if len(slices) != 2 || slices[0].GetName() != "kube-dns-m" || slices[1].GetName() != "kube-dns-m-ipv6" {
		t.Fatalf("%v", slices)
	}
	data, _ := json.Marshal(slices[0].Object["endpoints"])
	if string(data) != `[{"addresses":["10.0.0.2"],"conditions":{"ready":false,"serving":false,"terminating":false},"nodeName":"m"}]` {
		t.Errorf("%s", data)
	}
	if owners := slices[0].GetOwnerReferences(); len(owners) != 1 || owners[0].Kind != "Node" || string(owners[0].UID) != "uid" {
		t.Errorf("owners %v", owners)
	}
}

// metrics-server listens on the first address only.
func TestMetricsServerSlices(t *testing.T) {
	slices := metricsServer.slices("m", "uid", []netip.Addr{addr("10.0.0.2"), addr("fd00::2")}, true)
	if len(slices) != 1 || slices[0].GetName() != "metrics-server-m" || slices[0].GetLabels()["kubernetes.io/service-name"] != "metrics-server" {
		t.Fatalf("%v", slices)
	}
	data, _ := json.Marshal(slices[0].Object["ports"])
	if string(data) != `[{"name":"https","port":4443,"protocol":"TCP"}]` {
		t.Errorf("%s", data)
	}
}

// TestAtChanges: slices are published when both values are known, when one changes, and for a new Node with the same readiness.
func TestAtChanges(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	uids, readiness := make(chan string), make(chan bool)
	calls, ended := make(chan string, 10), make(chan error, 1)
	go func() {
		ended <- atChanges(ctx, uids, readiness, func(uid string, ready bool) error {
			calls <- fmt.Sprint(uid, " ", ready)
			return nil
		})
	}()
	uids <- "a"
	readiness <- false
	readiness <- false
	readiness <- true
	uids <- "a"
	uids <- "b"
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	close(calls)
	var got []string
	for call := range calls {
		got = append(got, call)
	}
	if !slices.Equal(got, []string{"a false", "a true", "b true"}) {
		t.Errorf("published %q", got)
	}
}

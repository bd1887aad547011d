package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
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

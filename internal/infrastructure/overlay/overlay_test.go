package overlay_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/overlay"
	"capstan.dev/capstan/internal/overhead"
)

func TestChooseVNI(t *testing.T) {
	first, err := overlay.ChooseVNI("one", nil, 0)
	if err != nil || first < overhead.MinVNI || first > overhead.MaxVNI {
		t.Fatalf("%d, %v", first, err)
	}
	if again, _ := overlay.ChooseVNI("one", nil, 0); again != first {
		t.Errorf("%d, then %d", first, again)
	}
	if other, _ := overlay.ChooseVNI("two", nil, 0); other == first {
		t.Errorf("two clusters start at %d", other)
	}
	if next, _ := overlay.ChooseVNI("one", map[int32]bool{first: true, first + 1: true}, 0); next != first+2 {
		t.Errorf("taken: %d, want %d", next, first+2)
	}
	if next, _ := overlay.ChooseVNI("one", map[int32]bool{first + 1: true}, first); next != first+2 {
		t.Errorf("refused: %d, want %d", next, first+2)
	}
	if next, _ := overlay.ChooseVNI("one", nil, overhead.MaxVNI); next != overhead.MinVNI {
		t.Errorf("behind the last: %d", next)
	}
}

func TestChoosePort(t *testing.T) {
	ports := *utilnet.ParsePortRangeOrDie("20000-20002")
	first, err := overlay.ChoosePort("one", ports, nil, 0)
	if err != nil || !ports.Contains(int(first)) {
		t.Fatalf("%d, %v", first, err)
	}
	second, _ := overlay.ChoosePort("one", ports, map[int32]bool{first: true}, 0)
	third, _ := overlay.ChoosePort("one", ports, map[int32]bool{first: true}, second)
	if got := slices.Sorted(slices.Values([]int32{first, second, third})); !slices.Equal(got, []int32{20000, 20001, 20002}) {
		t.Errorf("%v", got)
	}
	if _, err := overlay.ChoosePort("one", ports, map[int32]bool{20000: true, 20001: true, 20002: true}, 0); err == nil || !strings.Contains(err.Error(), "--endpoint-port-range") {
		t.Errorf("all taken: %v", err)
	}
}

func TestMTU(t *testing.T) {
	for name, tc := range map[string]struct {
		tunnel    string
		encrypted bool
		links     []int32
		want      int32
	}{
		"usual links":            {"192.0.2.1", false, nil, 1450},
		"encrypted":              {"192.0.2.1", true, nil, 1370},
		"IPv6":                   {"2001:db8::1", false, nil, 1430},
		"IPv6, encrypted":        {"2001:db8::1", true, nil, 1350},
		"the smallest link":      {"192.0.2.1", false, []int32{1460, 1400, 1492}, 1350},
		"a link for fragments":   {"192.0.2.1", true, []int32{1400}, 1280},
		"a link larger than all": {"192.0.2.1", false, []int32{9000}, 1450},
	} {
		if got := overlay.MTU(netip.MustParseAddr(tc.tunnel), tc.encrypted, tc.links); got != tc.want {
			t.Errorf("%s: %d, want %d", name, got, tc.want)
		}
	}
}

func TestRival(t *testing.T) {
	at := func(minute int) metav1.Time { return metav1.NewTime(time.Unix(int64(minute)*60, 0)) }
	cluster := func(uid string, vni int32, minute int, running bool) infrav1.CapstanCluster {
		c := infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid), CreationTimestamp: at(minute)}}
		c.Spec.Network.Overlay.VNI = vni
		if running {
			c.Status.Conditions = []metav1.Condition{{Type: infrav1.BootAllowedCondition, Status: metav1.ConditionTrue}}
		}
		return c
	}
	for name, tc := range map[string]struct {
		self, other infrav1.CapstanCluster
		refused     bool
	}{
		"no overlay":                        {cluster("b", 0, 2, false), cluster("a", 0, 1, true), false},
		"another identifier":                {cluster("b", 5000, 2, false), cluster("a", 5001, 1, true), false},
		"the same object":                   {cluster("a", 5000, 1, false), cluster("a", 5000, 1, false), false},
		"the older one comes first":         {cluster("b", 5000, 2, false), cluster("a", 5000, 1, false), true},
		"the younger one waits":             {cluster("b", 5000, 1, false), cluster("a", 5000, 2, false), false},
		"equally old: by UID":               {cluster("b", 5000, 1, false), cluster("a", 5000, 1, false), true},
		"an old object does not take a vni": {cluster("b", 5000, 1, false), cluster("a", 5000, 2, true), true},
		"what runs goes on":                 {cluster("b", 5000, 2, true), cluster("a", 5000, 1, false), false},
		"both run: the older one goes on":   {cluster("b", 5000, 2, true), cluster("a", 5000, 1, true), true},
	} {
		if got := overlay.Rival(&tc.self, []infrav1.CapstanCluster{tc.self, tc.other}); (got != nil) != tc.refused {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func machine(name, host string, addresses ...string) infrav1.CapstanMachine {
	m := infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Name: name}}
	m.Spec.ID, m.Spec.HostName = "id-"+name, host
	for _, a := range addresses {
		m.Spec.Network.Addresses = append(m.Spec.Network.Addresses, infrav1.InterfaceAddress{Address: a})
	}
	return m
}

func TestHosts(t *testing.T) {
	unnamed, unborn := machine("c", "", "10.1.0.12"), machine("d", "h9", "10.1.0.13")
	unborn.Spec.ID = ""
	got := overlay.Hosts("h2", []infrav1.CapstanMachine{machine("a", "h1", "10.1.0.10"), machine("b", "h1", "10.1.0.11"), unnamed, unborn, machine("e", "h8")})
	if !slices.Equal(got, []string{"h1", "h2"}) {
		t.Errorf("%v", got)
	}
	if got := overlay.Hosts("", nil); len(got) > 0 {
		t.Errorf("%v", got)
	}
}

func TestBalancers(t *testing.T) {
	hosts := []overlay.Host{
		{Name: "a", Box: "1", Tunnel: "192.0.2.1"}, {Name: "b", Box: "1", Tunnel: "192.0.2.1"},
		{Name: "c", Box: "2", Tunnel: "192.0.2.2"}, {Name: "d", Box: "2", Tunnel: "192.0.2.2"}, {Name: "e", Tunnel: "192.0.2.3"},
	}
	for name, tc := range map[string]struct {
		balancer string
		have     map[string]bool
		want     []string
	}{
		"one on each box":                      {"a", nil, []string{"a", "c", "e"}},
		"the cluster's own first":              {"b", map[string]bool{"a": true}, []string{"b", "c", "e"}},
		"it stays where it is":                 {"a", map[string]bool{"d": true}, []string{"a", "d", "e"}},
		"the cluster's own is not among them":  {"x", nil, []string{"a", "c", "e"}},
		"each has one: the first by name does": {"a", map[string]bool{"c": true, "d": true}, []string{"a", "c", "e"}},
	} {
		if got := slices.Sorted(maps.Keys(overlay.Balancers(hosts, tc.balancer, tc.have))); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

func TestTunnels(t *testing.T) {
	hosts := map[string]overlay.Host{
		"h1": {Name: "h1", Box: "1", Tunnel: "192.0.2.1"}, "h1b": {Name: "h1b", Box: "1", Tunnel: "192.0.2.1"},
		"h2": {Name: "h2", Box: "2", Tunnel: "192.0.2.2"}, "h2b": {Name: "h2b", Box: "2", Tunnel: "192.0.2.2"}, "h3": {Name: "h3", Tunnel: "192.0.2.3"},
		"none": {Name: "none", Box: "4"}, "six": {Name: "six", Box: "5", Tunnel: "2001:db8::5"},
	}
	got := overlay.Tunnels(hosts["h1"], []string{"h3", "h1", "h1b", "h2", "h2b", "none", "six", "unknown"}, hosts)
	if want := []string{"192.0.2.2", "192.0.2.3"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// Hosts that encrypt their overlays and hosts that do not exchange nothing.
func TestEncryption(t *testing.T) {
	hosts := map[string]overlay.Host{
		"h1": {Name: "h1", Tunnel: "192.0.2.1", Key: "one"}, "h2": {Name: "h2", Tunnel: "192.0.2.2", Key: "two"},
		"h3": {Name: "h3", Tunnel: "192.0.2.3", Key: "three"}, "plain": {Name: "plain", Tunnel: "192.0.2.4"}, "plain2": {Name: "plain2", Tunnel: "192.0.2.5"},
		"foreign": {Name: "foreign", Tunnel: "192.0.2.4", Key: "foreign"}, "foreign2": {Name: "foreign2", Tunnel: "192.0.2.2", Key: "foreign2"},
	}
	machines := []infrav1.CapstanMachine{machine("a", "h2", "10.1.0.20"), machine("b", "plain", "10.1.0.30")}
	networks := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
	for on, want := range map[string]string{
		"h1":     "[10.1.0.20]@192.0.2.2 tunnels [192.0.2.2 192.0.2.3] keys map[192.0.2.2:two 192.0.2.3:three]",
		"h2":     " tunnels [192.0.2.3] keys map[192.0.2.3:three]",
		"plain2": "[10.1.0.30]@192.0.2.4 tunnels [192.0.2.4] keys map[]",
	} {
		var text string
		peers, tunnels := overlay.Peers(hosts[on], machines, hosts, networks), overlay.Tunnels(hosts[on], []string{"h2", "h3", "plain"}, hosts)
		for _, p := range peers {
			text += fmt.Sprintf("%v@%s", p.GetAddresses(), p.GetHost())
		}
		if got := fmt.Sprintf("%s tunnels %v keys %v", text, tunnels, overlay.Keys(hosts[on], []string{"h1", "h2", "h3", "plain", "plain2", "unknown"}, peers, tunnels, hosts)); got != want {
			t.Errorf("on %s: %s, want %s", on, got, want)
		}
	}
}

func TestPeers(t *testing.T) {
	hosts := map[string]overlay.Host{
		"h1": {Name: "h1", Box: "1", Tunnel: "192.0.2.1"}, "h1b": {Name: "h1b", Box: "1", Tunnel: "192.0.2.1"},
		"h2": {Name: "h2", Box: "2", Tunnel: "192.0.2.2"}, "h3": {Name: "h3", Tunnel: "192.0.2.3"},
		"none": {Name: "none", Box: "4"}, "six": {Name: "six", Box: "5", Tunnel: "2001:db8::5"}, "alias": {Name: "alias", Tunnel: "192.0.2.1"},
	}
	leaving, made := machine("a", "h2", "10.1.0.20"), machine("b", "h3", "10.1.0.20")
	leaving.DeletionTimestamp, leaving.Spec.ProviderID = ptr.To(metav1.Now()), "capstan://a"
	stays := machine("a", "h2", "10.1.0.20")
	made.Spec.ProviderID = "capstan://b"
	for name, tc := range map[string]struct {
		machines []infrav1.CapstanMachine
		want     string
	}{
		"none": {},
		"on other boxes, by address": {
			[]infrav1.CapstanMachine{machine("a", "h3", "10.1.0.30", "fd00::30"), machine("b", "h2", "10.1.0.20")}, "[10.1.0.20]@192.0.2.2 [10.1.0.30 fd00::30]@192.0.2.3",
		},
		"not on its own host":               {machines: []infrav1.CapstanMachine{machine("a", "h1", "10.1.0.10")}},
		"not on another host of its box":    {machines: []infrav1.CapstanMachine{machine("a", "h1b", "10.1.0.10")}},
		"not at its own address":            {machines: []infrav1.CapstanMachine{machine("a", "alias", "10.1.0.10")}},
		"on no host":                        {machines: []infrav1.CapstanMachine{machine("a", "", "10.1.0.10")}},
		"on an unknown host":                {machines: []infrav1.CapstanMachine{machine("a", "h9", "10.1.0.10")}},
		"on a host without tunnel":          {machines: []infrav1.CapstanMachine{machine("a", "none", "10.1.0.10")}},
		"on a host of another family":       {machines: []infrav1.CapstanMachine{machine("a", "six", "10.1.0.10")}},
		"foreign address":                   {machines: []infrav1.CapstanMachine{machine("a", "h2", "10.2.0.10")}},
		"the gateway":                       {machines: []infrav1.CapstanMachine{machine("a", "h2", "10.1.0.1")}},
		"the network":                       {machines: []infrav1.CapstanMachine{machine("a", "h2", "10.1.0.0")}},
		"the broadcast address":             {machines: []infrav1.CapstanMachine{machine("a", "h2", "10.1.255.255")}},
		"no address":                        {machines: []infrav1.CapstanMachine{machine("a", "h2", "demo")}},
		"too many addresses":                {machines: []infrav1.CapstanMachine{machine("a", "h2", "10.1.0.10", "fd00::10", "fd00::11")}},
		"IPv6 first":                        {machines: []infrav1.CapstanMachine{machine("a", "h2", "fd00::10", "10.1.0.10")}},
		"one that leaves gives its address": {[]infrav1.CapstanMachine{leaving, machine("b", "h3", "10.1.0.20")}, "[10.1.0.20]@192.0.2.3"},
		"one that leaves is still there":    {[]infrav1.CapstanMachine{leaving}, "[10.1.0.20]@192.0.2.2"},
		"one that was made comes first":     {[]infrav1.CapstanMachine{stays, made}, "[10.1.0.20]@192.0.2.3"},
	} {
		var got []string
		for _, p := range overlay.Peers(hosts["h1"], tc.machines, hosts, []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00::/64")}) {
			got = append(got, fmt.Sprintf("%v@%s", p.GetAddresses(), p.GetHost()))
		}
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%s: %v, want %s", name, got, tc.want)
		}
	}
}

package overlay_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/overlay"
)

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

package placement_test

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

// ALL-18: a machine is attached only to a LAN that its host offers to its namespace, with an address that it allows there.
func TestLAN_ALL18(t *testing.T) {
	team := infrav1.AllowedNamespaces{Names: []string{"team"}}
	h := &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{LANNetworks: []infrav1.LANNetwork{
		{Name: "lab", Bridge: "br-lab", CIDR: "192.0.2.0/24", Addresses: []string{"192.0.2.128/26", "192.0.2.10/32"}, AllowedNamespaces: team},
		{Name: "office", Bridge: "br-office", CIDR: "198.51.100.0/24", Addresses: []string{"198.51.100.64/26"}, AllowedNamespaces: infrav1.AllowedNamespaces{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"lan": "office"}},
		}},
		{Name: "trunk", Bridge: "br-trunk", VLANs: []int32{100, 101}, CIDR: "192.0.2.0/24", Addresses: []string{"192.0.2.128/26"}, AllowedNamespaces: team},
		{Name: "both", Bridge: "br-both", CIDR: "192.0.2.0/24", IPv6CIDR: "2001:db8::/64", Addresses: []string{"192.0.2.128/26", "2001:db8::100/120"}, AllowedNamespaces: team},
	}}}
	lab := func(addresses ...string) placement.LAN {
		return placement.LAN{Name: "lab", CIDR: "192.0.2.0/24", Addresses: addresses}
	}
	in := func(name string, vlan int32) placement.LAN {
		return placement.LAN{Name: name, VLAN: vlan, CIDR: "192.0.2.0/24", Addresses: []string{"192.0.2.130"}}
	}
	dual := func(ipv6 string, addresses ...string) placement.LAN {
		return placement.LAN{Name: "both", CIDR: "192.0.2.0/24", IPv6CIDR: ipv6, Addresses: addresses}
	}
	six := placement.LAN{Name: "both", CIDR: "2001:db8::/64", Addresses: []string{"2001:db8::101"}}
	for name, tc := range map[string]struct {
		lan       placement.LAN
		namespace string
		labels    map[string]string
		old       bool
		oldVLANs  bool
		oldIPv6   bool
		why       string
	}{
		"a network of the cluster": {namespace: "thief"},
		"before its address":       {lan: lab(), namespace: "team"},
		"its address":              {lan: lab("192.0.2.130"), namespace: "team"},
		"single address":           {lan: lab("192.0.2.10"), namespace: "team"},
		"the router's address":     {lan: lab("192.0.2.1"), namespace: "team", why: "does not allow machines of namespace team to have the address 192.0.2.1 in the LAN lab"},
		"one of two":               {lan: lab("192.0.2.130", "192.0.2.11"), namespace: "team", why: "address 192.0.2.11"},
		"an endpoint":              {lan: lab("192.0.2.178"), namespace: "team", why: "keeps the address 192.0.2.178 for the endpoints of clusters"},
		"no address":               {lan: lab("x"), namespace: "team", why: "address x"},
		"another namespace":        {lan: lab("192.0.2.130"), namespace: "thief", why: "does not offer the LAN lab to namespace thief"},
		"of another namespace":     {lan: placement.LAN{Name: "office", CIDR: "198.51.100.0/24"}, namespace: "team", why: "does not offer the LAN office to namespace team"},
		"by label":                 {lan: placement.LAN{Name: "office", CIDR: "198.51.100.0/24"}, namespace: "team", labels: map[string]string{"lan": "office"}},
		"unknown":                  {lan: placement.LAN{Name: "none"}, namespace: "team", why: "does not offer the LAN none"},
		"another network":          {lan: placement.LAN{Name: "lab", CIDR: "192.0.0.0/16"}, namespace: "team", why: "has the LAN lab with the network 192.0.2.0/24, and the cluster's machine network is 192.0.0.0/16"},
		"VLAN":                     {lan: in("trunk", 101), namespace: "team"},
		"VLAN that is not offered": {lan: in("trunk", 102), namespace: "team", why: "does not offer VLAN 102 of the LAN trunk to namespace team, only [100 101]"},
		"no VLAN":                  {lan: in("trunk", 0), namespace: "team", why: "in the VLANs [100 101] only, and the cluster has none"},
		"VLAN of a LAN without":    {lan: in("lab", 100), namespace: "team", why: "offers the LAN lab without VLANs, and the cluster is in VLAN 100"},
		"VLAN, another namespace":  {lan: in("trunk", 100), namespace: "thief", why: "does not offer the LAN trunk to namespace thief"},
		"VLAN, old capstand":       {lan: in("trunk", 100), namespace: "team", oldVLANs: true, why: "cannot attach machines to a VLAN of a LAN: upgrade its capstand"},
		"both families":            {lan: dual("2001:db8::/64", "192.0.2.130", "2001:db8::101"), namespace: "team"},
		"IPv4 only of both":        {lan: dual("", "192.0.2.130"), namespace: "team", oldIPv6: true},
		"IPv6 only of both":        {lan: six, namespace: "team"},
		"IPv6 only, old capstand":  {lan: six, namespace: "team", oldIPv6: true, why: "with IPv6 addresses to a LAN: upgrade its capstand"},
		"both, old capstand":       {lan: dual("2001:db8::/64"), namespace: "team", oldIPv6: true, why: "with IPv6 addresses to a LAN: upgrade its capstand"},
		"another IPv6 network":     {lan: dual("2001:db8:1::/64"), namespace: "team", why: "has the LAN both with the IPv6 network 2001:db8::/64, and the cluster's spec.network.machineIPv6CIDR is 2001:db8:1::/64"},
		"IPv6 of a LAN without":    {lan: placement.LAN{Name: "lab", CIDR: "192.0.2.0/24", IPv6CIDR: "2001:db8::/64"}, namespace: "team", why: "has to set ipv6CIDR in spec.lanNetworks"},
		"the router's IPv6":        {lan: dual("2001:db8::/64", "192.0.2.130", "2001:db8::1"), namespace: "team", why: "to have the address 2001:db8::1 in the LAN both"},
		"an IPv6 endpoint":         {lan: dual("2001:db8::/64", "192.0.2.130", "2001:db8::1f5"), namespace: "team", why: "keeps the address 2001:db8::1f5 for the endpoints"},
		"IPv6, no network":         {lan: placement.LAN{Name: "lab", Addresses: []string{"192.0.2.130"}}, namespace: "team", why: "the cluster's machine network is "},
		"old capstand":             {lan: lab(), namespace: "team", old: true, why: "upgrade its capstand"},
	} {
		candidate := placement.Host{Name: "h", LANs: !tc.old, VLANs: !tc.oldVLANs, IPv6LANs: !tc.oldIPv6, Permissions: placement.Permitted(h, tc.namespace, tc.labels)}
		candidate.Permissions.Virtual = []string{"192.0.2.176/30", "2001:db8::1f0/124"}
		_, err := placement.Choose([]placement.Host{candidate}, placement.Request{Namespace: tc.namespace, LAN: tc.lan})
		if (err != nil) != (tc.why != "") || err != nil && !strings.Contains(err.Error(), tc.why) {
			t.Errorf("%s: got %v, want %q", name, err, tc.why)
		}
		if err != nil && (strings.Contains(err.Error(), "198.51.100") || strings.Contains(err.Error(), "br-")) {
			t.Errorf("%s: %v contains properties of another tenant's network, or of the host", name, err)
		}
	}
}

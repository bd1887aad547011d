package services

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

func service(change func(*corev1.Service)) corev1.Service {
	s := corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "u-1"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Port: 80, NodePort: 30080, Protocol: corev1.ProtocolTCP}},
		},
	}
	if change != nil {
		change(&s)
	}
	return s
}

func TestWants(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.Service)
		want   bool
	}{
		"no class":      {nil, true},
		"our class":     {func(s *corev1.Service) { s.Spec.LoadBalancerClass = ptr.To("capstan.dev/host") }, true},
		"host ports":    {func(s *corev1.Service) { s.Spec.LoadBalancerClass = ptr.To("capstan.dev/host-ports") }, true},
		"another class": {func(s *corev1.Service) { s.Spec.LoadBalancerClass = ptr.To("example.com/lb") }, false},
		"ClusterIP":     {func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP }, false},
		"being deleted": {func(s *corev1.Service) { s.DeletionTimestamp = ptr.To(metav1.Now()) }, false},
	} {
		s := service(c.change)
		if got := wants(&s); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestFlaw(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.Service)
		want   string
	}{
		"none": {nil, ""},
		"UDP":  {func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolUDP }, ""},
		"dual stack": {func(s *corev1.Service) {
			s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}
		}, ""},
		"IPv6 without a pool": {func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol} }, "no pool with addresses of its families [IPv6]"},
		"SCTP":                {func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolSCTP }, "SCTP"},
		"no node port":        {func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 0 }, "allocateLoadBalancerNodePorts"},
		"loadBalancerIP":      {func(s *corev1.Service) { s.Spec.LoadBalancerIP = "192.0.2.1" }, "loadBalancerIP"},
		"ranges":              {func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{" 192.0.2.1/24", "fd00::/8"} }, ""},
		"a long name":         {func(s *corev1.Service) { s.Name = strings.Repeat("x", hostpb.MaxServiceName) }, "at most 255"},
		"a broken range":      {func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.1/24 accept"} }, "expected a network"},
		"IPv6 ranges only":    {func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"fd00::/8"} }, "no IPv4 network"},
		"very many ranges":    {func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = slices.Repeat([]string{"10.0.0.0/8"}, 65) }, "at most 64"},
		"many equal ranges":   {func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = slices.Repeat([]string{"10.0.0.0/8"}, 3) }, ""},
	} {
		s := service(c.change)
		if got := flaw(&s, four.families(&s)); c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	s := service(func(s *corev1.Service) {
		s.Spec.LoadBalancerSourceRanges = []string{" 192.0.2.1/24", "fd00::/8", "192.0.2.0/24"}
	})
	for family, want := range map[corev1.IPFamily]string{corev1.IPv4Protocol: "192.0.2.0/24", corev1.IPv6Protocol: "fd00::/8"} {
		if got, err := sourceRanges(&s, family); err != nil || !slices.Equal(got, []string{want}) {
			t.Errorf("%s: %v, %v", family, got, err)
		}
	}
}

var (
	fromFour = &infrav1.ServiceLoadBalancerSpec{AddressesFromPool: infrav1.IPPoolReference{Name: "four"}}
	fromBoth = &infrav1.ServiceLoadBalancerSpec{AddressesFromPool: infrav1.IPPoolReference{Name: "four"}, IPv6AddressesFromPool: infrav1.IPPoolReference{Name: "six"}}
	four     = poolsOf(fromFour)
	both     = poolsOf(fromBoth)
)

// A Service has the families of its own for which there is a pool. A dual-stack Service counts for two.
func TestFamilies(t *testing.T) {
	dual := service(func(s *corev1.Service) {
		s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}
	})
	single := service(nil)
	for name, c := range map[string]struct {
		service corev1.Service
		pools   pools
		want    []corev1.IPFamily
	}{
		"one family, one pool":   {single, four, []corev1.IPFamily{corev1.IPv4Protocol}},
		"one family, two pools":  {single, both, []corev1.IPFamily{corev1.IPv4Protocol}},
		"two families, one pool": {dual, four, []corev1.IPFamily{corev1.IPv4Protocol}},
		"two families":           {dual, both, []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}},
		"no pool":                {single, poolsOf(&infrav1.ServiceLoadBalancerSpec{}), nil},
	} {
		if got := c.pools.families(&c.service); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v", name, got)
		}
	}
	var all []corev1.Service
	for i := range hostpb.MaxServices {
		all = append(all, dual)
		all[i].UID = types.UID(fmt.Sprint("u-", i))
	}
	if got := choose(all, fromBoth); len(got.accepted) != hostpb.MaxServices/2 {
		t.Errorf("%d dual-stack Services have addresses", len(got.accepted))
	}
	names := claimNames("c", &single)
	if names[0] == names[1] || !strings.HasPrefix(names[1], claimPrefix("c")) {
		t.Errorf("claims %v", names)
	}
}

func TestTargets(t *testing.T) {
	h := host{machines: []machine{
		{"dual", []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")}, true},
		{"single", []netip.Addr{netip.MustParseAddr("10.0.0.3")}, true},
		{"stopped", []netip.Addr{netip.MustParseAddr("10.0.0.4")}, false},
	}}
	nodes := map[string]bool{"dual": true, "single": true, "stopped": true}
	for family, want := range map[corev1.IPFamily][]string{corev1.IPv4Protocol: {"10.0.0.2", "10.0.0.3"}, corev1.IPv6Protocol: {"fd00::2"}} {
		if got := h.targets(nodes, family); !slices.Equal(got, want) {
			t.Errorf("%s: %v", family, got)
		}
	}
}

// The oldest Services keep their addresses when others exceed a limit.
func TestChoose(t *testing.T) {
	var all []corev1.Service
	for i := range hostpb.MaxServices + 2 {
		all = append(all, service(func(s *corev1.Service) {
			s.Name, s.UID = fmt.Sprint("s-", i), types.UID(fmt.Sprint("u-", i))
			s.CreationTimestamp = metav1.NewTime(time.Unix(int64(1000-i), 0))
		}))
	}
	got := choose(all, fromFour)
	if len(got.accepted) != hostpb.MaxServices || len(got.refused) != 2 || got.accepted[0].Name != "s-65" {
		t.Errorf("%d accepted, %d refused, first %s", len(got.accepted), len(got.refused), got.accepted[0].Name)
	}
	for s, why := range got.refused {
		if s.Name != "s-0" && s.Name != "s-1" || !strings.Contains(why, "limit") {
			t.Errorf("%s is refused: %s", s.Name, why)
		}
	}
	wide := service(func(s *corev1.Service) {
		s.Name, s.CreationTimestamp = "wide", metav1.NewTime(time.Unix(1, 0))
		for i := range 200 {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Port: int32(i + 1000), NodePort: int32(i + 31000), Protocol: corev1.ProtocolTCP})
		}
	})
	got = choose(append(all[:60:60], wide), fromFour)
	if got.accepted[0].Name != "wide" || len(got.accepted) != 56 || len(got.refused) != 5 {
		t.Errorf("256 ports: %d accepted and %d refused, first %s", len(got.accepted), len(got.refused), got.accepted[0].Name)
	}
}

func TestEligibleNodes(t *testing.T) {
	node := func(name string, ready corev1.ConditionStatus, change func(*corev1.Node)) corev1.Node {
		n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}}}
		if change != nil {
			change(&n)
		}
		return n
	}
	got := eligibleNodes([]corev1.Node{
		node("ready", corev1.ConditionTrue, nil),
		node("not-ready", corev1.ConditionUnknown, nil),
		node("excluded", corev1.ConditionTrue, func(n *corev1.Node) { n.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""} }),
		node("leaving", corev1.ConditionTrue, func(n *corev1.Node) { n.DeletionTimestamp = ptr.To(metav1.Now()) }),
	})
	if len(got) != 1 || !got["ready"] {
		t.Errorf("%v", got)
	}
}

func TestNodesOf(t *testing.T) {
	eligible := map[string]bool{"a": true, "b": true}
	endpoint := func(node string, ready bool) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}
	}
	endpoints := map[string][]discoveryv1.EndpointSlice{"default/web": {
		{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{endpoint("a", true), endpoint("b", false), endpoint("excluded", true)}},
		{AddressType: discoveryv1.AddressTypeIPv6, Endpoints: []discoveryv1.Endpoint{endpoint("b", true)}},
	}}
	cluster := service(nil)
	if got := nodesOf(&cluster, corev1.IPv4Protocol, eligible, endpoints); len(got) != 2 {
		t.Errorf("Cluster: %v", got)
	}
	local := service(func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
	if got := nodesOf(&local, corev1.IPv4Protocol, eligible, endpoints); len(got) != 1 || !got["a"] {
		t.Errorf("Local: %v", got)
	}
	if got := nodesOf(&local, corev1.IPv6Protocol, eligible, endpoints); len(got) != 1 || !got["b"] {
		t.Errorf("Local, IPv6: %v", got)
	}
	local.Name = "other"
	if got := nodesOf(&local, corev1.IPv4Protocol, eligible, endpoints); len(got) != 0 {
		t.Errorf("Local without endpoints: %v", got)
	}
}

func TestPlace(t *testing.T) {
	address := netip.MustParseAddr("192.0.2.10")
	everything, some := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, []netip.Addr{netip.MustParseAddr("10.0.0.2")}
	h := func(change func(*host)) *host {
		h := &host{connected: true, allowed: everything, machines: []machine{{"a", some, true}}}
		if change != nil {
			change(h)
		}
		return h
	}
	with := func(names ...string) func(*host) {
		return func(h *host) {
			h.machines = nil
			for _, n := range names {
				h.machines = append(h.machines, machine{n, some, true})
			}
		}
	}
	away := func(silent bool) func(*host) {
		return func(h *host) { h.connected, h.machines, h.silent = false, nil, silent }
	}
	busy := func(h *host) { h.services = 9 }
	for name, c := range map[string]struct {
		record, want, why string
		hosts             map[string]*host
	}{
		"no host":                {"", "", "no host allows", nil},
		"forbidden":              {"h1", "", "no host allows", map[string]*host{"h1": h(func(h *host) { h.allowed = nil })}},
		"another range":          {"", "", "no host allows", map[string]*host{"h1": h(func(h *host) { h.allowed = []netip.Prefix{netip.MustParsePrefix("192.0.3.0/24")} })}},
		"no machine":             {"", "", "runs a machine", map[string]*host{"h1": h(with())}},
		"the only one":           {"", "h1", "", map[string]*host{"h1": h(nil)}},
		"no target anywhere":     {"", "h1", "", map[string]*host{"h1": h(with("x")), "h2": h(with())}},
		"a target":               {"", "h2", "", map[string]*host{"h1": h(with("x")), "h2": h(nil)}},
		"the target moved":       {"h1", "h2", "", map[string]*host{"h1": h(with("x")), "h2": h(nil)}},
		"starting again":         {"h1", "h1", "", map[string]*host{"h1": h(func(h *host) { h.machines[0].running = false }), "h2": h(with())}},
		"another one runs":       {"h1", "h2", "", map[string]*host{"h1": h(func(h *host) { h.machines[0].running = false }), "h2": h(nil)}},
		"stays":                  {"h2", "h2", "", map[string]*host{"h1": h(nil), "h2": h(func(h *host) { h.services = 9 })}},
		"fewest Services":        {"", "h2", "", map[string]*host{"h1": h(func(h *host) { h.services = 2 }), "h2": h(func(h *host) { h.services = 1 })}},
		"away":                   {"h1", "h1", "", map[string]*host{"h1": h(away(false)), "h2": h(nil)}},
		"silent":                 {"h1", "h2", "", map[string]*host{"h1": h(away(true)), "h2": h(nil)}},
		"silent, none other":     {"h1", "h1", "", map[string]*host{"h1": h(away(true)), "h2": h(with())}},
		"silent, no target":      {"h1", "h1", "", map[string]*host{"h1": h(away(true)), "h2": h(with("x"))}},
		"one tries already":      {"h1,h3", "h3", "", map[string]*host{"h1": h(away(true)), "h2": h(nil), "h3": h(busy)}},
		"that one is lost too":   {"h1,h3", "h2", "", map[string]*host{"h1": h(away(true)), "h2": h(nil), "h3": h(away(true))}},
		"it returned meanwhile":  {"h1,h3", "h1", "", map[string]*host{"h1": h(busy), "h2": h(nil), "h3": h(nil)}},
		"away and forbidden":     {"h1", "h2", "", map[string]*host{"h1": h(func(h *host) { away(false)(h); h.allowed = nil }), "h2": h(nil)}},
		"the host was deleted":   {"h0", "h2", "", map[string]*host{"h2": h(nil)}},
		"moves to the permitted": {"h1", "h2", "", map[string]*host{"h1": h(func(h *host) { h.allowed = nil }), "h2": h(nil)}},
	} {
		for n, h := range c.hosts {
			h.name = n
		}
		got, why := place(address, map[string]bool{"a": true}, hostNames(c.record, maxRecorded), c.hosts)
		if got != c.want || !strings.Contains(why, c.why) || (why == "") != (c.why == "") {
			t.Errorf("%s: %q, %q; want %q, %q", name, got, why, c.want, c.why)
		}
	}
}

func TestHostNames(t *testing.T) {
	for annotation, want := range map[string]string{"": "", ",b,,a,b": "b a", "a,b,c,d": "a b c"} {
		if got := strings.Join(hostNames(annotation, 3), " "); got != want {
			t.Errorf("%q: %s", annotation, got)
		}
	}
	for _, c := range []struct {
		before, name, want string
		tries              bool
	}{
		{"", "a", "a", false},
		{"a,b", "b", "b,a", false},
		{"a", "b", "a,b", true},
		{"a,b", "b", "a,b", true},
		{"a,b", "c", "a,b,c", true},
	} {
		if got := strings.Join(withNew(hostNames(c.before, maxRecorded), c.name, c.tries), ","); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

func TestAbsence(t *testing.T) {
	const silence, s = 6 * time.Second, time.Second
	for _, c := range []struct {
		away time.Duration
		want absence
	}{
		{0, absence{false, false, 6 * s, 2 * s}},
		{5 * s, absence{false, false, 1 * s, 2 * s}},
		{6 * s, absence{true, false, 34 * s, 2 * s}},
		{30 * s, absence{true, false, 10 * s, 3 * s}},
		{40 * s, absence{true, true, 0, 4 * s}},
		{time.Hour, absence{true, true, 0, 10 * s}},
	} {
		if got := absent(c.away, silence); got != c.want {
			t.Errorf("after %s: %+v, want %+v", c.away, got, c.want)
		}
	}
}

// The status of a Service shows the address as long as a host may publish it. Programs outside follow the status.
func TestShown(t *testing.T) {
	for name, c := range map[string]struct {
		target            target
		trouble, away, no bool // no: the status does not show the address yet
		want              bool
	}{
		"published":                         {target: target{done: true}, no: true, want: true},
		"not yet":                           {no: true},
		"refused":                           {trouble: true},
		"the host does not answer":          {target: target{unknown: true}, trouble: true, want: true},
		"a new one, and it does not answer": {target: target{unknown: true}, trouble: true, no: true},
		"the host is away":                  {trouble: true, away: true, want: true},
	} {
		s := &scope{hosts: map[string]*host{"h": {connected: !c.away}}, trouble: map[string]string{}}
		web := service(func(s *corev1.Service) {
			if !c.no {
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.100"}}
			}
		})
		if c.trouble {
			s.trouble[nameOf(&web)] = "why"
		}
		c.target.service, c.target.address, c.target.host = &web, netip.MustParseAddr("203.0.113.100"), "h"
		c.target.claim = &capiipamv1.IPAddressClaim{}
		if got := len(s.shown(&c.target)) == 1; got != c.want {
			t.Errorf("%s: %v, expected %v", name, got, c.want)
		}
	}
}

func TestTold(t *testing.T) {
	var reported reported
	now := time.Now()
	for _, c := range []struct {
		at   time.Time
		want bool
	}{{now, true}, {now.Add(time.Minute), false}, {now.Add(eventLife), true}} {
		if got := reported.first(client.ObjectKey{Name: "c"}, "e", c.at); got != c.want {
			t.Errorf("at %v: %v", c.at.Sub(now), got)
		}
	}
	reported.repeat(client.ObjectKey{Name: "c"}, "e", now)
	for _, c := range []struct {
		at   time.Time
		want bool
	}{{now.Add(eventPause - 1), false}, {now.Add(eventPause), true}, {now.Add(2 * eventPause), false}} {
		if got := reported.first(client.ObjectKey{Name: "c"}, "e", c.at); got != c.want {
			t.Errorf("%v after an error: %v", c.at.Sub(now), got)
		}
	}
}

package services

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

func tcp(from, to int32) infrav1.HostPorts {
	return infrav1.HostPorts{Protocol: infrav1.HostPortTCP, Port: from, EndPort: to, AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{"a"}}}
}

// Ports are authorised for namespaces one by one, and nothing follows from the permission for addresses.
func TestPortsOf(t *testing.T) {
	udp := tcp(53, 0)
	udp.Protocol = infrav1.HostPortUDP
	labelled := infrav1.HostPorts{Protocol: infrav1.HostPortTCP, Port: 443, AllowedNamespaces: infrav1.AllowedNamespaces{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"web": "yes"}}}}
	services := &infrav1.HostServices{HostAddresses: []string{"192.0.2.1", "2001:db8::1"}, HostPorts: []infrav1.HostPorts{tcp(80, 90), udp, labelled}}
	a := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	for name, c := range map[string]struct {
		namespace *corev1.Namespace
		services  *infrav1.HostServices
		only      []string // namespaces of the host
		want      string
	}{
		"by name":                    {namespace: a, services: services, want: "TCP80 TCP90 UDP53"},
		"by label":                   {namespace: &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "b", Labels: map[string]string{"web": "yes"}}}, services: services, want: "TCP443"},
		"another namespace":          {namespace: &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "c"}}, services: services},
		"nothing by default":         {namespace: a},
		"addresses are not ports":    {namespace: a, services: &infrav1.HostServices{Addresses: []string{"192.0.2.0/28"}, AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{"a"}}}},
		"the host refuses namespace": {namespace: a, services: services, only: []string{"b"}},
	} {
		h := &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{Services: c.services}}
		if c.only != nil {
			h.Spec.AllowedNamespaces = &infrav1.AllowedNamespaces{Names: c.only}
		}
		ports := portsOf(h, c.namespace)
		var got []string
		for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP} {
			for _, port := range []int32{53, 79, 80, 90, 91, 443} {
				if ports.permits(protocol, port) {
					got = append(got, fmt.Sprint(protocol, port))
				}
			}
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %v, want %s", name, got, c.want)
		}
	}
}

// A cluster gets only those of its permissions that it uses.
func TestWanted(t *testing.T) {
	h := &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{Services: &infrav1.HostServices{
		Addresses: []string{"192.0.2.0/28"}, AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{"a"}},
		HostAddresses: []string{"192.0.2.1"}, HostPorts: []infrav1.HostPorts{tcp(80, 90)},
	}}}
	for name, c := range map[string]struct {
		published        *infrav1.ServiceLoadBalancerSpec
		addresses, ports int
	}{
		"nothing":        {},
		"addresses":      {published: &infrav1.ServiceLoadBalancerSpec{}, addresses: 1},
		"ports of hosts": {published: &infrav1.ServiceLoadBalancerSpec{HostPorts: ptr.To(true)}, addresses: 1, ports: 1},
		"node ports":     {published: &infrav1.ServiceLoadBalancerSpec{NodePorts: ptr.To(true)}, addresses: 1, ports: 1},
	} {
		s := &scope{capstan: &infrav1.CapstanCluster{}}
		s.capstan.Spec.Services.LoadBalancer = c.published
		got := s.wanted(permission(h, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a"}}))
		if len(got.allowed) != c.addresses || len(got.ports.permitted) != c.ports || len(got.ports.addresses) != c.ports {
			t.Errorf("%s: found %v and %+v, want %d networks and %d ports", name, got.allowed, got.ports, c.addresses, c.ports)
		}
	}
}

// with returns a Service with TCP ports of the hosts. The addresses show these ports in its status.
func with(name string, ports []int32, shown ...string) accepted {
	s := service(func(s *corev1.Service) {
		s.Name, s.Spec.LoadBalancerClass, s.Spec.Ports = name, ptr.To(infrav1.ServiceHostPortsClass), nil
		var status []corev1.PortStatus
		for _, p := range ports {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Protocol: corev1.ProtocolTCP, Port: p, NodePort: p + 30000})
			status = append(status, corev1.PortStatus{Protocol: corev1.ProtocolTCP, Port: p})
		}
		for _, address := range shown {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: address, Ports: status})
		}
	})
	return accepted{&s, s.Spec.IPFamilies}
}

// nodePort returns a Service of type NodePort with TCP node ports.
func nodePort(name string, ports ...int32) accepted {
	s := with(name, nil)
	s.Spec.Type, s.Spec.LoadBalancerClass = corev1.ServiceTypeNodePort, nil
	for _, p := range ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Protocol: corev1.ProtocolTCP, Port: 8080, NodePort: p})
	}
	return s
}

func dual(s accepted) accepted {
	s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	return s
}

// The length of the status, which the API server of the cluster decides, and the number of ports do not multiply.
func TestLongStatus(t *testing.T) {
	var ports []int32
	for port := range int32(hostpb.MaxServicePorts) {
		ports = append(ports, 1+port)
	}
	s := with("a", ports)
	for range 100_000 {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: "192.0.2.9", Ports: []corev1.PortStatus{{Port: 1, Protocol: corev1.ProtocolTCP}}})
	}
	hosts := map[string]*host{}
	for n := range 20 {
		hosts[fmt.Sprint("h", n)] = own(n+1, func(h *host) { h.ports.permitted = []infrav1.HostPorts{tcp(1, 1024)} })
	}
	start := time.Now()
	if plan := planPorts([]accepted{s}, hosts); len(plan.targets) != len(hosts) {
		t.Errorf("found %d targets", len(plan.targets))
	}
	if took := time.Since(start); took > 15*time.Second { // a fraction of a second; a minute if they multiply
		t.Errorf("the plan took %s", took)
	}
}

// own returns a host with the addresses 192.0.2.N and 2001:db8::N that authorises TCP ports from 80 to 90.
func own(n int, change func(*host)) *host {
	h := &host{connected: true, machines: []machine{{name: "m"}}, ports: hostPorts{
		supported: true, permitted: []infrav1.HostPorts{tcp(80, 90)},
		addresses: map[corev1.IPFamily]netip.Addr{
			corev1.IPv4Protocol: netip.MustParseAddr(fmt.Sprint("192.0.2.", n)), corev1.IPv6Protocol: netip.MustParseAddr(fmt.Sprint("2001:db8::", n)),
		},
	}}
	if change != nil {
		change(h)
	}
	return h
}

func TestPlanPorts(t *testing.T) {
	without := func(change func(*host)) []*host { return []*host{own(1, change), own(2, nil)} }
	two := []*host{own(1, nil), own(2, nil)}
	for name, c := range map[string]struct {
		hosts    []*host
		services []accepted
		want     string
		refused  string // part of the reasons, by Service
	}{
		"all hosts":                            {two, []accepted{with("a", []int32{80})}, "a@192.0.2.1 a@192.0.2.2", ""},
		"both families":                        {two[:1], []accepted{dual(with("a", []int32{80}))}, "a@192.0.2.1 a@2001:db8::1", ""},
		"different ports":                      {two[:1], []accepted{with("a", []int32{80}), with("b", []int32{81})}, "a@192.0.2.1 b@192.0.2.1", ""},
		"an unauthorised port":                 {two, []accepted{with("a", []int32{80, 443, 91})}, "", "a: host h1 does not authorise TCP port 443, TCP port 91 for the namespace: use"},
		"authorised on one host":               {without(func(h *host) { h.ports.permitted = nil }), []accepted{with("a", []int32{80})}, "a@192.0.2.2", ""},
		"an old capstand":                      {without(func(h *host) { h.ports.supported = false }), []accepted{with("a", []int32{80})}, "a@192.0.2.2", ""},
		"no machines":                          {without(func(h *host) { h.machines = nil }), []accepted{with("a", []int32{80})}, "a@192.0.2.2", ""},
		"no host":                              {nil, []accepted{with("a", []int32{80})}, "", "a: no connected host runs a machine of the cluster"},
		"no address of the family":             {[]*host{own(1, func(h *host) { delete(h.ports.addresses, corev1.IPv4Protocol) })}, []accepted{with("a", []int32{80})}, "", "a: host h1 has no address of the families [IPv4]"},
		"the older one has the port":           {two[:1], []accepted{with("a", []int32{80}), with("b", []int32{80, 81})}, "a@192.0.2.1", "b: on host h1, the Service default/a has TCP port 80"},
		"the one that has it keeps it":         {two[:1], []accepted{with("a", []int32{80}), with("b", []int32{80, 81}, "192.0.2.1")}, "b@192.0.2.1", "a: on host h1, the Service default/b has TCP port 80"},
		"one host each":                        {two, []accepted{with("a", []int32{80}), with("b", []int32{80}, "192.0.2.1")}, "a@192.0.2.2 b@192.0.2.1", "a: on host h1|b: on host h2"},
		"a port is one of both families":       {two[:1], []accepted{dual(with("a", []int32{80})), with("b", []int32{80}, "192.0.2.1")}, "b@192.0.2.1", "a: on host h1, the Service default/b"},
		"without a permission nothing is held": {[]*host{own(1, func(h *host) { h.ports.permitted = nil })}, []accepted{with("b", []int32{80}, "192.0.2.1")}, "", "b: host h1 does not authorise"},
		"away for a moment":                    {without(func(h *host) { h.connected, h.machines = false, nil }), []accepted{with("a", []int32{80}, "192.0.2.1"), with("b", []int32{81})}, "a@192.0.2.1 a@192.0.2.2 b@192.0.2.2", ""},
		"lost":                                 {without(func(h *host) { h.connected, h.lost = false, true }), []accepted{with("a", []int32{80}, "192.0.2.1")}, "a@192.0.2.2", ""},
		"a node port":                          {two, []accepted{nodePort("n", 85)}, "n@192.0.2.1 n@192.0.2.2", ""},
		"a node port and a port":               {two[:1], []accepted{nodePort("n", 85), with("a", []int32{85})}, "n@192.0.2.1", "a: on host h1, the Service default/n has TCP port 85"},
		"an unauthorised node port":            {two[:1], []accepted{nodePort("n", 85, 91)}, "", "n: host h1 does not authorise TCP port 91 for the namespace"},
		"node ports of a host that is away":    {without(func(h *host) { h.connected, h.machines = false, nil }), []accepted{nodePort("n", 85), nodePort("o", 91)}, "n@192.0.2.1 n@192.0.2.2", "o: host h2 does not authorise TCP port 91"},
		"node ports of a lost host":            {without(func(h *host) { h.connected, h.lost = false, true }), []accepted{nodePort("n", 85)}, "n@192.0.2.2", ""},
		"two capstands of one box":             {[]*host{own(1, nil), own(1, nil)}, []accepted{with("a", []int32{80})}, "a@192.0.2.1", ""},
	} {
		hosts := map[string]*host{}
		for i, h := range c.hosts {
			h.name = fmt.Sprint("h", i+1)
			hosts[h.name] = h
		}
		plan := planPorts(c.services, hosts)
		var got, refused []string
		for _, target := range plan.targets {
			got = append(got, target.service.Name+"@"+target.address.String())
		}
		slices.Sort(got)
		for s, why := range maps.All(plan.refused) {
			refused = append(refused, s.Name+": "+why)
		}
		slices.Sort(refused)
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %v, want %s", name, got, c.want)
		}
		for i, part := range strings.Split(c.refused, "|") {
			if i >= len(refused) && part != "" || i < len(refused) && (part == "" || !strings.HasPrefix(refused[i], part)) {
				t.Errorf("%s: refused %q, want %q", name, refused, c.refused)
			}
		}
	}
}

// What a host no longer allows ends without a view of the workload cluster, and nothing else does.
func TestPermitted(t *testing.T) {
	h := own(1, func(h *host) { h.allowed = []netip.Prefix{netip.MustParsePrefix("192.0.2.96/28")} })
	at := func(address string, hostPorts bool, ports ...uint32) *hostpb.PublishedService {
		s := &hostpb.PublishedService{Address: address, HostPorts: hostPorts}
		for _, p := range ports {
			s.Ports = append(s.Ports, &hostpb.PublishedPort{Protocol: hostpb.PublishedPort_TCP, Port: p})
		}
		return s
	}
	for name, c := range map[string]struct {
		service *hostpb.PublishedService
		keeps   bool
	}{
		"an address":                {at("192.0.2.100", false, 22), true},
		"another address":           {at("192.0.2.10", false, 80), false},
		"ports":                     {at("192.0.2.1", true, 80, 90), true},
		"IPv6":                      {at("2001:db8::1", true, 80), true},
		"a port that is not":        {at("192.0.2.1", true, 80, 91), false},
		"ports of another address":  {at("192.0.2.2", true, 80), false},
		"ports are not the address": {at("192.0.2.1", false, 80), false},
	} {
		keep, changed := h.permitted(&hostpb.SetServicesRequest{Services: []*hostpb.PublishedService{c.service}})
		if len(keep) == 1 != c.keeps || changed == c.keeps {
			t.Errorf("%s: %v, %v", name, keep, changed)
		}
	}
	if keep, changed := h.permitted(nil); keep != nil || changed {
		t.Errorf("without a request: %v, %v", keep, changed)
	}
}

// A cluster publishes Services with ports of the hosts only if its owner opted in, with the same limits and flaws as others.
func TestChooseHostPorts(t *testing.T) {
	ports := with("a", []int32{80})
	sctp := with("b", []int32{80})
	sctp.Spec.Ports[0].Protocol = corev1.ProtocolSCTP
	all := []corev1.Service{*ports.Service, *sctp.Service, service(nil), *nodePort("n", 30080).Service}
	for name, c := range map[string]struct {
		lb      infrav1.ServiceLoadBalancerSpec
		want    string
		refused int
	}{
		"only ports": {infrav1.ServiceLoadBalancerSpec{HostPorts: ptr.To(true)}, "a", 2},
		"no ports":   {*fromFour, "web", 2},
		"node ports": {infrav1.ServiceLoadBalancerSpec{NodePorts: ptr.To(true)}, "n", 3},
		"both":       {infrav1.ServiceLoadBalancerSpec{HostPorts: ptr.To(true), AddressesFromPool: fromFour.AddressesFromPool}, "a web", 1},
	} {
		got := choose(all, &c.lb)
		var names []string
		for _, s := range got.accepted {
			names = append(names, s.Name)
		}
		slices.Sort(names)
		if strings.Join(names, " ") != c.want || len(got.refused) != c.refused {
			t.Errorf("%s: %v and %d refused", name, names, len(got.refused))
		}
	}
}

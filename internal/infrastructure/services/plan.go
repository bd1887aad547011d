package services

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// wants reports whether Capstan is the load balancer of a Service, or can publish its node ports.
func wants(s *corev1.Service) bool {
	return s.DeletionTimestamp.IsZero() && (isNodePort(s) || isLoadBalancer(s))
}

func isLoadBalancer(s *corev1.Service) bool {
	class := ptr.Deref(s.Spec.LoadBalancerClass, infrav1.ServiceLoadBalancerClass)
	ours := class == infrav1.ServiceLoadBalancerClass || class == infrav1.ServiceHostPortsClass
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer && ours
}

// pools are the pools of the addresses, by their family.
type pools map[corev1.IPFamily]infrav1.IPPoolReference

func poolsOf(lb *infrav1.ServiceLoadBalancerSpec) pools {
	out := pools{}
	for family, pool := range map[corev1.IPFamily]infrav1.IPPoolReference{corev1.IPv4Protocol: lb.AddressesFromPool, corev1.IPv6Protocol: lb.IPv6AddressesFromPool} {
		if pool.Name != "" {
			out[family] = pool
		}
	}
	return out
}

// families returns the families of the addresses that a Service gets.
func (p pools) families(s *corev1.Service) (out []corev1.IPFamily) {
	for _, family := range s.Spec.IPFamilies {
		if _, ok := p[family]; ok {
			out = append(out, family)
		}
	}
	return out
}

func familyOf(address netip.Addr) corev1.IPFamily {
	if address.Is6() {
		return corev1.IPv6Protocol
	}
	return corev1.IPv4Protocol
}

// flaw returns the reason why a Service cannot be published with addresses of some families, or "".
func flaw(s *corev1.Service, families []corev1.IPFamily) string {
	if len(families) == 0 {
		return fmt.Sprintf("the cluster has no pool with addresses of its families %v: set spec.ipFamilies of the Service, or a pool in spec.services.loadBalancer of the CapstanCluster", s.Spec.IPFamilies)
	}
	// The API server of the cluster may have accepted any name, and hosts keep the names.
	if n := len(nameOf(s)); n > hostpb.MaxServiceName {
		return fmt.Sprintf("its name and namespace have %d bytes: at most %d are possible", n, hostpb.MaxServiceName)
	}
	if s.Spec.LoadBalancerIP != "" { // Deprecated in Kubernetes. The pool chooses.
		return "spec.loadBalancerIP is not supported: remove it; the pool of the cluster provides the address"
	}
	if n := len(s.Spec.LoadBalancerSourceRanges); n > hostpb.MaxSourceRanges {
		return fmt.Sprintf("it has %d loadBalancerSourceRanges: at most %d are possible", n, hostpb.MaxSourceRanges)
	}
	for _, p := range s.Spec.Ports {
		switch {
		case p.Protocol != corev1.ProtocolTCP && p.Protocol != corev1.ProtocolUDP:
			return fmt.Sprintf("port %d has the protocol %s: only TCP and UDP are possible", p.Port, p.Protocol)
		case p.NodePort == 0:
			return fmt.Sprintf("port %d has no node port: set spec.allocateLoadBalancerNodePorts to true, because the host forwards to node ports", p.Port)
		}
	}
	for _, family := range families {
		if _, err := sourceRanges(s, family); err != nil {
			return err.Error()
		}
	}
	return ""
}

// sourceRanges returns the networks of the clients of a family in the form that hosts accept, or nothing for all clients.
func sourceRanges(s *corev1.Service, family corev1.IPFamily) (out []string, err error) {
	for _, text := range s.Spec.LoadBalancerSourceRanges {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			return nil, fmt.Errorf("loadBalancerSourceRanges has %q: expected a network, for example 192.0.2.0/24", text)
		}
		if !prefix.Addr().Is4In6() && familyOf(prefix.Addr()) == family {
			out = append(out, prefix.Masked().String())
		}
	}
	if len(out) == 0 && len(s.Spec.LoadBalancerSourceRanges) > 0 {
		return nil, fmt.Errorf("loadBalancerSourceRanges has no %[1]s network, so no client could reach the %[1]s address: add one", family)
	}
	return slices.Compact(slices.Sorted(slices.Values(out))), nil
}

// accepted is a Service that gets an address of each family.
type accepted struct {
	*corev1.Service
	families []corev1.IPFamily
}

// choice is the result of choose.
type choice struct {
	// accepted Services get addresses, in the order of their creation.
	accepted []accepted
	// refused contains the reasons why others do not.
	refused map[*corev1.Service]string
}

// families returns the families in which a cluster publishes a Service.
func families(s *corev1.Service, lb *infrav1.ServiceLoadBalancerSpec) (of []corev1.IPFamily, why string) {
	switch {
	case !usesHostPorts(s):
		return poolsOf(lb).families(s), ""
	case !isNodePort(s) && !ptr.Deref(lb.HostPorts, false):
		return nil, fmt.Sprintf("the cluster does not publish Services of the class %s: set spec.services.loadBalancer.hostPorts of the CapstanCluster to true", infrav1.ServiceHostPortsClass)
	}
	return s.Spec.IPFamilies, ""
}

// choose selects the Services to publish. The oldest come first, so that a new Service never displaces another one.
func choose(all []corev1.Service, lb *infrav1.ServiceLoadBalancerSpec) choice {
	out := choice{refused: map[*corev1.Service]string{}}
	sorted := make([]*corev1.Service, 0, len(all))
	for i := range all {
		sorted = append(sorted, &all[i])
	}
	slices.SortFunc(sorted, func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.UID, b.UID))
	})
	addresses, ports := 0, 0
	for _, s := range sorted {
		if !wants(s) || isNodePort(s) && !ptr.Deref(lb.NodePorts, false) {
			continue
		}
		families, why := families(s, lb)
		more := len(s.Spec.Ports) * len(families)
		why = cmp.Or(why, flaw(s, families))
		switch {
		case why != "":
		case addresses+len(families) > hostpb.MaxServices:
			why = fmt.Sprintf("the published Services would have %d addresses, and the limit of a cluster is %d: delete one", addresses+len(families), hostpb.MaxServices)
		case ports+more > hostpb.MaxServicePorts:
			why = fmt.Sprintf("the published Services would have %d ports, and the limit of a cluster is %d", ports+more, hostpb.MaxServicePorts)
		}
		if why != "" {
			out.refused[s] = why
			continue
		}
		out.accepted = append(out.accepted, accepted{s, families})
		addresses, ports = addresses+len(families), ports+more
	}
	return out
}

// eligibleNodes returns the names of the Nodes that can get connections for Services.
func eligibleNodes(nodes []corev1.Node) map[string]bool {
	out := map[string]bool{}
	for i := range nodes {
		n := &nodes[i]
		if _, excluded := n.Labels[corev1.LabelNodeExcludeBalancers]; excluded || !n.DeletionTimestamp.IsZero() {
			continue
		}
		if slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}) {
			out[n.Name] = true
		}
	}
	return out
}

// nodesOf returns the Nodes that get the connections of a Service to an address of a family. With externalTrafficPolicy Local these are Nodes with a
// ready endpoint, because they preserve the address of the client and do not forward to other Nodes.
func nodesOf(s *corev1.Service, family corev1.IPFamily, eligible map[string]bool, slicesOf map[string][]discoveryv1.EndpointSlice) map[string]bool {
	if s.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return eligible
	}
	out := map[string]bool{}
	for _, slice := range slicesOf[s.Namespace+"/"+s.Name] {
		if slice.AddressType != discoveryv1.AddressType(family) {
			continue
		}
		for _, e := range slice.Endpoints {
			if name := ptr.Deref(e.NodeName, ""); eligible[name] && ptr.Deref(e.Conditions.Ready, true) {
				out[name] = true
			}
		}
	}
	return out
}

// machine is a machine of the cluster.
type machine struct {
	name      string
	addresses []netip.Addr
	running   bool
}

// host is a CapstanHost from the view of a cluster.
type host struct {
	name string
	// connected: the manager is connected to the host, and the host answers.
	connected bool
	absence
	// allowed are the addresses that the cluster may publish on the host.
	allowed []netip.Prefix
	ports   hostPorts
	// machines of the cluster on the host.
	machines []machine
	// present: the host is connected, and has machines or the load balancer of the cluster.
	present bool
	// services is the number of Services that the host publishes for the cluster.
	services int
}

func (h *host) allows(address netip.Addr) bool {
	return slices.ContainsFunc(h.allowed, func(p netip.Prefix) bool { return p.Contains(address) })
}

// targets returns the addresses of the host's machines among the Nodes. They have the family of the address that leads to them.
func (h *host) targets(nodes map[string]bool, family corev1.IPFamily) (out []string) {
	for _, m := range h.machines {
		i := slices.IndexFunc(m.addresses, func(a netip.Addr) bool { return familyOf(a) == family })
		if i >= 0 && m.running && nodes[m.name] {
			out = append(out, m.addresses[i].String())
		}
	}
	slices.Sort(out)
	return out
}

// place returns the host that publishes an address. Without a host, why is the reason. record are the hosts that may have the address,
// the current one first. The current host keeps the address while it is connected and has a target, and while it is away for a moment,
// or no other host has a target: a capstand that restarts moves nothing, and its box continues to forward.
func place(address netip.Addr, nodes map[string]bool, record []string, hosts map[string]*host) (name, why string) {
	var best, now *host
	preferred := ""
	for i, name := range record {
		h := hosts[name]
		if i == 0 {
			now = h
		}
		if preferred == "" && h != nil && h.connected {
			preferred = name // After the loss of the current host, this one tries to get the address.
		}
	}
	family, permitted := familyOf(address), false
	for _, h := range hosts {
		permitted = permitted || h.allows(address)
		if h.allows(address) && h.connected && len(h.machines) > 0 && (best == nil || better(h, best, nodes, family, preferred)) {
			best = h
		}
	}
	if now != nil && now.allows(address) && !now.connected && (!now.silent || best == nil || len(best.targets(nodes, family)) == 0) {
		return now.name, ""
	}
	switch {
	case best != nil:
		return best.name, ""
	case permitted:
		return "", fmt.Sprintf("no connected host that allows the address %s runs a machine of the cluster", address)
	}
	return "", fmt.Sprintf("no host allows the namespace to publish the address %s: see spec.services of the CapstanHosts", address)
}

// better prefers a host with targets, then the preferred host, then the one with the fewest Services.
func better(a, b *host, nodes map[string]bool, family corev1.IPFamily, preferred string) bool {
	has := func(h *host) int { return min(1, len(h.targets(nodes, family))) }
	is := func(h *host) int {
		if h.name == preferred {
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(has(b), has(a)), cmp.Compare(is(b), is(a)), cmp.Compare(a.services, b.services), cmp.Compare(a.name, b.name)) < 0
}

// published is the Service as its host publishes it.
func published(s *corev1.Service, address netip.Addr, targets []string) *hostpb.PublishedService {
	out := &hostpb.PublishedService{Name: s.Namespace + "/" + s.Name, Address: address.String(), Machines: targets, HostPorts: usesHostPorts(s)}
	out.SourceRanges, _ = sourceRanges(s, familyOf(address)) // flaw has checked them.
	for _, p := range s.Spec.Ports {
		protocol := hostpb.PublishedPort_TCP
		if p.Protocol == corev1.ProtocolUDP {
			protocol = hostpb.PublishedPort_UDP
		}
		out.Ports = append(out.Ports, &hostpb.PublishedPort{Protocol: protocol, Port: uint32(portOutside(s, p)), NodePort: uint32(p.NodePort)})
	}
	return out
}

// claimPrefix is the beginning of the names of the claims for Services of a cluster.
func claimPrefix(cluster string) string { return cluster + "-svc-" }

// claimName is the name of the claim for an address of a Service. A Service that is created again gets another address.
func claimName(cluster string, s *corev1.Service, family corev1.IPFamily) string {
	sum := sha256.Sum256([]byte(s.UID))
	name := claimPrefix(cluster) + fmt.Sprintf("%x", sum[:8])
	if family == corev1.IPv6Protocol {
		name += "-ipv6"
	}
	return name
}

// claimNames are the names of all claims that a Service can have. The first one is its mark.
func claimNames(cluster string, s *corev1.Service) []string {
	return []string{claimName(cluster, s, corev1.IPv4Protocol), claimName(cluster, s, corev1.IPv6Protocol)}
}

// hostNames are the first hosts in an annotation. Users of the namespace can write any number.
func hostNames(annotation string, most int) (out []string) {
	for name := range strings.SplitSeq(annotation, ",") {
		if len(out) == most {
			break
		}
		if name != "" && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}

// withNew returns the hosts that may have an address when another host gets it. While that host only tries, the former host stays the
// first one.
func withNew(hosts []string, name string, tries bool) []string {
	if tries && slices.Contains(hosts, name) {
		return hosts
	}
	others := slices.DeleteFunc(slices.Clone(hosts), func(h string) bool { return h == name })
	if tries {
		return append(others, name)
	}
	return append([]string{name}, others...)
}

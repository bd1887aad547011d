// Package networkpolicy enforces the NetworkPolicies of a cluster on one node, with nftables.
//
// Every packet from or to a pod of the node passes the forward hook, since each pod has a link of its own (ptp). Two base chains
// there, one for each direction, send the packets of isolated pods through the chains of their policies. A packet must pass both:
// "accept" ends only its own base chain. Traffic of the node itself, such as the kubelet's probes, is not forwarded
// and therefore always allowed, as NetworkPolicy requires.
//
// Layer: node. Allowed imports: api, library, contract.
package networkpolicy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Cluster is the part of a cluster's state that decides about packets.
type Cluster struct {
	Policies   []*networkingv1.NetworkPolicy
	Pods       []*corev1.Pod
	Namespaces []*corev1.Namespace
}

// Chain of rules in nft's syntax. The chains Ingress and Egress are base chains at the forward hook.
type Chain struct {
	Name  string
	Rules []string
}

// Names of the base chains.
const (
	Ingress = "ingress"
	Egress  = "egress"
)

// maxElements is how many rules, and addresses and ports in them, the policies of a namespace can add to the rules of a node. The users of a
// namespace write them: a policy of one megabyte could need more memory than the machine has.
const maxElements = 500_000

// maxComparisons is how many requirements of selectors, and names of ports, the rules of a namespace can compare with pods, in each direction.
// Those that match nothing have no elements, and cost time at each change of a pod. This number takes about a second.
const maxComparisons = 10_000_000

// TooLarge explains to users of the cluster why a policy allows nothing.
var TooLarge = fmt.Sprintf("expected the NetworkPolicies of the namespace to need at most %d rules, addresses and ports on a node, and %d comparisons of selectors with pods, "+
	"found more with this policy: it isolates its pods and allows nothing; if even its podSelector is too much, it isolates all pods of the namespace; use fewer policies, peers or ports", maxElements, maxComparisons)

// budget is the rest of these limits for a namespace. selections are the comparisons of the podSelectors of policies: without them, all pods of
// the namespace would have to be isolated.
type budget struct{ elements, comparisons, selections int }

func (b *budget) exhausted() bool { return b.elements < 0 || b.comparisons < 0 }

// Chains returns the rules for the pods of a node, in an order that depends on the names of objects only. It returns nil if no
// policy selects a pod of the node. tooLarge are the policies, by namespace and name, that allow nothing because of maxElements or
// maxComparisons.
func Chains(c Cluster, node string) (chains []Chain, tooLarge []string) {
	all := indexed(pods(c), node)
	policies := slices.SortedFunc(slices.Values(c.Policies), func(a, b *networkingv1.NetworkPolicy) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	var base, rest []Chain
	for _, d := range []direction{ingress, egress} {
		isolated, chains, refused := isolate(d, policies, all)
		tooLarge = append(tooLarge, refused...)
		if len(isolated) > 0 {
			base = append(base, Chain{Name: d.name, Rules: baseRules(d, isolated)})
			rest = append(rest, chains...)
		}
	}
	return append(base, rest...), slices.Compact(slices.Sorted(slices.Values(tooLarge)))
}

// direction of packets, seen from the isolated pod.
type direction struct {
	name       string
	policyType networkingv1.PolicyType
	// pod and peer are the addresses of the packet that belong to the isolated pod and to the other side.
	pod, peer string
	// rules returns the rules of a policy for this direction.
	rules func(networkingv1.NetworkPolicySpec) []rule
}

// rule is a NetworkPolicyIngressRule or a NetworkPolicyEgressRule.
type rule struct {
	peers []networkingv1.NetworkPolicyPeer
	ports []networkingv1.NetworkPolicyPort
}

var (
	ingress = direction{Ingress, networkingv1.PolicyTypeIngress, "daddr", "saddr", func(s networkingv1.NetworkPolicySpec) (rules []rule) {
		for _, r := range s.Ingress {
			rules = append(rules, rule{r.From, r.Ports})
		}
		return rules
	}}
	egress = direction{Egress, networkingv1.PolicyTypeEgress, "saddr", "daddr", func(s networkingv1.NetworkPolicySpec) (rules []rule) {
		for _, r := range s.Egress {
			rules = append(rules, rule{r.To, r.Ports})
		}
		return rules
	}}
)

// pod is a pod with addresses of its own.
type pod struct {
	namespace, node string
	labels          labels.Set
	namespaceLabels labels.Set
	addresses       []netip.Addr
	// ports by protocol and name, such as "tcp/http".
	ports map[string]int32
}

// pods leaves out pods without an address of their own: those in the network of their node and those that have ended.
func pods(c Cluster) []pod {
	namespaces := map[string]labels.Set{}
	for _, n := range c.Namespaces {
		namespaces[n.Name] = n.Labels
	}
	var all []pod
	for _, p := range c.Pods {
		if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		one := pod{namespace: p.Namespace, node: p.Spec.NodeName, labels: p.Labels, namespaceLabels: namespaces[p.Namespace], ports: map[string]int32{}}
		for _, ip := range p.Status.PodIPs {
			if address, err := netip.ParseAddr(ip.IP); err == nil {
				one.addresses = append(one.addresses, address)
			}
		}
		for _, container := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			for _, port := range container.Ports {
				one.ports[protocol(&port.Protocol)+"/"+port.Name] = port.ContainerPort
			}
		}
		all = append(all, one)
	}
	return all
}

// index of the pods of a cluster. Its numbers are those of pods in all.
type index struct {
	all []pod
	// byNamespace are the pods of each namespace, and local those of the node.
	byNamespace, local map[string][]int
	// labels are those of the namespaces with pods.
	labels map[string]labels.Set
}

func indexed(all []pod, node string) index {
	ix := index{all, map[string][]int{}, map[string][]int{}, map[string]labels.Set{}}
	for i, p := range all {
		ix.byNamespace[p.namespace] = append(ix.byNamespace[p.namespace], i)
		ix.labels[p.namespace] = p.namespaceLabels
		if p.node == node {
			ix.local[p.namespace] = append(ix.local[p.namespace], i)
		}
	}
	return ix
}

// isolate returns the chain of each address that a policy isolates in this direction, and these chains with those of the policies. A policy
// that is too large isolates its pods, and allows nothing.
func isolate(d direction, policies []*networkingv1.NetworkPolicy, ix index) (isolated map[netip.Addr]string, chains []Chain, tooLarge []string) {
	ofPolicies, selections, tooLarge := policyChains(d, policies, ix)
	isolated, ofPods := podChains(d, selections, ix)
	chains = slices.SortedFunc(slices.Values(append(ofPolicies, ofPods...)), func(a, b Chain) int { return strings.Compare(a.Name, b.Name) })
	return isolated, chains, tooLarge
}

// selection is the chains of the policies that select a pod. An isolated pod without chains is selected by policies that allow nothing.
type selection struct {
	isolated bool
	chains   []string
}

// policyChains returns a chain for each policy that selects pods of the node and is not too large, and the selection of each pod of the index.
func policyChains(d direction, policies []*networkingv1.NetworkPolicy, ix index) (chains []Chain, selections []selection, tooLarge []string) {
	left := map[string]budget{} // by namespace
	selections = make([]selection, len(ix.all))
	for _, policy := range policies {
		if !applies(policy, d.policyType) {
			continue
		}
		have, seen := left[policy.Namespace]
		if !seen {
			have = budget{maxElements, maxComparisons, maxComparisons}
		}
		selected, known := ix.selected(policy, &have)
		chain := Chain{Name: d.name + "-" + hash(policy.Namespace, policy.Name)}
		fits := known
		if known && len(selected) > 0 {
			chain.Rules, have, fits = fittingRules(d, policy, ix, selected, have)
		}
		left[policy.Namespace] = have
		for _, i := range selected {
			selections[i].isolated = true
			if fits {
				selections[i].chains = append(selections[i].chains, chain.Name)
			}
		}
		if !fits {
			tooLarge = append(tooLarge, policy.Namespace+"/"+policy.Name)
		} else if len(selected) > 0 {
			chains = append(chains, chain)
		}
	}
	return chains, selections, tooLarge
}

// fittingRules returns the rules of a policy, and the rest of the budget. fits is false if the policy needs more than the budget. Its chain,
// and a jump to it for each selected pod, count as well.
func fittingRules(d direction, policy *networkingv1.NetworkPolicy, ix index, selected []int, have budget) (rules []string, rest budget, fits bool) {
	rest = have
	if rest.elements -= 1 + len(selected); !rest.exhausted() {
		rules, rest = policyRules(d, policy, ix, selected, rest)
	}
	if rest.exhausted() {
		// Smaller policies of the namespace can have the elements, which are not used. The comparisons were made, so they count.
		return nil, budget{have.elements, max(0, rest.comparisons), have.selections}, false
	}
	return rules, rest, true
}

// selected are the pods of the node that a policy selects. It returns all of its namespace, and false, if the budget has no comparisons for
// that: a pod that the policy should isolate is isolated then as well.
func (ix index) selected(policy *networkingv1.NetworkPolicy, b *budget) (pods []int, known bool) {
	local := ix.local[policy.Namespace]
	if b.selections -= costOf(&policy.Spec.PodSelector, len(local)); b.selections < 0 {
		return local, false
	}
	selects := compiled(&policy.Spec.PodSelector)
	for _, i := range local {
		if selects.Matches(ix.all[i].labels) {
			pods = append(pods, i)
		}
	}
	return pods, true
}

// podChains returns one chain for each set of policies that select a pod, and the chain name of each pod address. A chain drops all packets
// that no policy of its set accepts. Pods with the same policies share a chain.
func podChains(d direction, selections []selection, ix index) (isolated map[netip.Addr]string, chains []Chain) {
	isolated = map[netip.Addr]string{}
	made := map[string]bool{}
	for i, selection := range selections {
		if !selection.isolated {
			continue
		}
		names := slices.Sorted(slices.Values(selection.chains))
		chain := Chain{Name: d.name + "-pods-" + hash(names...)}
		for _, address := range ix.all[i].addresses {
			isolated[address] = chain.Name
		}
		if made[chain.Name] {
			continue
		}
		made[chain.Name] = true
		for _, name := range names {
			chain.Rules = append(chain.Rules, "jump "+name)
		}
		chain.Rules = append(chain.Rules, "drop")
		chains = append(chains, chain)
	}
	return isolated, chains
}

// applies follows the defaults of policyTypes: Ingress always, Egress if there are egress rules.
func applies(policy *networkingv1.NetworkPolicy, t networkingv1.PolicyType) bool {
	if len(policy.Spec.PolicyTypes) > 0 {
		return slices.Contains(policy.Spec.PolicyTypes, t)
	}
	return t == networkingv1.PolicyTypeIngress || len(policy.Spec.Egress) > 0
}

// baseRules send the packets of isolated pods to their chains. Answers pass, and packets from a pod to itself, which come back
// through a Service.
func baseRules(d direction, isolated map[netip.Addr]string) []string {
	rules := []string{"ct state established,related accept"}
	for _, family := range []string{"ip", "ip6"} {
		var verdicts, same []string
		for address, chain := range isolated {
			if familyOf(address) == family {
				verdicts = append(verdicts, fmt.Sprintf("%s : jump %s", address, chain))
				same = append(same, fmt.Sprintf("%s . %s", address, address))
			}
		}
		if len(verdicts) > 0 {
			rules = append(rules,
				fmt.Sprintf("%s saddr . %s daddr %s accept", family, family, set(same)),
				fmt.Sprintf("%s %s vmap %s", family, d.pod, set(verdicts)))
		}
	}
	return rules
}

// policyRules accept the packets that the policy allows to the pods with the indexes selected. They stop when they have used up the budget,
// and return the rest of it.
func policyRules(d direction, policy *networkingv1.NetworkPolicy, ix index, selected []int, b budget) (rules []string, rest budget) {
	// A named port is one of the packet's destination.
	destinations := ix.all
	if d.policyType == networkingv1.PolicyTypeIngress {
		destinations = nil
		for _, i := range selected {
			destinations = append(destinations, ix.all[i])
		}
	}
	for _, r := range d.rules(policy.Spec) {
		peers, ports := peerMatches(d, policy.Namespace, r.peers, ix, &b), portMatches(r.ports, destinations, &b)
		if b.elements -= elements(peers, ports); b.exhausted() {
			return nil, b
		}
		for _, peer := range peers {
			for _, port := range ports {
				if peer.family == "" || port.family == "" || peer.family == port.family {
					rules = append(rules, strings.Join(strings.Fields(peer.text+" "+port.text+" accept"), " "))
				}
			}
		}
	}
	return rules, b
}

// match of a packet in nft's syntax. A family, "ip" or "ip6", excludes packets of the other one.
type match struct {
	family, text string
	// size is the number of its elements.
	size int
}

// elements returns the size of the rules for each pair of a peer and a port: a rule, and the elements of both.
func elements(peers, ports []match) (sum int) {
	for _, m := range peers {
		sum += len(ports) * (1 + m.size)
	}
	for _, m := range ports {
		sum += len(peers) * m.size
	}
	return sum
}

// peerMatches returns one match for each alternative; the empty match for all peers.
func peerMatches(d direction, namespace string, peers []networkingv1.NetworkPolicyPeer, ix index, b *budget) []match {
	if len(peers) == 0 {
		return []match{{}}
	}
	var alternatives []match
	found := map[netip.Addr]bool{}
	for _, peer := range peers {
		if peer.IPBlock != nil {
			alternatives = append(alternatives, blockMatch(d, peer.IPBlock)...)
			continue
		}
		for _, i := range selectedBy(peer, namespace, ix, b) {
			for _, address := range ix.all[i].addresses {
				found[address] = true
			}
		}
		if b.exhausted() {
			return nil
		}
	}
	addresses := map[string][]string{}
	for address := range found {
		addresses[familyOf(address)] = append(addresses[familyOf(address)], address.String())
	}
	for _, family := range []string{"ip", "ip6"} {
		if n := len(addresses[family]); n > 0 {
			alternatives = append(alternatives, match{family, fmt.Sprintf("%s %s %s", family, d.peer, set(addresses[family])), n})
		}
	}
	return alternatives
}

// selectedBy returns the pods that a peer selects. The peer has selectors, and no ipBlock. Only pods of namespaces that it selects are compared.
func selectedBy(peer networkingv1.NetworkPolicyPeer, namespace string, ix index, b *budget) (selected []int) {
	namespaces := []string{namespace}
	if peer.NamespaceSelector != nil {
		if !b.compare(peer.NamespaceSelector, len(ix.labels)) {
			return nil
		}
		selects := compiled(peer.NamespaceSelector)
		namespaces = slices.DeleteFunc(slices.Collect(maps.Keys(ix.labels)), func(name string) bool { return !selects.Matches(ix.labels[name]) })
	}
	selects := compiled(peer.PodSelector)
	for _, name := range namespaces {
		if !b.compare(peer.PodSelector, len(ix.byNamespace[name])) {
			return nil
		}
		for _, i := range ix.byNamespace[name] {
			if peer.PodSelector == nil && peer.NamespaceSelector != nil || selects.Matches(ix.all[i].labels) {
				selected = append(selected, i)
			}
		}
	}
	return selected
}

// compare takes the cost of a selector that is compared with n objects, and returns whether the budget had it.
func (b *budget) compare(selector *metav1.LabelSelector, n int) bool {
	b.comparisons -= costOf(selector, n)
	return !b.exhausted()
}

// costOf is the number of comparisons of a selector with n objects.
func costOf(selector *metav1.LabelSelector, n int) int {
	cost := 1
	if selector != nil {
		cost += len(selector.MatchLabels) + len(selector.MatchExpressions)
	}
	return cost * (1 + n)
}

// blockMatch returns no match for a block with an exception that cannot be enforced: nft would refuse the rules of all policies, or the
// exception would have no effect. Kubernetes 1.35 accepts notations that nft does not have: leading zeros, and IPv4 addresses as IPv6.
// The exceptions are one set, because the kernel refuses a rule with many expressions, and with it all others.
func blockMatch(d direction, block *networkingv1.IPBlock) []match {
	prefix, err := netip.ParsePrefix(block.CIDR)
	if err != nil || prefix.Addr().Is4In6() {
		return nil
	}
	family := familyOf(prefix.Addr())
	text := fmt.Sprintf("%s %s %s", family, d.peer, prefix.Masked())
	var exceptions netipx.IPSetBuilder // joins those that overlap
	for _, except := range block.Except {
		exception, err := netip.ParsePrefix(except)
		if err != nil || exception.Addr().Is4In6() || familyOf(exception.Addr()) != family {
			return nil
		}
		exceptions.AddPrefix(exception)
	}
	joined, err := exceptions.IPSet()
	if err != nil {
		return nil
	}
	var except []string
	for _, exception := range joined.Prefixes() {
		except = append(except, exception.String())
	}
	if len(except) > 0 {
		text += fmt.Sprintf(" %s %s != %s", family, d.peer, set(except))
	}
	return []match{{family, text, 1 + len(block.Except)}}
}

// portMatches returns one match for each alternative; the empty match for all ports of all protocols.
func portMatches(ports []networkingv1.NetworkPolicyPort, destinations []pod, b *budget) []match {
	if len(ports) == 0 {
		return []match{{}}
	}
	var alternatives []match
	named := map[string]bool{}
	for _, port := range ports {
		protocol := protocol(port.Protocol)
		switch {
		case port.Port == nil:
			alternatives = append(alternatives, match{text: "meta l4proto " + protocol, size: 1})
		case port.Port.StrVal != "":
			if name := protocol + "/" + port.Port.StrVal; !named[name] && b.compare(nil, 2*len(destinations)) {
				named[name] = true
				alternatives = append(alternatives, namedPort(protocol, port.Port.StrVal, destinations)...)
			}
		case port.EndPort != nil:
			alternatives = append(alternatives, match{text: fmt.Sprintf("%s dport %d-%d", protocol, port.Port.IntVal, *port.EndPort), size: 1})
		default:
			alternatives = append(alternatives, match{text: fmt.Sprintf("%s dport %d", protocol, port.Port.IntVal), size: 1})
		}
	}
	return alternatives
}

// namedPort matches the port that each destination has under the name.
func namedPort(protocol, name string, destinations []pod) (alternatives []match) {
	key := protocol + "/" + name
	for _, family := range []string{"ip", "ip6"} {
		var pairs []string
		for _, p := range destinations {
			number, found := p.ports[key]
			for _, address := range p.addresses {
				if found && familyOf(address) == family {
					pairs = append(pairs, fmt.Sprintf("%s . %d", address, number))
				}
			}
		}
		if len(pairs) > 0 {
			alternatives = append(alternatives, match{family, fmt.Sprintf("%s daddr . %s dport %s", family, protocol, set(pairs)), len(pairs)})
		}
	}
	return alternatives
}

// compiled returns a selector of labels. One that the API server would not accept selects nothing.
func compiled(selector *metav1.LabelSelector) labels.Selector {
	out, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return labels.Nothing()
	}
	return out
}

func protocol(p *corev1.Protocol) string {
	if p == nil || *p == "" {
		return "tcp"
	}
	return strings.ToLower(string(*p))
}

func familyOf(address netip.Addr) string {
	if address.Is4() {
		return "ip"
	}
	return "ip6"
}

// set is an anonymous set of nftables.
func set(elements []string) string {
	slices.Sort(elements)
	return "{ " + strings.Join(slices.Compact(elements), ", ") + " }"
}

// hash keeps the names of chains within the limit of nftables.
func hash(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "/")))
	return hex.EncodeToString(sum[:8])
}

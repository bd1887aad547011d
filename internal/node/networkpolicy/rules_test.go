package networkpolicy

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// Two namespaces; the pods web and db of "shop" and one pod of "other" run on node n, client of "shop" on another node.
var (
	namespaces = []*corev1.Namespace{namespace("shop", "team", "a"), namespace("other", "team", "b")}
	podObjects = []*corev1.Pod{
		podObject("shop", "web", "n", 8080, "10.0.0.1", "fd00::1"),
		podObject("shop", "db", "n", 5432, "10.0.0.2"),
		podObject("other", "guest", "n", 9090, "10.0.0.3"),
		podObject("shop", "client", "elsewhere", 7070, "10.0.1.1", "fd00::1:1"),
		ended(podObject("shop", "job", "n", 80, "10.0.0.9")),
		hostNetwork(podObject("shop", "agent", "n", 80, "192.0.2.1")),
	}
)

func namespace(name, key, value string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{key: value}}}
}

func podObject(namespace, name, node string, port int32, ips ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": name}}}
	p.Spec.NodeName = node
	p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "main", ContainerPort: port}}}}
	for _, ip := range ips {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	return p
}

func ended(p *corev1.Pod) *corev1.Pod {
	p.Status.Phase = corev1.PodSucceeded
	return p
}

func hostNetwork(p *corev1.Pod) *corev1.Pod {
	p.Spec.HostNetwork = true
	return p
}

func policies(t *testing.T, specs ...string) (out []*networkingv1.NetworkPolicy) {
	t.Helper()
	for i, spec := range specs {
		p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: string(rune('a' + i))}}
		if err := yaml.UnmarshalStrict([]byte(spec), &p.Spec); err != nil {
			t.Fatal(err)
		}
		out = append(out, p)
	}
	return out
}

func TestChains(t *testing.T) { //nolint:funlen // a table of policies
	const web = "podSelector: {matchLabels: {app: web}}\n"
	for name, test := range map[string]struct {
		specs []string
		// ingress and egress are the rules of the policies in this direction; nil if no pod is isolated.
		ingress, egress []string
	}{
		"no policy":             {},
		"no pod of this node":   {specs: []string{"podSelector: {matchLabels: {app: client}}"}},
		"no traffic is allowed": {specs: []string{web}, ingress: []string{}},
		"all traffic is allowed": {
			specs:   []string{web + "ingress: [{}]"},
			ingress: []string{"accept"},
		},
		"pods of the own namespace": {
			specs:   []string{web + "ingress: [{from: [{podSelector: {}}]}]"},
			ingress: []string{"ip saddr { 10.0.0.1, 10.0.0.2, 10.0.1.1 } accept", "ip6 saddr { fd00::1, fd00::1:1 } accept"},
		},
		"pods of another namespace": {
			specs:   []string{web + "ingress: [{from: [{namespaceSelector: {matchLabels: {team: b}}}]}]"},
			ingress: []string{"ip saddr { 10.0.0.3 } accept"},
		},
		"both selectors must match": {
			specs:   []string{web + "ingress: [{from: [{namespaceSelector: {matchLabels: {team: b}}, podSelector: {matchLabels: {app: db}}}]}]"},
			ingress: []string{},
		},
		"all namespaces": {
			specs:   []string{web + "ingress: [{from: [{namespaceSelector: {}}]}]"},
			ingress: []string{"ip saddr { 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.1.1 } accept", "ip6 saddr { fd00::1, fd00::1:1 } accept"},
		},
		"an own pod by its namespace": {
			specs:   []string{web + "ingress: [{from: [{namespaceSelector: {matchLabels: {team: a}}, podSelector: {matchLabels: {app: db}}}]}]"},
			ingress: []string{"ip saddr { 10.0.0.2 } accept"},
		},
		"a selector without matches is not an empty list of peers": {
			specs:   []string{web + "ingress: [{from: [{podSelector: {matchLabels: {app: none}}}]}]"},
			ingress: []string{},
		},
		"address ranges": {
			specs:   []string{web + "ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}, {ipBlock: {cidr: 'fd00::/8'}}]}]"},
			ingress: []string{"ip saddr 10.0.0.0/8 ip saddr != { 10.1.0.0/16 } accept", "ip6 saddr fd00::/8 accept"},
		},
		"exceptions that overlap": {
			specs:   []string{web + "ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.3.1.0/24, 10.1.0.0/16, 10.1.2.0/24]}}]}]"},
			ingress: []string{"ip saddr 10.0.0.0/8 ip saddr != { 10.1.0.0/16, 10.3.1.0/24 } accept"},
		},
		"an exception in a notation that cannot be enforced": {
			specs: []string{
				web + "ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: ['::ffff:10.1.0.0/112']}}]}]",
				web + "ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [010.1.0.0/16]}}]}]",
				web + "ingress: [{from: [{ipBlock: {cidr: '::ffff:10.1.0.0/112'}}]}]",
				web + "ingress: [{ports: [{port: 1}]}]",
			},
			ingress: []string{"tcp dport 1 accept"},
		},
		"ports": {
			specs:   []string{web + "ingress: [{ports: [{port: 80}, {port: 53, protocol: UDP}, {port: 100, endPort: 200}, {protocol: SCTP}]}]"},
			ingress: []string{"meta l4proto sctp accept", "tcp dport 100-200 accept", "tcp dport 80 accept", "udp dport 53 accept"},
		},
		"a named port of the selected pod": {
			specs:   []string{web + "ingress: [{ports: [{port: main}]}]"},
			ingress: []string{"ip daddr . tcp dport { 10.0.0.1 . 8080 } accept", "ip6 daddr . tcp dport { fd00::1 . 8080 } accept"},
		},
		"a named port that the pod lacks": {
			specs:   []string{web + "ingress: [{ports: [{port: absent}]}]"},
			ingress: []string{},
		},
		"families do not mix": {
			specs:   []string{web + "ingress: [{from: [{podSelector: {matchLabels: {app: db}}}], ports: [{port: main}]}]"},
			ingress: []string{"ip saddr { 10.0.0.2 } ip daddr . tcp dport { 10.0.0.1 . 8080 } accept"},
		},
		"egress alone": {
			specs:  []string{web + "policyTypes: [Egress]\negress: [{to: [{podSelector: {matchLabels: {app: db}}}], ports: [{port: main}]}]"},
			egress: []string{"ip daddr { 10.0.0.2 } ip daddr . tcp dport { 10.0.0.1 . 8080, 10.0.0.2 . 5432, 10.0.0.3 . 9090, 10.0.1.1 . 7070 } accept"},
		},
		"egress rules without types isolate both directions": {
			specs:   []string{web + "egress: [{}]"},
			ingress: []string{}, egress: []string{"accept"},
		},
		"policies add up": {
			specs:   []string{web + "ingress: [{ports: [{port: 1}]}]", "podSelector: {}\ningress: [{ports: [{port: 2}]}]"},
			ingress: []string{"tcp dport 1 accept", "tcp dport 2 accept"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			chains, tooLarge := Chains(Cluster{Policies: policies(t, test.specs...), Pods: podObjects, Namespaces: namespaces}, "n")
			if len(tooLarge) > 0 {
				t.Errorf("too large: %v", tooLarge)
			}
			for direction, want := range map[string][]string{Ingress: test.ingress, Egress: test.egress} {
				isolated := slices.ContainsFunc(chains, func(c Chain) bool { return c.Name == direction })
				if isolated != (want != nil) {
					t.Errorf("%s: pods are isolated: %v", direction, isolated)
				}
				if diff := cmp.Diff(want, accepted(chains, direction), cmp.Transformer("length", func(s []string) []string { return append([]string{}, s...) })); want != nil && diff != "" {
					t.Errorf("%s rules (-want +got):\n%s", direction, diff)
				}
			}
			again := slices.Clone(podObjects)
			slices.Reverse(again)
			other, _ := Chains(Cluster{Policies: policies(t, test.specs...), Pods: again, Namespaces: namespaces}, "n")
			if diff := cmp.Diff(chains, other); diff != "" {
				t.Errorf("the rules depend on the order of objects:\n%s", diff)
			}
		})
	}
}

// accepted returns the rules of all policies in a direction.
func accepted(chains []Chain, direction string) (rules []string) {
	for _, c := range chains {
		if strings.HasPrefix(c.Name, direction+"-") && !strings.HasPrefix(c.Name, direction+"-pods-") {
			rules = append(rules, c.Rules...)
		}
	}
	slices.Sort(rules)
	return rules
}

// TestIsolatedPods checks the path of a packet: it goes from the base chain to the policies of its pod and ends there.
func TestIsolatedPods(t *testing.T) {
	chains, _ := Chains(Cluster{Policies: policies(t, "podSelector: {}"), Pods: podObjects, Namespaces: namespaces}, "n")
	if len(chains) != 3 {
		t.Fatalf("%d chains, want the base chain, one of the pods, and one of the policy: %v", len(chains), chains)
	}
	policy, selected := chains[1].Name, chains[2].Name
	if strings.Contains(policy, "pods") {
		policy, selected = selected, policy
	}
	want := []string{
		"ct state established,related accept",
		"ip saddr . ip daddr { 10.0.0.1 . 10.0.0.1, 10.0.0.2 . 10.0.0.2 } accept",
		"ip daddr vmap { 10.0.0.1 : jump " + selected + ", 10.0.0.2 : jump " + selected + " }",
		"ip6 saddr . ip6 daddr { fd00::1 . fd00::1 } accept",
		"ip6 daddr vmap { fd00::1 : jump " + selected + " }",
	}
	if diff := cmp.Diff(want, chains[0].Rules); diff != "" {
		t.Errorf("base chain (-want +got):\n%s", diff)
	}
	for _, c := range chains[1:] {
		if c.Name == selected && !slices.Equal(c.Rules, []string{"jump " + policy, "drop"}) {
			t.Errorf("chain of the pods: %v", c.Rules)
		}
	}
}

// TestTooLarge: a policy whose rules would use up the memory of the machine allows nothing. Its pods are isolated, and all other policies
// have their effect, also those of the same namespace.
func TestTooLarge(t *testing.T) {
	var blocks []networkingv1.NetworkPolicyPeer
	var ports []networkingv1.NetworkPolicyPort
	for i := range 1000 {
		blocks = append(blocks, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: fmt.Sprintf("10.%d.%d.0/24", i/256, i%256)}})
		ports = append(ports, networkingv1.NetworkPolicyPort{Port: ptr.To(intstr.FromInt32(int32(i + 1)))})
	}
	many := []*corev1.Pod{}
	for i := range 2000 {
		many = append(many, podObject("shop", "db", "n", 5432, fmt.Sprintf("10.9.%d.%d", i/256, i%256)))
	}
	rules := func(n int, r networkingv1.NetworkPolicyIngressRule) (out []networkingv1.NetworkPolicyIngressRule) {
		return slices.Repeat([]networkingv1.NetworkPolicyIngressRule{r}, n)
	}
	everyPod := []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}
	named := []networkingv1.NetworkPolicyPort{{Port: ptr.To(intstr.FromString("main"))}}
	var nothing []networkingv1.NetworkPolicyPeer
	var names []networkingv1.NetworkPolicyPort
	expressions := &metav1.LabelSelector{}
	for i := range 6000 {
		expression := metav1.LabelSelectorRequirement{Key: fmt.Sprint("absent-", i), Operator: metav1.LabelSelectorOpDoesNotExist}
		expressions.MatchExpressions = append(expressions.MatchExpressions, expression)
		nothing = append(nothing, networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprint(i)}}})
		names = append(names, networkingv1.NetworkPolicyPort{Port: ptr.To(intstr.FromString(fmt.Sprint("p", i)))})
	}
	for name, ingress := range map[string][]networkingv1.NetworkPolicyIngressRule{
		"selectors without matches":    rules(1, networkingv1.NetworkPolicyIngressRule{From: nothing}),
		"a selector with requirements": rules(1, networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{{PodSelector: expressions}}}),
		"names that no port has":       rules(1, networkingv1.NetworkPolicyIngressRule{Ports: names}),
		"blocks and ports":             rules(1, networkingv1.NetworkPolicyIngressRule{From: blocks, Ports: ports}),
		"rules for all pods":           rules(1000, networkingv1.NetworkPolicyIngressRule{From: everyPod}),
		"rules for a named port":       rules(1000, networkingv1.NetworkPolicyIngressRule{Ports: named}),
		"all pods, for many ports":     rules(1, networkingv1.NetworkPolicyIngressRule{From: everyPod, Ports: ports}),
	} {
		t.Run(name, func(t *testing.T) {
			all := policies(t, "podSelector: {matchLabels: {app: db}}", "podSelector: {}\ningress: [{ports: [{port: 2}]}]")
			all[0].Spec.Ingress = ingress
			chains, tooLarge := Chains(Cluster{Policies: all, Pods: append(many, podObjects...), Namespaces: namespaces}, "n")
			if !slices.Equal(tooLarge, []string{"shop/a"}) {
				t.Errorf("too large: %v", tooLarge)
			}
			if diff := cmp.Diff([]string{"tcp dport 2 accept"}, accepted(chains, Ingress)); diff != "" {
				t.Errorf("rules (-want +got):\n%.2000s", diff)
			}
		})
	}
}

// TestManyPolicies: policies without rules need jumps, and their selectors comparisons. A pod of a policy without room for them is isolated.
func TestManyPolicies(t *testing.T) {
	const pods = 100
	var local []*corev1.Pod
	for i := range pods {
		local = append(local, podObject("shop", fmt.Sprint("app-", i), "n", 80, fmt.Sprintf("10.9.0.%d", i)))
	}
	var expensive []metav1.LabelSelectorRequirement
	for i := range 15_000 {
		expensive = append(expensive, metav1.LabelSelectorRequirement{Key: fmt.Sprint("absent-", i), Operator: metav1.LabelSelectorOpDoesNotExist})
	}
	for name, selector := range map[string]metav1.LabelSelector{"without rules": {}, "with a large selector": {MatchExpressions: expensive}} {
		var all []*networkingv1.NetworkPolicy
		for i := range 10_000 {
			p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprintf("p-%05d", i)}}
			p.Spec.PodSelector, p.Spec.PolicyTypes = selector, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
			if i < pods { // A set of its own for each pod
				p.Spec.PodSelector = metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprint("app-", i)}}
			}
			all = append(all, p)
		}
		// Policies of other namespaces are enforced.
		other := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "other"}}
		other.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{Ports: []networkingv1.NetworkPolicyPort{{Port: ptr.To(intstr.FromInt32(2))}}}}
		chains, tooLarge := Chains(Cluster{Policies: append(all, other), Pods: append(local, podObject("team", "web", "n", 80, "10.8.0.1"))}, "n")
		rules := 0
		for _, c := range chains {
			rules += len(c.Rules)
		}
		if rules > maxElements+2*pods+10 || len(tooLarge) < 4000 || slices.Contains(tooLarge, "team/other") {
			t.Errorf("%s: %d rules, %d policies are too large", name, rules, len(tooLarge))
		}
		if got := accepted(chains, Ingress); !slices.Equal(got, []string{"tcp dport 2 accept"}) {
			t.Errorf("%s: accepted %.200v", name, got)
		}
		for _, c := range chains {
			if c.Name == Ingress && !strings.Contains(strings.Join(c.Rules, "\n"), "10.9.0.99 : jump ") {
				t.Errorf("%s: the last pod is not isolated", name)
			}
		}
	}
}

// A policy whose selector is too much isolates all pods of its namespace on the node, and no others.
func TestSelectorTooLarge(t *testing.T) {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a"}}
	for i := range maxComparisons/2 + 1 {
		p.Spec.PodSelector.MatchExpressions = append(p.Spec.PodSelector.MatchExpressions, metav1.LabelSelectorRequirement{Key: fmt.Sprint(i)})
	}
	chains, tooLarge := Chains(Cluster{Policies: []*networkingv1.NetworkPolicy{p}, Pods: []*corev1.Pod{
		podObject("shop", "db", "n", 80, "10.9.0.1"), podObject("team", "db", "n", 80, "10.9.0.2"), podObject("shop", "db", "elsewhere", 80, "10.9.0.3"),
	}}, "n")
	want := []Chain{
		{Ingress, []string{"ct state established,related accept", "ip saddr . ip daddr { 10.9.0.1 . 10.9.0.1 } accept", "ip daddr vmap { 10.9.0.1 : jump ingress-pods-" + hash() + " }"}},
		{"ingress-pods-" + hash(), []string{"drop"}},
	}
	if diff := cmp.Diff(want, chains); diff != "" || !slices.Equal(tooLarge, []string{"shop/a"}) {
		t.Errorf("too large: %v, chains (-want +got):\n%s", tooLarge, diff)
	}
}

// TestApply: the kernel accepts every kind of rule. The table is removed with the last policy.
func TestApply(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	all := policies(t, `
podSelector: {}
policyTypes: [Ingress, Egress]
ingress: [{from: [{podSelector: {}}, {ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}, {ipBlock: {cidr: 10.0.0.0/8, except: ['::ffff:10.1.0.0/112']}},
  {ipBlock: {cidr: 0.0.0.0/0}}, {ipBlock: {cidr: '::/0'}}], ports: [{port: main}, {port: 100, endPort: 200}, {protocol: SCTP}]}]
egress: [{to: [{namespaceSelector: {}}], ports: [{port: main}, {port: 53, protocol: UDP}]}, {}]`)
	block := &networkingv1.IPBlock{CIDR: "10.0.0.0/8"}
	for i := range 1000 { // The kernel takes 128 expressions in a rule.
		block.Except = append(block.Except, fmt.Sprintf("10.%d.%d.1/32", i/256, i%256))
	}
	all[0].Spec.Egress[0].To = append(all[0].Spec.Egress[0].To, networkingv1.NetworkPolicyPeer{IPBlock: block})
	for range 2 {
		chains, _ := Chains(Cluster{Policies: all, Pods: podObjects, Namespaces: namespaces}, "n")
		if err := Apply(t.Context(), chains); err != nil {
			t.Fatal(err)
		}
	}
	ruleset := func() string {
		out, err := exec.CommandContext(t.Context(), "nft", "list", "ruleset").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if got := ruleset(); !strings.Contains(got, "hook forward") || !strings.Contains(got, "10.0.0.1 . 8080") {
		t.Errorf("rules: %s", got)
	}
	if err := Apply(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if got := ruleset(); strings.TrimSpace(got) != "" {
		t.Errorf("the table remains: %s", got)
	}
}

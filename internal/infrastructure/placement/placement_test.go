package placement_test

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

const gib = 1 << 30

// option changes a host.
type option func(*placement.Host)

func host(name string, options ...option) placement.Host {
	h := placement.Host{Name: name, FailureDomain: name, Versions: []string{"v1.36.3"}, ControlPlane: true, CPUs: 4, FreeMemory: 8 * gib}
	for _, change := range options {
		change(&h)
	}
	return h
}

func domain(name string) option        { return func(h *placement.Host) { h.FailureDomain = name } }
func members(n int) option             { return func(h *placement.Host) { h.Members = n } }
func outdated(n int) option            { return func(h *placement.Host) { h.Outdated = n } }
func freeCPUs(n int32) option          { return func(h *placement.Host) { h.FreeCPUs = n } }
func freeMemory(bytes int64) option    { return func(h *placement.Host) { h.FreeMemory = bytes } }
func freeDisk(bytes int64) option      { return func(h *placement.Host) { h.FreeDisk = bytes } }
func disk(bytes int64) option          { return func(h *placement.Host) { h.Disk = bytes } }
func box(id string) option             { return func(h *placement.Host) { h.Box = id } }
func tunnel(address string) option     { return func(h *placement.Host) { h.Tunnel = address } }
func images(names ...string) option    { return func(h *placement.Host) { h.Images = names } }
func badImages(names ...string) option { return func(h *placement.Host) { h.BadImages = names } }
func unavailable(why string) option    { return func(h *placement.Host) { h.Unavailable = why } }
func encrypted(h *placement.Host)      { h.Encrypted = true }
func noVersions(h *placement.Host)     { h.Versions = nil }
func workersOnly(h *placement.Host)    { h.ControlPlane = false }

// tainted adds taints in the notation of kubectl.
func tainted(taints ...string) option {
	return func(h *placement.Host) {
		for _, text := range taints {
			what, effect, _ := strings.Cut(text, ":")
			key, value, _ := strings.Cut(what, "=")
			h.Taints = append(h.Taints, infrav1.HostTaint{Key: key, Value: value, Effect: infrav1.HostTaintEffect(effect)})
		}
	}
}

func tolerates(key string, operator infrav1.HostTolerationOperator, value string, effect infrav1.HostTaintEffect) placement.Request {
	return placement.Request{Tolerations: []infrav1.HostToleration{{Key: key, Operator: operator, Value: value, Effect: effect}}}
}

// in puts a host with members into a failure domain.
func in(failureDomain, name string, n int) placement.Host {
	return host(name, domain(failureDomain), members(n))
}

// choice is a call of Choose and its result.
type choice struct {
	hosts []placement.Host
	req   placement.Request
	want  string
	why   string // part of the error
}

func testChoose(t *testing.T, choices map[string]choice) {
	t.Helper()
	for name, tc := range choices {
		t.Run(name, func(t *testing.T) {
			got, err := placement.Choose(tc.hosts, tc.req)
			if got != tc.want || (tc.why == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tc.why) {
				t.Errorf("Choose: got %q, %v; want %q, %q", got, err, tc.want, tc.why)
			}
		})
	}
}

// IM-02: hosts that can run a machine are ordered by the spread over failure domains and hosts, then by free processors, memory and
// disk, then by name.
func TestOrder_IM02(t *testing.T) {
	testChoose(t, map[string]choice{
		"most free memory": {
			hosts: []placement.Host{host("a"), host("b", freeMemory(9*gib))},
			want:  "b",
		},
		"free processors before memory": {
			hosts: []placement.Host{host("a", freeMemory(9*gib)), host("b", freeCPUs(1))},
			want:  "b",
		},
		"more machines than processors": {
			hosts: []placement.Host{host("a", freeCPUs(-2)), host("b", freeCPUs(-1))},
			want:  "b",
		},
		"memory before disk": {
			hosts: []placement.Host{host("a", freeDisk(gib)), host("b", freeMemory(9*gib))},
			want:  "b",
		},
		"most free disk among equals": {
			hosts: []placement.Host{host("a", freeDisk(-gib)), host("b")}, want: "b",
		},
		"a worker goes to the emptier failure domain": {
			hosts: []placement.Host{in("x", "a", 0), in("x", "b", 2), in("y", "c", 1)}, want: "c",
		},
		"a worker goes to the emptier host of equal failure domains": {
			hosts: []placement.Host{in("x", "a", 2), in("x", "b", 0), in("y", "c", 2)}, want: "b",
		},
		"members on hosts that cannot run it count for their failure domain": {
			hosts: []placement.Host{in("x", "a", 0), host("b", domain("x"), members(1), unavailable("is unschedulable")), in("y", "c", 0)},
			want:  "c",
		},
		"a control plane machine goes to the emptier failure domain": {
			hosts: []placement.Host{in("x", "a", 1), in("x", "b", 0), in("y", "c", 0)}, req: placement.Request{ControlPlane: true}, want: "c",
		},
		"a control plane machine rather shares a failure domain than a host": {
			hosts: []placement.Host{in("x", "a", 1), in("x", "b", 1), in("x", "c", 0), in("y", "d", 1)}, req: placement.Request{ControlPlane: true}, want: "c",
		},
		"a control plane machine shares a host if there is no other": {
			hosts: []placement.Host{in("x", "a", 2), in("y", "b", 1), host("c", unavailable("is unschedulable"))},
			req:   placement.Request{ControlPlane: true}, want: "b",
		},
		"an outdated machine does not count as one that stays": {
			hosts: []placement.Host{in("x", "a", 1), host("b", domain("y"), outdated(1)), host("c", domain("z"), members(1))}, req: placement.Request{ControlPlane: true}, want: "b",
		},
		"an outdated machine counts among equals, for its failure domain and its host": {
			hosts: []placement.Host{host("a", domain("x"), outdated(1)), in("x", "b", 0), in("y", "c", 0)}, req: placement.Request{ControlPlane: true}, want: "c",
		},
		"the host without an outdated machine": {
			hosts: []placement.Host{host("a", domain("x"), outdated(1)), in("x", "b", 0)}, req: placement.Request{ControlPlane: true}, want: "b",
		},
		"the failure domain of the Machine before the spread": {
			hosts: []placement.Host{in("x", "a", 3), in("y", "b", 0)}, req: placement.Request{ControlPlane: true, FailureDomain: "x"}, want: "a",
		},
		"first name among equals": {hosts: []placement.Host{host("b"), host("a")}, want: "a"},
		"fewest members before memory": {
			hosts: []placement.Host{host("a", members(1), freeMemory(9*gib)), host("b")}, want: "b",
		},
	})
}

// IM-02: a host must match in failure domain, network, version, image, schedulability, control plane and size.
func TestRequirements_IM02(t *testing.T) {
	testChoose(t, map[string]choice{
		"no host": {why: "no CapstanHost admits this namespace"},
		"failure domain before memory": {
			hosts: []placement.Host{host("a"), host("b", freeMemory(9*gib))},
			req:   placement.Request{FailureDomain: "a"}, want: "a",
		},
		"never outside of the failure domain": {
			hosts: []placement.Host{host("a")}, req: placement.Request{FailureDomain: "b"}, why: "a is in failure domain a, not b",
		},
		"never on another box than the load balancer's": {
			hosts: []placement.Host{host("a", box("other"), freeMemory(9*gib)), host("b", box("one"))},
			req:   placement.Request{Box: "one"}, want: "b",
		},
		"a cluster's network does not leave its box": {
			hosts: []placement.Host{host("a", box("other"))}, req: placement.Request{Box: "one"},
			why: "a is on another box than the cluster's load balancer",
		},
		"an overlay reaches other boxes": {
			hosts: []placement.Host{host("a", box("other"), tunnel("192.0.2.2"))},
			req:   placement.Request{Box: "one", Overlay: true, Tunnel: "192.0.2.1"}, want: "a",
		},
		"an overlay needs a tunnel address, also on the box": {
			hosts: []placement.Host{host("a", box("one"))},
			req:   placement.Request{Box: "one", Overlay: true, Tunnel: "192.0.2.1"}, why: `a does not reach the cluster's network: its spec.tunnelAddress is ""`,
		},
		"an encrypted overlay": {
			hosts: []placement.Host{host("a", tunnel("192.0.2.2")), host("b", tunnel("192.0.2.3"), encrypted)},
			req:   placement.Request{Overlay: true, Tunnel: "192.0.2.1", Encrypted: true}, want: "b",
		},
		"an encrypted overlay needs a host that encrypts": {
			hosts: []placement.Host{host("a", tunnel("192.0.2.2"))},
			req:   placement.Request{Overlay: true, Tunnel: "192.0.2.1", Encrypted: true}, why: "a does not reach the cluster's network: it does not encrypt its overlays",
		},
		"an overlay that is not encrypted needs a host that does not": {
			hosts: []placement.Host{host("a", tunnel("192.0.2.2"), encrypted)},
			req:   placement.Request{Overlay: true, Tunnel: "192.0.2.1"}, why: "a does not reach the cluster's network: it encrypts its overlays",
		},
		"an overlay of one family": {
			hosts: []placement.Host{host("a", tunnel("2001:db8::1"))},
			req:   placement.Request{Overlay: true, Tunnel: "192.0.2.1"}, why: "of one IP family",
		},
		"the load balancer's host is missing": {
			hosts: []placement.Host{host("a", tunnel("192.0.2.2"))}, req: placement.Request{Overlay: true}, why: "a does not reach the cluster's network: the CapstanHost of spec.loadBalancer.hostName",
		},
		"without an overlay a tunnel address does not matter": {
			hosts: []placement.Host{host("a", box("other"), tunnel("192.0.2.2"))},
			req:   placement.Request{Box: "one", Tunnel: "192.0.2.1"}, why: "a is on another box",
		},
		"a host that does not tell its box": {hosts: []placement.Host{host("a")}, req: placement.Request{Box: "one"}, want: "a"},
		"version": {
			hosts: []placement.Host{host("a")}, req: placement.Request{Version: "v1.35.0"},
			why: "a cannot run Kubernetes v1.35.0 (it has v1.36.3)",
		},
		"an image": {
			hosts: []placement.Host{host("a"), host("b", images("host", "debian"))},
			req:   placement.Request{Image: "debian"}, want: "b",
		},
		"an image that no host has": {
			hosts: []placement.Host{host("a", images("host")), host("b", badImages("debian"))},
			req:   placement.Request{Image: "debian"}, why: "a has no image debian (it has host); b cannot use its image debian: see status.images of the CapstanHost",
		},
		"version before memory": {
			hosts: []placement.Host{host("a"), host("b", noVersions, freeMemory(9*gib))},
			req:   placement.Request{Version: "v1.36.3"}, want: "a",
		},
		"unavailable": {
			hosts: []placement.Host{host("a", unavailable("is unschedulable"))}, why: "a is unschedulable",
		},
		"control plane": {
			hosts: []placement.Host{host("a", workersOnly, freeMemory(9*gib)), host("b")},
			req:   placement.Request{ControlPlane: true}, want: "b",
		},
		"workers go anywhere": {
			hosts: []placement.Host{host("a", workersOnly)}, want: "a",
		},
		"image":      {hosts: []placement.Host{host("a")}, req: placement.Request{Image: "debian-12"}, why: "a has no image debian-12 (it has none)"},
		"processors": {hosts: []placement.Host{host("a")}, req: placement.Request{CPUs: 8}, why: "a has 4 processors, 8 are needed"},
		"disk": {
			hosts: []placement.Host{host("a", disk(10*gib)), host("b", disk(20*gib)), host("c", disk(11*gib))},
			req:   placement.Request{Disk: 20 * gib}, want: "b",
		},
		"larger than every disk": {
			hosts: []placement.Host{host("a", disk(10*gib))}, req: placement.Request{Disk: 20 * gib}, why: "a has a disk of 10Gi, 20Gi are needed",
		},
		"unknown disk": {hosts: []placement.Host{host("a")}, req: placement.Request{Disk: 20 * gib}, want: "a"},
		"memory":       {hosts: []placement.Host{host("a")}, req: placement.Request{Memory: 9 * gib}, why: "a has 8Gi of memory left, 9Gi are needed"},
		"memory that just fits": {
			hosts: []placement.Host{host("a")}, req: placement.Request{Memory: 8 * gib}, want: "a",
		},
		"every host says why": {
			hosts: []placement.Host{host("b"), host("a", unavailable("is not connected"))},
			req:   placement.Request{Memory: 9 * gib}, why: "a is not connected; b has 8Gi",
		},
	})
}

// IM-02: a machine goes only to a host whose taints it tolerates, and rather to one without taints that it does not tolerate.
func TestTolerations_IM02(t *testing.T) {
	testChoose(t, map[string]choice{
		"taint": {
			hosts: []placement.Host{host("a", tainted("gpu=yes:NoSchedule"))}, why: "a has the taint gpu=yes:NoSchedule, which spec.hostTolerations does not tolerate",
		},
		"taint before memory": {
			hosts: []placement.Host{host("a", tainted("gpu:NoSchedule")), host("b", freeMemory(gib))}, want: "b",
		},
		"tolerated key and value":   {hosts: []placement.Host{host("a", tainted("gpu=yes:NoSchedule"))}, req: tolerates("gpu", "", "yes", ""), want: "a"},
		"tolerated key":             {hosts: []placement.Host{host("a", tainted("gpu=yes:NoSchedule"))}, req: tolerates("gpu", "Exists", "", ""), want: "a"},
		"everything tolerated":      {hosts: []placement.Host{host("a", tainted("gpu=yes:NoSchedule", "x:NoSchedule"))}, req: tolerates("", "Exists", "", ""), want: "a"},
		"empty value tolerated":     {hosts: []placement.Host{host("a", tainted("gpu:NoSchedule"))}, req: tolerates("gpu", "Equal", "", ""), want: "a"},
		"tolerated effect":          {hosts: []placement.Host{host("a", tainted("gpu:NoSchedule"))}, req: tolerates("gpu", "", "", "NoSchedule"), want: "a"},
		"another value tolerated":   {hosts: []placement.Host{host("a", tainted("gpu=yes:NoSchedule"))}, req: tolerates("gpu", "Equal", "no", ""), why: "gpu=yes:NoSchedule"},
		"no value tolerated":        {hosts: []placement.Host{host("a", tainted("gpu=yes:NoSchedule"))}, req: tolerates("gpu", "", "", ""), why: "gpu=yes:NoSchedule"},
		"another key tolerated":     {hosts: []placement.Host{host("a", tainted("gpu:NoSchedule"))}, req: tolerates("cpu", "Exists", "", ""), why: "gpu:NoSchedule"},
		"another effect tolerated":  {hosts: []placement.Host{host("a", tainted("gpu:NoSchedule"))}, req: tolerates("gpu", "Exists", "", "PreferNoSchedule"), why: "gpu:NoSchedule"},
		"one of two tolerated":      {hosts: []placement.Host{host("a", tainted("gpu:NoSchedule", "x:NoSchedule"))}, req: tolerates("gpu", "Exists", "", ""), why: "x:NoSchedule"},
		"load balancers":            {hosts: []placement.Host{host("a", tainted("gpu:NoSchedule"))}, req: placement.Request{AnyTaint: true}, want: "a"},
		"preferably not":            {hosts: []placement.Host{host("a", tainted("old:PreferNoSchedule")), host("b", members(2), freeMemory(gib))}, want: "b"},
		"preferably not, tolerated": {hosts: []placement.Host{host("a", tainted("old:PreferNoSchedule")), host("b", members(2))}, req: tolerates("old", "Exists", "", ""), want: "a"},
		"preferably not, but the only one": {
			hosts: []placement.Host{host("a", tainted("old:PreferNoSchedule")), host("b", freeMemory(0))}, req: placement.Request{Memory: gib}, want: "a",
		},
		"control planes are apart before they avoid a host": {
			hosts: []placement.Host{host("a", tainted("old:PreferNoSchedule")), host("b", members(1))},
			req:   placement.Request{ControlPlane: true}, want: "a",
		},
	})
}

// ALL-18
func TestAdmits_ALL18(t *testing.T) {
	team := &metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}}
	for name, tc := range map[string]struct {
		allowed *infrav1.AllowedNamespaces
		labels  map[string]string
		want    bool
	}{
		"all when not set":    {want: true},
		"by name":             {allowed: &infrav1.AllowedNamespaces{Names: []string{"x", "ns"}}, want: true},
		"not by another name": {allowed: &infrav1.AllowedNamespaces{Names: []string{"x"}}},
		"by label":            {allowed: &infrav1.AllowedNamespaces{Selector: team}, labels: map[string]string{"team": "a"}, want: true},
		"not by label":        {allowed: &infrav1.AllowedNamespaces{Selector: team}, labels: map[string]string{"team": "b"}},
		"either is enough":    {allowed: &infrav1.AllowedNamespaces{Names: []string{"ns"}, Selector: team}, want: true},
		"empty selector: all": {allowed: &infrav1.AllowedNamespaces{Selector: &metav1.LabelSelector{}}, want: true},
		"empty: none":         {allowed: &infrav1.AllowedNamespaces{}},
		"invalid selector: none": {allowed: &infrav1.AllowedNamespaces{Selector: &metav1.LabelSelector{
			MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Is"}},
		}}},
	} {
		t.Run(name, func(t *testing.T) {
			h := &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{AllowedNamespaces: tc.allowed}}
			if got := placement.Admits(h, "ns", tc.labels); got != tc.want {
				t.Errorf("Admits: %v", got)
			}
		})
	}
}

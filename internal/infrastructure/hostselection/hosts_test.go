package hostselection

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

func newScheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, infrav1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	return scheme
}

// TestEndpointsOfOtherHosts: a host without virtual addresses gives no machine the endpoint of a cluster on another host of the LAN. Other LANs
// can have the same addresses.
func TestEndpointsOfOtherHosts(t *testing.T) {
	host := func(name, lan string, virtual ...string) *infrav1.CapstanHost {
		return &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanHostSpec{
			VirtualAddresses: virtual, LANNetworks: []infrav1.LANNetwork{{Name: lan, CIDR: "192.0.2.0/24", Addresses: []string{"192.0.2.0/24"}, AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{"team"}}}},
		}}
	}
	machines := host("machines", "lab")
	c := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team"}}, machines, host("endpoints", "lab", "192.0.2.16/28"), host("elsewhere", "office", "192.0.2.32/28"),
	).Build()
	m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "team"}}
	cluster := &infrav1.CapstanCluster{}
	cluster.Spec.Network.LAN.Name = "lab"
	permissions, err := Permissions(t.Context(), c, m, cluster, []infrav1.CapstanHost{*machines})
	if err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]string{"192.0.2.17": "keeps the address 192.0.2.17 for the endpoints of clusters", "192.0.2.33": ""} {
		why := permissions["machines"].LANRefusal("team", placement.LAN{Name: "lab", CIDR: "192.0.2.0/24", Addresses: []string{address}})
		if (why != "") != (want != "") || !strings.Contains(why, want) {
			t.Errorf("%s: %q, want %q", address, why, want)
		}
	}
}

// TestUsable_ALL18: a list of hosts, and the question for one host, have the same answer.
func TestUsable_ALL18(t *testing.T) {
	host := func(name string, change func(*infrav1.CapstanHost)) client.Object {
		h := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"rack": "a"}}}
		change(h)
		return h
	}
	admits := func(a infrav1.AllowedNamespaces) func(*infrav1.CapstanHost) {
		return func(h *infrav1.CapstanHost) { h.Spec.AllowedNamespaces = &a }
	}
	c := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team", Labels: map[string]string{"team": "yes"}}},
		host("z-open", func(*infrav1.CapstanHost) {}),
		host("abandoned", func(h *infrav1.CapstanHost) { h.Annotations = map[string]string{infrav1.HostAbandonedAnnotation: ""} }),
		host("by-label", admits(infrav1.AllowedNamespaces{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "yes"}}})),
		host("by-name", admits(infrav1.AllowedNamespaces{Names: []string{"team"}})),
		host("for-others", admits(infrav1.AllowedNamespaces{Names: []string{"other"}})),
		host("other-label", admits(infrav1.AllowedNamespaces{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "no"}}})),
		host("other-rack", func(h *infrav1.CapstanHost) { h.Labels["rack"] = "b" }),
	).Build()
	selectors := []*metav1.LabelSelector{nil, {MatchLabels: map[string]string{"rack": "a"}}}
	usable, err := Usable(t.Context(), c, "team", selectors...)
	var names []string
	for _, h := range usable {
		names = append(names, h.Name)
	}
	if want := []string{"by-label", "by-name", "z-open"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("got %v, %v, want %v", names, err, want)
	}
	for _, name := range []string{"abandoned", "by-label", "by-name", "for-others", "other-label", "other-rack", "z-open", "missing"} {
		one, err := UsableHost(t.Context(), c, name, "team", selectors...)
		if err != nil || len(one) == 1 != slices.Contains(names, name) || len(one) == 1 && one[0].Name != name {
			t.Errorf("host %s: got %v, %v", name, one, err)
		}
	}
}

// The machines of a cluster across hosts still have hosts after the CapstanHost of its load balancer was deleted: the network has
// the IP family and the encryption of another host of the cluster.
func TestWithin(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	host := func(name, tunnel, key string) *infrav1.CapstanHost {
		h := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanHostSpec{TunnelAddress: tunnel}}
		h.Status.BoxID, h.Status.OverlayPublicKey = "box-"+name, key
		return h
	}
	second := host("second", "2001:db8::2", "key")
	for name, tc := range map[string]struct {
		hosts []*infrav1.CapstanHost
		vni   int32
		want  placement.Request
	}{
		"the load balancer's host decides": {
			[]*infrav1.CapstanHost{host("first", "192.0.2.1", ""), second}, 5000,
			placement.Request{Overlay: true, Box: "box-first", Tunnel: "192.0.2.1"},
		},
		"it does not exist": {
			[]*infrav1.CapstanHost{second}, 5000, placement.Request{Overlay: true, Box: "box-second", Tunnel: "2001:db8::2", Encrypted: true},
		},
		"no host of the cluster exists":                {[]*infrav1.CapstanHost{host("other", "192.0.2.3", "")}, 5000, placement.Request{Overlay: true}},
		"the network of one box does not leave it":     {[]*infrav1.CapstanHost{host("first", "", ""), second}, 0, placement.Request{Box: "box-first"}},
		"one box, the load balancer's host is missing": {[]*infrav1.CapstanHost{second}, 0, placement.Request{}},
	} {
		b := fake.NewClientBuilder().WithScheme(scheme)
		for _, h := range tc.hosts {
			b.WithObjects(h.DeepCopy())
		}
		c := &infrav1.CapstanCluster{}
		c.Spec.LoadBalancer.HostName, c.Spec.Network.Overlay.VNI = "first", tc.vni
		c.Spec.LoadBalancerHosts = []infrav1.LoadBalancerHost{{Name: "first"}, {Name: "gone"}, {Name: "second"}}
		got, err := Within(t.Context(), b.Build(), connections.NewPool(t.Context(), nil), c)
		if err != nil || !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: got %+v, %v, want %+v", name, got, err, tc.want)
		}
	}
}

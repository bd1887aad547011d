package services

import (
	"fmt"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/keymutex"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/testenv/expect"
)

// A host can report any lists of Services. The manager sends requests only for networks of its own clusters, one for each, and a bounded number
// in one attempt.
func TestInventedServices_ALL18(t *testing.T) {
	const self = "self"
	clusters := []client.Object{}
	for n := range maxWithdrawals + 1 {
		c := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprint("c-", n)}}
		c.Spec.ID = fmt.Sprint("id-", n)
		clusters = append(clusters, c)
	}
	list := func(id, namespace, name string) *hostpb.SetServicesRequest {
		services := []*hostpb.PublishedService{{Name: "default/web", Address: "203.0.113.5"}}
		return &hostpb.SetServicesRequest{NetworkId: id, Namespace: namespace, Name: name, Services: services}
	}
	known := []*hostpb.SetServicesRequest{}
	for n := range clusters {
		known = append(known, list(fmt.Sprint("id-", n), "a", fmt.Sprint("c-", n)))
	}
	for name, tc := range map[string]struct {
		lists []*hostpb.SetServicesRequest
		want  int
		err   string
	}{
		"of a CapstanCluster":             {lists: known[:1], want: 1},
		"of a machine":                    {lists: []*hostpb.SetServicesRequest{list("m", "b", "gone")}, want: 1},
		"an unknown network":              {lists: []*hostpb.SetServicesRequest{list("x", "a", "c-0")}},
		"the namespace of others":         {lists: []*hostpb.SetServicesRequest{list("id-0", "b", "c-0")}},
		"the machine of others":           {lists: []*hostpb.SetServicesRequest{list("m", "b", "other")}},
		"many names":                      {lists: []*hostpb.SetServicesRequest{known[0], list("id-0", "a", "c-1"), list("id-0", "a", "c-2")}, want: 1},
		"a long name":                     {lists: []*hostpb.SetServicesRequest{list("id-0", "a", strings.Repeat("x", 254))}},
		"more than one attempt withdraws": {lists: known, want: maxWithdrawals, err: "the next attempt continues"},
		"more than a box can have":        {lists: make([]*hostpb.SetServicesRequest, maxLists+1), err: "check capstand"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			server := fakehost.New(t)
			r, host := withdrawing(t, self, server.Address(), clusters...)
			g.Eventually(host.ConnectionError, expect.Patience).Should(Succeed())
			_, err := host.EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{ManagementCluster: self, Spec: &hostpb.MachineSpec{
				Id: "m-1", Namespace: "b", Name: "m-1", Image: "host", KubernetesVersion: "v1.36.3", MemoryBytes: 1 << 30,
				Network:   &hostpb.Network{Id: "m", Namespace: "b", Name: "gone", Cidr: "10.200.0.0/21"},
				Addresses: []*hostpb.Address{{Address: "10.200.0.2", Prefix: 21}},
			}})
			g.Expect(err).NotTo(HaveOccurred())
			server.Invent(tc.lists...)
			_, err = r.Reconcile(t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Name: "h"}})
			if tc.err == "" {
				g.Expect(err).NotTo(HaveOccurred())
			} else {
				g.Expect(err).To(MatchError(ContainSubstring(tc.err)))
			}
			g.Expect(server.Calls("SetServices")).To(Equal(tc.want))
		})
	}
}

// Services are withdrawn again after another manager has published them again: the record of the first withdrawal is older than the host.
func TestWithdrawnAgain(t *testing.T) {
	g := NewWithT(t)
	server := fakehost.New(t)
	c := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "c"}}
	c.Spec.ID = "id"
	r, host := withdrawing(t, "self", server.Address(), c)
	g.Eventually(host.ConnectionError, expect.Patience).Should(Succeed())
	_, err := host.EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{ManagementCluster: "self", Spec: &hostpb.MachineSpec{
		Id: "m-1", Namespace: "a", Name: "m-1", Image: "host", KubernetesVersion: "v1.36.3", MemoryBytes: 1 << 30,
		Network:   &hostpb.Network{Id: "id", Namespace: "a", Name: "c", Cidr: "10.200.0.0/21"},
		Addresses: []*hostpb.Address{{Address: "10.200.0.2", Prefix: 21}},
	}})
	g.Expect(err).NotTo(HaveOccurred())
	_, other := withdrawing(t, "self", server.Address())
	g.Eventually(other.ConnectionError, expect.Patience).Should(Succeed())
	for range 2 {
		_, err = other.PublishServices(t.Context(), &hostpb.SetServicesRequest{
			NetworkId: "id", Namespace: "a", Name: "c", Services: []*hostpb.PublishedService{{
				Name: "default/web", Address: "203.0.113.5", Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_TCP, Port: 80, NodePort: 30080}},
			}},
		})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(server.ServiceAt("id", "203.0.113.5")).NotTo(BeNil())
		_, err = r.Reconcile(t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Name: "h"}})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(server.ServiceAt("id", "203.0.113.5")).To(BeNil())
	}
}

// withdrawing returns a reconciler of a management cluster, and its connection to the host h, which allows no Services.
func withdrawing(t *testing.T, self types.UID, address string, objects ...client.Object) (withdrawal, *connections.Host) {
	t.Helper()
	g, scheme := NewWithT(t), runtime.NewScheme()
	g.Expect(clientgoscheme.AddToScheme(scheme)).To(Succeed())
	g.Expect(infrav1.AddToScheme(scheme)).To(Succeed())
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "h"}, Spec: infrav1.CapstanHostSpec{Address: address}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithObjects(host, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem, UID: self}}).
		WithIndex(&infrav1.CapstanCluster{}, "spec.id", func(o client.Object) []string { return []string{o.(*infrav1.CapstanCluster).Spec.ID} }).Build()
	pool := connections.NewPool(t.Context(), c)
	conn, err := pool.Connect(t.Context(), host)
	g.Expect(err).NotTo(HaveOccurred())
	return withdrawal{&Reconciler{Client: c, Pool: pool, setting: locks{keymutex.NewHashed(lockCount)}}}, conn
}

package services

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	servicehelper "k8s.io/cloud-provider/service/helpers"
	"k8s.io/utils/keymutex"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
)

// site is the cluster demo, whose Services the host h publishes.
type site struct {
	*WithT
	*Reconciler
	t       *testing.T
	fake    *fakehost.Host
	capstan *infrav1.CapstanCluster
	// management and workload are the API servers, without the errors of failing.
	management, workload client.WithWatch
	// failing returns the error of a request to one of them.
	failing func(verb string, o client.Object) error
}

func newSite(t *testing.T) *site {
	t.Helper()
	s, scheme := &site{WithT: NewWithT(t), t: t, fake: fakehost.New(t)}, runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, clusterv1.AddToScheme, capiipamv1.AddToScheme, infrav1.AddToScheme} {
		s.Expect(add(scheme)).To(Succeed())
	}
	_, err := s.fake.EnsureNetwork(t.Context(), &hostpb.Network{Id: "demo-1", Namespace: "a", Name: "demo", Cidr: "10.200.0.0/21"})
	s.Expect(err).NotTo(HaveOccurred())
	h := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "h"}, Spec: infrav1.CapstanHostSpec{
		Address:  s.fake.Address(),
		Services: &infrav1.HostServices{Addresses: []string{"203.0.113.0/24"}, AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{"a"}}},
	}}
	s.capstan = &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "demo"}}
	s.capstan.Spec.ID = "demo-1"
	s.pool("pool")
	s.management = fake.NewClientBuilder().WithScheme(scheme).WithObjects(h, s.capstan, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a"}}).Build()
	s.workload = fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&corev1.Service{}).Build()
	pool := connections.NewPool(t.Context(), s.management)
	conn, err := pool.Connect(t.Context(), h)
	s.Expect(err).NotTo(HaveOccurred())
	s.Eventually(conn.ConnectionError, expect.Patience).Should(Succeed())
	s.Reconciler = &Reconciler{
		Client: s.management, Options: reconciling.Options{LiveClient: s.withErrors(s.management)}, Pool: pool,
		setting: locks{keymutex.NewHashed(lockCount)}, hostTurns: reconciling.FairTurns(50),
	}
	return s
}

// withErrors returns a client whose requests can fail.
func (s *site) withErrors(c client.WithWatch) client.Client {
	fails := func(verb string, o client.Object) error {
		if s.failing == nil {
			return nil
		}
		return s.failing(verb, o)
	}
	return interceptor.NewClient(c, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			o.SetName(key.Name)
			return firstOf(fails("get", o), func() error { return c.Get(ctx, key, o, opts...) })
		},
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			return firstOf(fails("create", o), func() error { return c.Create(ctx, o, opts...) })
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
			return firstOf(fails("patch", o), func() error { return c.Patch(ctx, o, patch, opts...) })
		},
	})
}

func firstOf(err error, f func() error) error {
	if err != nil {
		return err
	}
	return f()
}

// pool sets the pool of the cluster.
func (s *site) pool(name string) {
	s.capstan.Spec.Services.LoadBalancer = &infrav1.ServiceLoadBalancerSpec{
		AddressesFromPool: infrav1.IPPoolReference{APIGroup: "ipam.example.com", Kind: "Pool", Name: name}, HostPorts: ptr.To(true),
	}
}

func (s *site) add(name string, change func(*corev1.Service)) *corev1.Service {
	out := service(func(o *corev1.Service) {
		o.Name, o.UID = name, types.UID("uid-"+name)
		if change != nil {
			change(o)
		}
	})
	s.Expect(s.workload.Create(s.t.Context(), &out)).To(Succeed())
	return &out
}

// begin returns what a reconcile reads.
func (s *site) begin() (*scope, *view) {
	list := &corev1.ServiceList{}
	s.Expect(s.workload.List(s.t.Context(), list)).To(Succeed())
	out := &scope{
		cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "demo"}}, capstan: s.capstan, workload: s.withErrors(s.workload),
		chosen: choose(list.Items, s.capstan.Spec.Services.LoadBalancer), trouble: map[string]string{}, until: time.Now().Add(time.Hour),
		hosts: map[string]*host{"h": {
			name: "h", connected: true, present: true, allowed: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")},
			machines: []machine{{name: "n-1", addresses: []netip.Addr{netip.MustParseAddr("10.200.0.2")}, running: true}},
		}},
	}
	s.Expect(s.readClaims(s.t.Context(), out)).To(Succeed())
	return out, &view{services: list.Items, eligible: map[string]bool{"n-1": true}}
}

// pass publishes and releases, as a reconcile does.
func (s *site) pass() error {
	of, v := s.begin()
	err := s.publish(s.t.Context(), of, v)
	_, endErr := s.release(s.t.Context(), of, v)
	return errors.Join(err, endErr)
}

func (s *site) claims() []capiipamv1.IPAddressClaim {
	list := &capiipamv1.IPAddressClaimList{}
	s.Expect(s.management.List(s.t.Context(), list)).To(Succeed())
	return list.Items
}

// provide gives all claims an address, and publishes the Services.
func (s *site) provide() {
	s.t.Helper()
	s.Expect(s.pass()).To(Succeed())
	for i, claim := range s.claims() {
		address := &capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: claim.Name}}
		address.Spec.Address = fmt.Sprintf("203.0.113.%d", 100+i)
		s.Expect(client.IgnoreAlreadyExists(s.management.Create(s.t.Context(), address))).To(Succeed())
		claim.Status.AddressRef.Name = claim.Name
		s.Expect(s.management.Update(s.t.Context(), &claim)).To(Succeed())
	}
	s.Expect(s.pass()).To(Succeed())
}

// published are the names of the Services on the host.
func (s *site) published() (names []string) {
	for name := range s.fake.Services("demo-1") {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// records are the hosts of all claims.
func (s *site) records() (out []string) {
	for _, claim := range s.claims() {
		out = append(out, claim.Annotations[infrav1.ServiceHostsAnnotation])
	}
	return out
}

// A request that fails takes no Service off its host: a list without the Service would end its connections. The error of a Service without an
// address holds up no other one.
func TestFailedRequestKeepsServices(t *testing.T) {
	s := newSite(t)
	web, mail := s.add("web", nil), s.add("mail", nil)
	s.provide()
	s.Expect(s.published()).To(Equal([]string{"default/mail", "default/web"}))

	unavailable := errors.New("the server is unavailable")
	s.failing = func(verb string, o client.Object) error {
		if _, is := o.(*capiipamv1.IPAddress); is && verb == "get" && o.GetName() == claimName("demo", web, corev1.IPv4Protocol) {
			return unavailable
		}
		return nil
	}
	ports := s.add("ports", func(o *corev1.Service) {
		o.Spec.LoadBalancerClass = ptr.To(infrav1.ServiceHostPortsClass)
		o.Annotations = map[string]string{infrav1.ServiceClaimAnnotation: claimName("demo", o, corev1.IPv4Protocol)}
		o.Finalizers = []string{servicehelper.LoadBalancerCleanupFinalizer}
	})
	s.Expect(s.workload.Delete(t.Context(), ports)).To(Succeed())
	s.Expect(s.pass()).To(MatchError(ContainSubstring("unavailable")))
	s.Expect(s.published()).To(Equal([]string{"default/mail", "default/web"}), "after a failed read of an address")
	s.Expect(s.records()).To(Equal([]string{"h", "h"}))
	s.Expect(s.workload.Get(t.Context(), client.ObjectKeyFromObject(ports), ports)).To(Succeed(), "the host was not asked to close the ports")

	s.Expect(s.workload.Get(t.Context(), client.ObjectKeyFromObject(web), web)).To(Succeed())
	web.Annotations, web.Finalizers = nil, nil
	s.Expect(s.workload.Update(t.Context(), web)).To(Succeed())
	s.failing = func(verb string, o client.Object) error {
		if _, is := o.(*corev1.Service); is && verb == "patch" && o.GetName() == "web" {
			return unavailable
		}
		return nil
	}
	s.Expect(s.pass()).To(MatchError(ContainSubstring("unavailable")))
	s.Expect(s.published()).To(Equal([]string{"default/mail", "default/web"}), "after a failed mark")

	s.failing = func(verb string, _ client.Object) error {
		if verb == "create" {
			return errors.New("exceeded quota")
		}
		return nil
	}
	s.add("new", nil)
	s.Expect(s.workload.Get(t.Context(), client.ObjectKeyFromObject(mail), mail)).To(Succeed())
	s.Expect(s.workload.Delete(t.Context(), mail)).To(Succeed())
	s.Expect(s.pass()).To(MatchError(ContainSubstring("exceeded quota")))
	s.Expect(s.published()).To(Equal([]string{"default/web"}), "a new Service without a claim holds up others")
}

// After the change of the pool, each Service gets an address of the new pool. Its host gives up the former address before that address is
// free.
func TestChangedPool(t *testing.T) {
	s := newSite(t)
	web := s.add("web", nil)
	s.provide()
	s.Expect(s.published()).To(Equal([]string{"default/web"}))
	s.pool("other")
	s.Expect(s.pass()).To(Succeed())
	s.Expect(s.published()).To(BeEmpty())
	s.Expect(s.claims()).To(BeEmpty(), "the claim of the former pool")
	s.Expect(s.workload.Get(t.Context(), client.ObjectKeyFromObject(web), web)).To(Succeed())
	s.Expect(marked(web)).To(BeTrue())
	s.Expect(s.management.DeleteAllOf(t.Context(), &capiipamv1.IPAddress{}, client.InNamespace("a"))).To(Succeed())
	s.provide()
	s.Expect(s.claims()).To(ConsistOf(HaveField("Spec.PoolRef.Name", "other")))
	s.Expect(s.published()).To(Equal([]string{"default/web"}))
}

// An address moves from c to a: a host that asks for an address before its former host has given it up is refused.
func TestPublishers(t *testing.T) {
	moves, stays := recordedBy("moves", "a,c"), recordedBy("stays", "b")
	s := &scope{hosts: map[string]*host{"a": {}, "b": {}, "c": {}, "d": {}, "e": {present: true}}}
	s.setClaims([]capiipamv1.IPAddressClaim{moves, stays})
	got := s.publishers(map[string][]*target{"a": {{claim: &moves}}, "b": {{claim: &stays}}})
	if want := []string{"c", "a", "b", "e"}; !slices.Equal(got, want) {
		t.Errorf("the hosts in the order of their requests: %v, want %v", got, want)
	}
}

func recordedBy(claim, hosts string) capiipamv1.IPAddressClaim {
	return capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{Name: claim, Annotations: map[string]string{infrav1.ServiceHostsAnnotation: hosts}}}
}

// A host has to give up an address if it is in the record and does not keep it.
func TestLoses(t *testing.T) {
	s, one, two := &scope{}, recordedBy("one", "a,b"), recordedBy("two", "a")
	s.setClaims([]capiipamv1.IPAddressClaim{one, two})
	ofOne, ofTwo, ports := &target{claim: &one}, &target{claim: &two}, &target{}
	for name, c := range map[string]struct {
		host  string
		keeps []*target
		want  bool
	}{
		"keeps all":            {"a", []*target{ofOne, ports, ofTwo}, false},
		"keeps one":            {"a", []*target{ofOne, ports}, true},
		"keeps none":           {"b", nil, true},
		"had none":             {"c", nil, false},
		"gets its first":       {"c", []*target{ofTwo}, false},
		"gets one for another": {"b", []*target{ofTwo}, true},
	} {
		if got := s.loses(c.host, c.keeps); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

package machine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/reconciling"
)

// plane is an API server. Each process follows its watch at its own pace.
type plane struct {
	t       *testing.T
	live    client.Client
	log     []*infrav1.CapstanMachine // all writes, in their order
	made    map[string]string         // address by machine, as on the hosts
	cluster *infrav1.CapstanCluster
}

func newPlane(t *testing.T, machines int, cidr string) *plane {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clusterv1.AddToScheme, infrav1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	p := &plane{t: t, live: fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&infrav1.CapstanMachine{}).Build(), made: map[string]string{}}
	p.cluster = &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
	p.cluster.Spec.Network.MachineCIDR = cidr
	for i := range machines {
		p.add(fmt.Sprint("m-", i))
	}
	return p
}

func (p *plane) add(name string) {
	p.t.Helper()
	m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: "c"}}}
	if err := p.live.Create(p.t.Context(), m); err != nil {
		p.t.Fatal(err)
	}
	p.log = append(p.log, m)
}

// process is a manager. Its client writes to the API server and reads the state that its watch has delivered so far.
type process struct {
	client.Client
	plane *plane
	seen  int
	cache map[string]*infrav1.CapstanMachine
	r     *Reconciler
}

func (p *plane) start() *process {
	out := &process{Client: p.live, plane: p, cache: map[string]*infrav1.CapstanMachine{}}
	out.r = &Reconciler{Options: reconciling.Options{LiveClient: p.live}, Client: out, Pool: connections.NewPool(context.Background(), nil)}
	out.r.frame.Wrote = func(reconciling.Object, string) {}
	out.follow(len(p.log)) // The cache is filled before the first reconcile.
	return out
}

// follow delivers n more events of the watch.
func (p *process) follow(n int) {
	for ; n > 0 && p.seen < len(p.plane.log); n-- {
		m := p.plane.log[p.seen]
		p.cache[m.Name] = m
		p.seen++
	}
}

func (p *process) Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
	if err := p.Client.Patch(ctx, obj, patch, opts...); err != nil {
		return err
	}
	p.plane.log = append(p.plane.log, obj.DeepCopyObject().(*infrav1.CapstanMachine))
	return nil
}

func (p *process) Status() client.SubResourceWriter { return statusWriter{p.Client.Status(), p} }

type statusWriter struct {
	client.SubResourceWriter
	process *process
}

func (w statusWriter) Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
	if err := w.SubResourceWriter.Patch(ctx, obj, patch, opts...); err != nil {
		return err
	}
	w.process.plane.log = append(w.process.plane.log, obj.DeepCopyObject().(*infrav1.CapstanMachine))
	return nil
}

func (p *process) List(_ context.Context, list client.ObjectList, opts ...client.ListOption) error {
	o := (&client.ListOptions{}).ApplyOptions(opts)
	address, _ := o.FieldSelector.RequiresExactMatch(addressIndex)
	out := list.(*infrav1.CapstanMachineList)
	for _, m := range p.cache {
		for _, a := range addressesOf(m) {
			if a == address {
				out.Items = append(out.Items, *m)
			}
		}
	}
	return nil
}

func (p *process) Get(_ context.Context, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	p.plane.cluster.DeepCopyInto(obj.(*infrav1.CapstanCluster))
	return nil
}

// reconcile does the steps of the reconciler for addresses: it chooses an address, or confirms and uses the existing one. It returns
// whether a machine was created.
func (p *process) reconcile(name string) bool {
	p.plane.t.Helper()
	ctx := p.plane.t.Context()
	s := &scope{cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}, capstan: p.cache[name].DeepCopy()}
	s.cluster.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{Kind: "CapstanCluster", Name: "c"}
	if len(s.capstan.Spec.Network.Addresses) == 0 {
		p.harmless(p.r.assignOtherAddress(ctx, s))
		return false
	}
	err := p.r.confirmAddress(ctx, s)
	if _, made := p.plane.made[name]; err == nil && !made {
		p.plane.made[name] = s.capstan.Spec.Network.Addresses[0].Address
		return true
	}
	p.harmless(err)
	return false
}

// harmless accepts errors that repeat a reconcile. In a stale cache, the small network can be full.
func (p *process) harmless(err error) {
	p.plane.t.Helper()
	if err != nil && !errors.Is(err, reconciling.ErrWaiting) && !apierrors.IsConflict(err) && !strings.Contains(err.Error(), "no address is free") {
		p.plane.t.Fatal(err)
	}
}

// check fails the test if two machines were created with the same address, or if the address of a machine differs from its spec.
func (p *plane) check() {
	p.t.Helper()
	holder := map[string]string{}
	for name, address := range p.made {
		if other := holder[address]; other != "" {
			p.t.Fatalf("%s and %s were both created with %s", name, other, address)
		}
		holder[address] = name
	}
	newest := map[string]*infrav1.CapstanMachine{}
	for _, m := range p.log {
		newest[m.Name] = m
	}
	for name, address := range p.made {
		if got := newest[name].Spec.Network.Addresses[0].Address; got != address {
			p.t.Fatalf("%s was created with %s, its spec contains %s", name, address, got)
		}
	}
}

// A process whose cache never contains its writes assigns no address twice.
func TestAddressesWithAStaleCache(t *testing.T) {
	p := newPlane(t, 20, "10.0.0.0/26")
	leader := p.start()
	for i := range 20 {
		leader.reconcile(fmt.Sprint("m-", i))
	}
	given := map[string]bool{}
	for _, m := range p.log[20:] {
		given[m.Spec.Network.Addresses[0].Address] = true
	}
	if len(given) != 20 {
		t.Errorf("20 machines have %d different addresses", len(given))
	}
	if leader.reconcile("m-3") || len(p.made) > 0 {
		t.Error("a machine was created before the cache contained its address")
	}
}

// A failed write reserves no address and is repeated.
func TestAddressIsChosenAgainAfterAConflict(t *testing.T) {
	p := newPlane(t, 1, "10.0.0.0/29")
	leader, other := p.start(), p.start()
	other.reconcile("m-0")
	for range 10 { // more attempts than addresses
		leader.reconcile("m-0")
	}
	if len(p.log) != 2 || len(leader.r.reserved.holders) > 1 {
		t.Errorf("%d writes, %d addresses are reserved for one machine", len(p.log)-1, len(leader.r.reserved.holders))
	}
	leader.follow(1)
	if !leader.reconcile("m-0") || len(leader.r.reserved.holders) != 0 {
		t.Errorf("created: %v; reserved: %v", p.made, leader.r.reserved.holders)
	}
	p.check()
}

// A manager starts before the last write of its predecessor reaches the API server, and chooses the same address. The machine that
// was written first keeps it.
func TestAddressesAfterARestart(t *testing.T) {
	p := newPlane(t, 2, "10.0.0.0/29")
	before, after := p.start(), p.start()
	before.reconcile("m-0")
	before.follow(1)
	before.reconcile("m-0")
	after.reconcile("m-1")
	if first, second := p.log[2].Spec.Network, p.log[3].Spec.Network; first.Addresses[0] != second.Addresses[0] {
		t.Fatalf("got %v and %v, want a collision", first, second)
	}
	for range 2 {
		after.follow(100)
		after.reconcile("m-1")
		after.reconcile("m-0")
	}
	if p.made["m-0"] != "10.0.0.2" || p.made["m-1"] != "10.0.0.3" {
		t.Errorf("made %v", p.made)
	}
	p.check()
}

// Three processes act as the leader at the same time, with watches at different paces and with restarts. They create all machines,
// and no two have the same address. The message of a failure contains the seed.
func TestAddressesOfSeveralLeaders(t *testing.T) {
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		const machines = 12
		p := newPlane(t, machines, "10.0.0.0/28") // 13 addresses
		processes := []*process{p.start(), p.start(), p.start()}
		limit := 20000
		for ; len(p.made) < machines && limit > 0; limit-- {
			i := rnd.IntN(len(processes))
			switch x := rnd.IntN(100); {
			case x < 50:
				processes[i].follow(1 + rnd.IntN(4))
			case x < 99:
				processes[i].reconcile(fmt.Sprint("m-", rnd.IntN(machines)))
			default:
				processes[i] = p.start()
			}
			p.check()
		}
		if limit == 0 {
			t.Fatalf("seed %d: only %d machines exist after many steps", seed, len(p.made))
		}
	}
}

// A namespace can use any number of names for its clusters: few of their last addresses are kept.
func TestLastAddressesAreBounded(t *testing.T) {
	var r reservations
	cidr := netip.MustParsePrefix("10.0.0.0/24")
	for i := range 3 * maxLast {
		machine := client.ObjectKey{Namespace: "ns", Name: "m"}
		if _, err := r.choose(cidr, client.ObjectKey{Namespace: "ns", Name: fmt.Sprint("c-", i)}, machine, func(netip.Addr) bool { return false }); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(r.last); n == 0 || n > maxLast {
		t.Errorf("the last addresses of %d clusters are kept, want at most %d", n, maxLast)
	}
}

// The machines of all namespaces wait for a search, so one with many taken addresses ends early. The following ones continue, find the only free
// address, and report a full network.
func TestSearchInParts_ALL18(t *testing.T) {
	cidr, free := netip.MustParsePrefix("10.0.0.0/16"), netip.MustParseAddr("10.0.255.254")
	cluster := client.ObjectKey{Namespace: "ns", Name: "c"}
	var r reservations
	find := func(machine string) (address netip.Addr, searches int) {
		for {
			looks := 0
			address, err := r.choose(cidr, cluster, client.ObjectKey{Namespace: "ns", Name: machine}, func(a netip.Addr) bool {
				looks++
				return a != free
			})
			searches++
			if looks > maxTaken {
				t.Fatalf("a search has looked at %d addresses, want at most %d", looks, maxTaken)
			}
			if errors.Is(err, errSearching) {
				continue
			}
			if err != nil {
				return netip.Addr{}, searches
			}
			return address, searches
		}
	}
	if got, searches := find("m-0"); got != free || searches != 16 {
		t.Errorf("found %v in %d searches, want %v in 16", got, searches, free)
	}
	for range 2 {
		countAsFull(&r, cluster, time.Time{})
		if got, searches := find("m-1"); got.IsValid() || searches != 16 {
			t.Errorf("found %v in %d searches, want a full network after 16", got, searches)
		}
	}
}

// After a search that continues later, the machines of its namespace wait before they search again, and those of others do not.
func TestPauseOfSearches_ALL18(t *testing.T) {
	var r reservations
	taken := func(netip.Addr) bool { return true }
	for namespace, bits := range map[string]int{"hostile": 16, "full": 21, "small": 26} {
		if _, err := r.choose(netip.PrefixFrom(netip.MustParseAddr("10.0.0.0"), bits), client.ObjectKey{Namespace: namespace}, client.ObjectKey{}, taken); err == nil {
			t.Fatal("found an address")
		}
	}
	if _, found := r.pauses["hostile"]; !found || len(r.pauses) != 1 {
		t.Errorf("found pauses %v, want that of hostile", r.pauses)
	}
	p := newPlane(t, 1, "10.0.0.0/26")
	leader := p.start()
	leader.r.reserved.pauses = map[string]time.Time{"ns": time.Now().Add(time.Hour), "hostile": time.Now().Add(-time.Hour)}
	if leader.r.reserved.pausing("hostile") {
		t.Error("the namespace still pauses after the time of its pause")
	}
	leader.r.placing.Lock() // The machine does not wait for the lock.
	for name, search := range map[string]func(*scope) error{
		"a new machine":   func(s *scope) error { return leader.r.choose(t.Context(), s, p.cluster, nil) },
		"another address": func(s *scope) error { return leader.r.assignOtherAddress(t.Context(), s) },
	} {
		s := &scope{cluster: &clusterv1.Cluster{}, capstan: leader.cache["m-0"].DeepCopy()}
		if err := search(s); !errors.Is(err, reconciling.ErrWaiting) || s.again < searchPause || s.again > 2*searchPause {
			t.Errorf("%s: got the error %v and the next attempt after %s, want a wait of one to two pauses", name, err, s.again)
		}
	}
}

// A large network that is full is searched once per pause. The other clusters of its namespace do not wait, and a small network is
// searched at each attempt.
func TestPauseOfAFullNetwork_ALL18(t *testing.T) {
	var r reservations
	large, small, other := client.ObjectKey{Namespace: "ns", Name: "large"}, client.ObjectKey{Namespace: "ns", Name: "small"}, client.ObjectKey{Namespace: "ns", Name: "other"}
	search := func(cluster client.ObjectKey, bits int, taken bool) (looks int, err error) {
		cidr := netip.PrefixFrom(netip.MustParseAddr("10.0.0.0"), bits)
		_, err = r.choose(cidr, cluster, client.ObjectKey{}, func(netip.Addr) bool {
			looks++
			return taken
		})
		return looks, err
	}
	full := func(cluster client.ObjectKey, bits, want int) {
		t.Helper()
		if looks, err := search(cluster, bits, true); err == nil || errors.Is(err, errSearching) || looks != want {
			t.Errorf("%s: looked at %d addresses and got the error %v, want %d and a full network", cluster.Name, looks, err, want)
		}
	}
	full(large, 21, 1<<11-3)
	full(small, 26, 1<<6-3)
	if r.last[large].full.IsZero() || !r.last[small].full.IsZero() || r.pausing("ns") {
		t.Errorf("found pauses %v of clusters and %v of namespaces, want that of the large network", r.last, r.pauses)
	}
	countAsFull(&r, large, time.Now().Add(time.Hour))
	full(large, 21, 0)
	if looks, err := search(other, 21, false); err != nil || looks != 1 {
		t.Errorf("another cluster of the namespace: looked at %d addresses and got the error %v", looks, err)
	}
	countAsFull(&r, large, time.Now().Add(-time.Hour))
	if _, err := search(large, 21, false); err != nil {
		t.Errorf("after the pause, and with a free address: %v", err)
	}
}

// countAsFull sets the time until which the network of a cluster counts as full.
func countAsFull(r *reservations, cluster client.ObjectKey, until time.Time) {
	state := r.last[cluster]
	state.full = until
	r.last[cluster] = state
}

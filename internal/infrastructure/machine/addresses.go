package machine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/reconciling"
)

// No address of a cluster's network is used twice, although addresses are chosen from a stale cache:
//
//  1. A process keeps its choices (reservations) until its cache contains them, so it never chooses an address twice.
//  2. Another process can choose at the same time: a former leader before it notices its loss, or a killed process whose last
//     write arrives late. Therefore an assigned address (spec) is used only after its confirmation (status.addresses). An
//     address is confirmed only if the cache contains it, and no other machine of the cluster with the same address. A watch
//     delivers writes in their order. If two machines have the same address, the later one is seen together with the earlier
//     one, and gets another address. The assignment and the confirmation fail if the object has changed in between, so no
//     process confirms an address that another process has withdrawn.
//  3. capstand refuses an address of any machine on its box, also of another management plane. Then another address is chosen.
//
// Addresses from IPAM pools are never replaced.

// addressIndex is an index of CapstanMachines by the addresses in spec.
const addressIndex = "spec.network.addresses"

func addressesOf(o client.Object) []string {
	var out []string
	for _, a := range o.(*infrav1.CapstanMachine).Spec.Network.Addresses {
		out = append(out, a.Address)
	}
	return out
}

// reservations contains the addresses that this process has chosen and that its cache does not contain yet.
type reservations struct {
	mu sync.Mutex
	// holders are the machines that the addresses were chosen for. A machine has at most one.
	holders map[reservation]client.ObjectKey
	// held are the addresses by machine.
	held map[client.ObjectKey]reservation
	// last is the last search of each cluster. The next one continues there, so its duration does not grow with the number
	// of machines, and a released address is not used again at once. The searches of deleted clusters stay until there are maxLast.
	last map[client.ObjectKey]search
	// pauses are the times until which namespaces pause after a search that continues later.
	pauses map[string]time.Time
}

// search is the state of the search for the addresses of a cluster.
type search struct {
	// at is the address at which the search ended.
	at netip.Addr
	// taken is the number of addresses before it that are taken, since the last choice.
	taken int
	// full is the time until which a large network counts as full, after a search found it full.
	full time.Time
}

const (
	// maxLast bounds reservations.last to some megabytes, because a namespace can use any number of names for its clusters.
	maxLast = 10_000
	// maxTaken bounds the taken addresses of one search. A host can report machines with all addresses of a network, and the machines of all
	// namespaces wait for the search.
	maxTaken = 4096
	// searchPause is the time for which a namespace pauses after a search that continues later, and a cluster after one that found its
	// network full with at least manyTaken addresses. A full network does not delay the other clusters of the namespace.
	searchPause, manyTaken = time.Second, 256
)

// errSearching means that a search without a result continues later.
var errSearching = fmt.Errorf("the first %d addresses are taken: the search continues", maxTaken)

type reservation struct {
	cluster client.ObjectKey
	address netip.Addr
}

// choose returns an address of the cluster's network that is neither taken nor reserved, and reserves it.
func (r *reservations) choose(cidr netip.Prefix, cluster, machine client.ObjectKey, taken func(netip.Addr) bool) (netip.Addr, error) {
	r.release(machine)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.holders == nil {
		r.holders, r.held = map[reservation]client.ObjectKey{}, map[client.ObjectKey]reservation{}
		r.last, r.pauses = map[client.ObjectKey]search{}, map[string]time.Time{}
	}
	if len(r.last) >= maxLast {
		clear(r.last) // The next search of each cluster begins with its first address.
	}
	state := r.last[cluster]
	if time.Now().Before(state.full) {
		return netip.Addr{}, full(cidr)
	}
	address, free := network.ChooseAddress(cidr, state.at, maxTaken, func(a netip.Addr) bool {
		if _, reserved := r.holders[reservation{cluster, a}]; !reserved && !taken(a) {
			return false
		}
		state.taken++
		return true
	})
	if !free {
		return address, r.unsuccessful(cidr, cluster, search{at: address, taken: state.taken})
	}
	chosen := reservation{cluster, address}
	r.holders[chosen], r.held[machine], r.last[cluster] = machine, chosen, search{at: address}
	return address, nil
}

// unsuccessful records a search without a result, and returns its error. The caller holds mu.
func (r *reservations) unsuccessful(cidr netip.Prefix, cluster client.ObjectKey, state search) error {
	if !network.IsFull(cidr, state.taken) {
		r.last[cluster] = state
		r.pause(cluster.Namespace)
		return errSearching
	}
	next := search{at: state.at}
	if state.taken >= manyTaken {
		next.full = time.Now().Add(searchPause)
	}
	r.last[cluster] = next
	return full(cidr)
}

// full is the error for a network without a free address.
func full(cidr netip.Prefix) error {
	return fmt.Errorf("no address is free in %s: delete machines, or use a larger machineCIDR for the next cluster", cidr)
}

// pause lets the machines of a namespace wait before their next search. The caller holds mu.
func (r *reservations) pause(namespace string) {
	now := time.Now()
	maps.DeleteFunc(r.pauses, func(_ string, until time.Time) bool { return !now.Before(until) })
	r.pauses[namespace] = now.Add(searchPause)
}

// pausing reports whether a namespace pauses.
func (r *reservations) pausing(namespace string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Now().Before(r.pauses[namespace])
}

// searchLater ends a reconcile while the namespace pauses. An error would delay the next attempts more and more, and the pauses that a machine
// meets are those of others.
func searchLater(s *scope) error {
	s.again = wait.Jitter(searchPause, 1)
	return reconciling.ErrWaiting
}

// release deletes the reservation of a machine when the cache shows its address or the machine was deleted. There are
// never more reservations than machines whose writes are in progress.
func (r *reservations) release(machine client.ObjectKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if its, found := r.held[machine]; found {
		delete(r.holders, its)
		delete(r.held, machine)
	}
}

// chooseAddress takes a free address of the cluster's network. Not free are: addresses of other CapstanMachines, of the load balancer
// and of machines on hosts, and the former address of this machine, which was refused.
func (r *Reconciler) chooseAddress(ctx context.Context, s *scope, capstanCluster *infrav1.CapstanCluster) ([]infrav1.InterfaceAddress, error) {
	cidr, err := netip.ParsePrefix(capstanCluster.Spec.Network.MachineCIDR)
	if err != nil {
		return nil, fmt.Errorf("machine network of CapstanCluster %s: %w", capstanCluster.Name, err)
	}
	var failed error
	taken := func(a netip.Addr) bool {
		if a.String() == capstanCluster.Spec.LoadBalancer.Address {
			return true
		}
		onHost, err := r.onHosts(ctx, s, capstanCluster.Spec.ID, a.String())
		if err != nil {
			failed = err
		}
		if onHost {
			return true
		}
		holders, err := r.holders(ctx, s, a.String())
		if err != nil {
			failed = err
		}
		return len(holders) > 0
	}
	addr, err := r.reserved.choose(cidr, client.ObjectKeyFromObject(s.cluster), client.ObjectKeyFromObject(s.capstan), taken)
	if failed != nil {
		return nil, failed
	}
	if errors.Is(err, errSearching) {
		return nil, searchLater(s)
	}
	if err != nil {
		reconciling.SetCondition(s.capstan, infrav1.AddressesAssignedCondition, metav1.ConditionFalse, infrav1.NoFreeAddressReason, "%s", err)
		return nil, err // there is no event when an address becomes free
	}
	return besides(s, capstanCluster.Spec.Network, cidr, addr)
}

// onHosts reports whether another machine of the cluster has the address on a host. Machines without an object, as after the restore of an old
// management cluster, have addresses too. The report of a host that does not admit the namespace does not count (ALL-18).
func (r *Reconciler) onHosts(ctx context.Context, s *scope, networkID, address string) (bool, error) {
	for _, name := range r.Pool.Holders(connections.NetworkOf(networkID, s.cluster), address, s.capstan.Spec.ID) {
		if admitting, err := hostselection.UsableHost(ctx, r.Client, name, s.capstan.Namespace); err != nil || len(admitting) > 0 {
			return err == nil, err
		}
	}
	return false, nil
}

// besides adds the IPv6 address of a machine in a dual stack network (IPAM-08). It is derived from the IPv4 address, so it is
// unique as well.
func besides(s *scope, n infrav1.ClusterNetworkSpec, cidr netip.Prefix, addr netip.Addr) ([]infrav1.InterfaceAddress, error) {
	out := []infrav1.InterfaceAddress{interfaceAddress(cidr, addr)}
	if n.MachineIPv6CIDR == "" {
		return out, nil
	}
	six, err := netip.ParsePrefix(n.MachineIPv6CIDR)
	if err != nil {
		return nil, err
	}
	second, err := network.Besides(cidr, addr, six)
	if err != nil {
		reconciling.SetCondition(s.capstan, infrav1.AddressesAssignedCondition, metav1.ConditionFalse, infrav1.NoFreeAddressReason, "%s", err)
		return nil, err
	}
	return append(out, interfaceAddress(six, second)), nil
}

func interfaceAddress(cidr netip.Prefix, addr netip.Addr) infrav1.InterfaceAddress {
	return infrav1.InterfaceAddress{Address: addr.String(), Prefix: int32(cidr.Bits()), Gateway: network.Gateway(cidr).String()}
}

// holders returns the machines of the cluster that have the address in the cache.
func (r *Reconciler) holders(ctx context.Context, s *scope, address string) ([]infrav1.CapstanMachine, error) {
	list := &infrav1.CapstanMachineList{}
	err := r.Client.List(ctx, list, client.InNamespace(s.capstan.Namespace),
		client.MatchingLabels{clusterv1.ClusterNameLabel: s.cluster.Name}, client.MatchingFields{addressIndex: address}, client.UnsafeDisableDeepCopy)
	return list.Items, err
}

// confirmAddress makes sure that no other machine has the address that this one was given, and writes that down. If
// another one has it too, this one gets another address.
func (r *Reconciler) confirmAddress(ctx context.Context, s *scope) error {
	r.reserved.release(client.ObjectKeyFromObject(s.capstan)) // the cache shows both
	r.chosen.release(client.ObjectKeyFromObject(s.capstan))
	if confirmed(s.capstan) {
		return nil
	}
	holders, err := r.holders(ctx, s, s.capstan.Spec.Network.Addresses[0].Address)
	if err != nil {
		return err
	}
	rival := func(m infrav1.CapstanMachine) bool { return m.Name != s.capstan.Name }
	if slices.ContainsFunc(holders, rival) && len(s.capstan.Spec.Network.AddressesFromPools) == 0 {
		return r.assignOtherAddress(ctx, s)
	}
	before := s.capstan.DeepCopy()
	r.observe(s, &hostpb.MachineStatus{}) // The host will report this address first, which saves a write.
	showAddresses(s.capstan)
	s.capstan.Status.ObservedGeneration = s.capstan.Generation // Otherwise the end of the reconcile would write it once more.
	if err := reconciling.SetReady(s.capstan, summarized...); err != nil {
		return err
	}
	stored := s.capstan.DeepCopy()
	if err := r.Client.Status().Patch(ctx, stored, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		before.Status.DeepCopyInto(&s.capstan.Status)
		return err
	}
	s.capstan = stored
	r.frame.Wrote(stored, stored.ResourceVersion)
	s.patch = reconciling.NewPatch(stored, r.LiveClient)
	return nil
}

// confirmed reports whether status has the address of spec.
func confirmed(m *infrav1.CapstanMachine) bool {
	return slices.Contains(m.Status.Addresses, clusterv1.MachineAddress{Type: clusterv1.MachineInternalIP, Address: m.Spec.Network.Addresses[0].Address})
}

// showAddresses shows the machine's name and addresses (IM-04).
func showAddresses(m *infrav1.CapstanMachine) {
	m.Status.Addresses = []clusterv1.MachineAddress{{Type: clusterv1.MachineHostName, Address: m.Name}}
	for _, a := range m.Spec.Network.Addresses {
		m.Status.Addresses = append(m.Status.Addresses, clusterv1.MachineAddress{Type: clusterv1.MachineInternalIP, Address: a.Address})
	}
}

// addressTaken returns whether a host refused the machine because another machine has its IPv4 address: a machine of
// another management cluster, or one that is being removed. Addresses of IPAM pools are never replaced.
func addressTaken(err error, m *infrav1.CapstanMachine) bool {
	r := refusal.Of(err)
	return len(m.Spec.Network.AddressesFromPools) == 0 &&
		r.Reason == hostpb.Refusal_ADDRESS_IN_USE && r.Subject == m.Spec.Network.Addresses[0].Address
}

// assignOtherAddress replaces an address that the machine cannot have. The change of spec is the event that
// leads to the next attempt.
func (r *Reconciler) assignOtherAddress(ctx context.Context, s *scope) error {
	if r.reserved.pausing(s.capstan.Namespace) {
		return searchLater(s)
	}
	capstanCluster, err := r.capstanCluster(ctx, s)
	if err != nil {
		return err
	}
	before := s.capstan.DeepCopy()
	addresses, err := r.chooseAddress(ctx, s, capstanCluster)
	if err != nil {
		return err
	}
	s.capstan.Spec.Network.Addresses = addresses
	if err := r.record(ctx, s, before); err != nil {
		return err
	}
	return reconciling.ErrWaiting
}

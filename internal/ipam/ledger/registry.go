// Package ledger makes sure that no address of a pool is allocated twice.
//
// Each pool has a small record in its status. The record contains the process that wrote it last, the pending
// allocations, and the resting addresses. A pending allocation is an address of a claim whose IPAddress may not exist
// yet. The IPAddresses are the record of all other allocations.
//
// Before an IPAddress is created, its address is written into the record, with compare-and-swap on the pool's
// resourceVersion. A batch of claims shares one write. A process that did not write the record last must take it over
// first, with the same compare-and-swap. Then it reads all IPAddresses from the API server, past the cache. At the moment
// of a successful write, the writer therefore has all used addresses in memory:
//
//   - its own allocations;
//   - the allocations of other processes before the takeover: each is in the record, or its IPAddress existed before the
//     allocation left the record, and the read contains it;
//   - there are no allocations of other processes since the takeover: the resourceVersion would have changed.
//
// An outdated state is safe: it can only contain the address of an IPAddress that was deleted since.
//
// A Pool combines three parts. The state holds the ledger in memory: the space of addresses, the index of IPAddresses,
// the pending allocations and the queue of claims. A decision answers one request from the state. The recordWriter takes
// the record over and writes it.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package ledger

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// Key names a pool. Namespace is empty for a GlobalCapstanIPPool.
type Key struct{ Kind, Namespace, Name string }

// String returns the key for logs and messages.
func (k Key) String() string {
	if k.Namespace == "" {
		return k.Kind + "/" + k.Name
	}
	return k.Kind + "/" + k.Namespace + "/" + k.Name
}

// KeyOf returns the key of the pool of a reference in a namespace. It returns false for pools of other providers (row
// IPAM-04a).
func KeyOf(ref capiipamv1.IPPoolReference, namespace string) (Key, bool) {
	if ref.APIGroup != ipamv1.GroupVersion.Group {
		return Key{}, false
	}
	switch ref.Kind {
	case ipamv1.CapstanIPPoolKind:
		return Key{ref.Kind, namespace, ref.Name}, true
	case ipamv1.GlobalCapstanIPPoolKind:
		return Key{ref.Kind, "", ref.Name}, true
	}
	return Key{}, false
}

// KeyOfPool returns the key of a pool.
func KeyOfPool(p ipamv1.Pool) Key { return Key{p.PoolKind(), p.GetNamespace(), p.GetName()} }

// Copied reports whether a claim or pool came from another management cluster. The provider there has annotated it.
func Copied(obj metav1.Object) bool {
	origin := obj.GetAnnotations()[ipamv1.OriginUIDAnnotation]
	return origin != "" && origin != string(obj.GetUID())
}

// Options of a Registry.
type Options struct {
	// Namespace restricts the IPAddresses that are read for namespaced pools.
	// Empty means all.
	Namespace string
	// Quarantine is the time for which an address of a dead process stays taken, because its request to create the IPAddress may
	// still be in progress. A process starts that request in the first quarter of this time and cancels it after the
	// second. The rest is for the request to end at the API server, and for differences between clocks. The default is
	// 60 seconds.
	Quarantine time.Duration
	// MoveSettle is the time without arrivals after which a pool from another management cluster allocates new addresses.
	// The default is 30 seconds.
	MoveSettle time.Duration
	// MaxBatch is the number of claims that share one write. The default is
	// 256.
	MaxBatch int
	// WakeClaim is called when a waiting claim should be reconciled again. It must not block.
	WakeClaim func(types.NamespacedName)
	// FollowAll starts the watch of the IPAddresses of all namespaces, before a GlobalCapstanIPPool is used. It may be
	// nil if this watch exists already.
	FollowAll func(context.Context) error
	// PoolChanged is called when the counts of a pool have changed. It must
	// not block.
	PoolChanged func(Key)
	// Observe is called for every write of a record, for metrics. It may be
	// nil.
	Observe func(event string, key Key, batch int)
	// Now is the clock. The default is time.Now.
	Now func() time.Time
}

// grantLife is the time after a write of the record during which an IPAddress may be created.
func (o Options) grantLife() time.Duration { return o.Quarantine / 4 }

// RequestTimeout bounds the request that creates an IPAddress.
func (r *Registry) RequestTimeout() time.Duration { return r.opts.Quarantine / 4 }

// Registry contains the ledgers of all pools.
type Registry struct {
	client client.Client
	live   client.Reader
	holder string
	opts   Options

	mu    sync.Mutex
	pools map[Key]*Pool

	namespaced, global *lister
}

// NewRegistry returns a registry. It writes with c and reads past the cache with live.
func NewRegistry(c client.Client, live client.Reader, opts Options) *Registry {
	if opts.Quarantine == 0 {
		opts.Quarantine = time.Minute
	}
	if opts.MoveSettle == 0 {
		opts.MoveSettle = 30 * time.Second
	}
	if opts.MaxBatch == 0 {
		opts.MaxBatch = 256
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Observe == nil {
		opts.Observe = func(string, Key, int) {}
	}
	if opts.FollowAll == nil {
		opts.FollowAll = func(context.Context) error { return nil }
	}
	if opts.WakeClaim == nil {
		opts.WakeClaim = func(types.NamespacedName) {}
	}
	if opts.PoolChanged == nil {
		opts.PoolChanged = func(Key) {}
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	r := &Registry{
		client: c,
		live:   live,
		holder: fmt.Sprintf("%s_%d_%s", host, os.Getpid(), rand.String(8)),
		opts:   opts,
		pools:  map[Key]*Pool{},
	}
	r.global = newLister(live, "")
	r.namespaced = r.global
	if opts.Namespace != "" {
		r.namespaced = newLister(live, opts.Namespace)
	}
	return r
}

// SetHooks sets the functions that wake controllers. Call it before the first
// event arrives.
func (r *Registry) SetHooks(wake func(types.NamespacedName), changed func(Key)) {
	if wake != nil {
		r.opts.WakeClaim = wake
	}
	if changed != nil {
		r.opts.PoolChanged = changed
	}
}

// Pool returns the ledger of a pool, whether or not the pool exists.
func (r *Registry) Pool(key Key) *Pool {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, ok := r.pools[key]
	if !ok {
		p = newPool(r, key)
		r.pools[key] = p
	}
	p.used = r.opts.Now()
	return p
}

// Drop forgets a deleted pool object. It keeps the addresses that reference the pool, because a pool with the same name
// may be created.
func (r *Registry) Drop(key Key) { r.Pool(key).forgetDoc() }

// Prune drops old entries and empty ledgers, because a claim can name any pool. Call it periodically, also in a process
// that does not lead.
func (r *Registry) Prune() {
	now := r.opts.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, p := range r.pools {
		// Callers get a ledger from the registry for each use, so no caller holds one that was not used for so long.
		if empty := p.prune(now); empty && now.Sub(p.used) > remember {
			delete(r.pools, key)
		}
	}
}

// AddressSeen records an existing IPAddress.
func (r *Registry) AddressSeen(ip *capiipamv1.IPAddress) {
	if key, ok := KeyOf(ip.Spec.PoolRef, ip.Namespace); ok {
		r.Pool(key).addressSeen(ip)
	}
}

// AddressGone records the deletion of an IPAddress.
func (r *Registry) AddressGone(ip *capiipamv1.IPAddress) {
	if key, ok := KeyOf(ip.Spec.PoolRef, ip.Namespace); ok {
		_, moved := ip.Annotations[clusterctlv1.DeleteForMoveAnnotation]
		r.Pool(key).addressGone(ip.UID, moved)
	}
}

// ClaimSeen records an existing claim.
func (r *Registry) ClaimSeen(claim *capiipamv1.IPAddressClaim) {
	key, ok := KeyOf(claim.Spec.PoolRef, claim.Namespace)
	if !ok {
		return
	}
	if claim.DeletionTimestamp.IsZero() && claim.Status.AddressRef.Name == "" {
		r.Pool(key).enqueue(TicketOf(claim), Copied(claim))
	} else {
		r.Pool(key).dequeue(claim.UID)
	}
}

// Park keeps a claim that cannot get any address from delaying later claims. It records the claim first: a reconcile can be faster than the
// watch that calls ClaimSeen.
func (r *Registry) Park(claim *capiipamv1.IPAddressClaim) {
	r.ClaimSeen(claim)
	if key, ok := KeyOf(claim.Spec.PoolRef, claim.Namespace); ok {
		r.Pool(key).park(claim.UID)
	}
}

// ClaimLeft records that another manager serves a claim. It creates no ledger for the pools of other managers.
func (r *Registry) ClaimLeft(claim *capiipamv1.IPAddressClaim) {
	key, ok := KeyOf(claim.Spec.PoolRef, claim.Namespace)
	if !ok {
		return
	}
	r.mu.Lock()
	p := r.pools[key]
	r.mu.Unlock()
	if p != nil {
		p.dequeue(claim.UID)
	}
}

// ClaimGone records the deletion of a claim.
func (r *Registry) ClaimGone(claim *capiipamv1.IPAddressClaim) {
	if key, ok := KeyOf(claim.Spec.PoolRef, claim.Namespace); ok {
		r.Pool(key).Abandon(claim.UID)
	}
}

// lister reads all IPAddresses from the API server. Callers during a read share the next read, because the current one
// may be older than the state that they need.
type lister struct {
	live      client.Reader
	namespace string

	mu      sync.Mutex
	running bool
	next    *listCall
}

type listCall struct {
	done  chan struct{}
	items map[Key][]*capiipamv1.IPAddress
	err   error
}

func newLister(live client.Reader, namespace string) *lister {
	return &lister{live: live, namespace: namespace}
}

func (l *lister) list(ctx context.Context, key Key) ([]*capiipamv1.IPAddress, error) {
	l.mu.Lock()
	if l.next == nil {
		l.next = &listCall{done: make(chan struct{})}
	}
	call := l.next
	if !l.running {
		l.running = true
		go l.run(context.WithoutCancel(ctx))
	}
	l.mu.Unlock()
	select {
	case <-call.done:
		return call.items[key], call.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *lister) run(ctx context.Context) {
	for {
		l.mu.Lock()
		call := l.next
		l.next = nil
		if call == nil {
			l.running = false
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
		call.items, call.err = l.read(ctx)
		close(call.done)
	}
}

func (l *lister) read(ctx context.Context) (map[Key][]*capiipamv1.IPAddress, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	list := &capiipamv1.IPAddressList{}
	if err := l.live.List(ctx, list, client.InNamespace(l.namespace)); err != nil {
		return nil, fmt.Errorf("reading all IPAddresses from the API server: %w", err)
	}
	items := map[Key][]*capiipamv1.IPAddress{}
	for i := range list.Items {
		ip := &list.Items[i]
		if key, ok := KeyOf(ip.Spec.PoolRef, ip.Namespace); ok {
			items[key] = append(items[key], ip)
		}
	}
	return items, nil
}

package ipam

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"

	"capstan.dev/capstan/internal/ipam/ledger"
)

// pruneEvery is the interval of Prune.
const pruneEvery = time.Minute

// everyReplica runs in each manager, whether or not it leads.
type everyReplica func(context.Context) error

// Start implements manager.Runnable.
func (f everyReplica) Start(ctx context.Context) error { return f(ctx) }

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (everyReplica) NeedLeaderElection() bool { return false }

// followTimeout bounds the first read of the IPAddresses of all namespaces.
const followTimeout = 15 * time.Second

// follower watches the IPAddresses of all namespaces for a manager whose cache is restricted to one. Other managers also
// allocate from a GlobalCapstanIPPool, and this manager needs the release of their addresses. The watch starts with the
// first such pool, so that managers without one need no permission for it.
type follower struct {
	cache  cache.Cache
	once   sync.Once
	wanted chan struct{}
	ended  chan struct{}
}

// newFollower adds a follower to a manager.
func newFollower(mgr ctrl.Manager) (*follower, error) {
	all, err := cache.New(mgr.GetConfig(), cache.Options{
		Scheme:           mgr.GetScheme(),
		Mapper:           mgr.GetRESTMapper(),
		HTTPClient:       mgr.GetHTTPClient(),
		DefaultTransform: cache.TransformStripManagedFields(),
	})
	if err != nil {
		return nil, fmt.Errorf("following the IPAddresses of all namespaces: %w", err)
	}
	f := &follower{cache: all, wanted: make(chan struct{}), ended: make(chan struct{})}
	return f, mgr.Add(everyReplica(f.run))
}

// notify passes the IPAddresses to the ledgers of GlobalCapstanIPPools.
func (f *follower) notify(ctx context.Context, registry *ledger.Registry) error {
	global := func(do func(*capiipamv1.IPAddress)) func(*capiipamv1.IPAddress) {
		return func(ip *capiipamv1.IPAddress) {
			if key, ok := ledger.KeyOf(ip.Spec.PoolRef, ip.Namespace); ok && key.Namespace == "" {
				do(ip)
			}
		}
	}
	return followKind(ctx, f.cache, global(registry.AddressSeen), global(registry.AddressGone))
}

func (f *follower) run(ctx context.Context) error {
	defer close(f.ended)
	select {
	case <-f.wanted:
		return f.cache.Start(ctx)
	case <-ctx.Done():
		return nil
	}
}

// follow waits until the watch of all IPAddresses has started.
func (f *follower) follow(ctx context.Context) error {
	f.once.Do(func() { close(f.wanted) })
	ctx, cancel := context.WithTimeout(ctx, followTimeout)
	defer cancel()
	go func() {
		select {
		case <-f.ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	if !f.cache.WaitForCacheSync(ctx) {
		return errors.New("the IPAddresses of all namespaces cannot be followed: a GlobalCapstanIPPool needs a manager that may list and watch them")
	}
	return nil
}

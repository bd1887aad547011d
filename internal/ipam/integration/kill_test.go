package integration

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
)

// fuse is a manager's connection. It fails for good at one of the manager's writes: before the write reaches the API
// server, or after it, so that the response is lost. For the API server this is the same as a killed manager.
type fuse struct {
	next http.RoundTripper
	// left is the number of writes that still succeed. If it is negative, all writes succeed.
	left   int
	behind bool

	mu     sync.Mutex
	writes int
	broken chan struct{}
}

var errBroken = errors.New("the manager's connection is broken")

func newFuse(left int, behind bool) *fuse {
	return &fuse{left: left, behind: behind, broken: make(chan struct{})}
}

func (f *fuse) config() *rest.Config {
	config := rest.CopyConfig(env.Config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { f.next = next; return f })
	return config
}

func (f *fuse) RoundTrip(req *http.Request) (*http.Response, error) {
	if !f.passes(req) {
		return nil, errBroken
	}
	res, err := f.next.RoundTrip(req)
	if err == nil && f.isBroken() && req.Method != http.MethodGet {
		_ = res.Body.Close()
		return nil, errBroken
	}
	return res, err
}

// passes counts a write request. It does not count Events, because they have no effect on decisions and their number
// varies.
func (f *fuse) passes(req *http.Request) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.isBroken() {
		return false
	}
	if req.Method == http.MethodGet || strings.Contains(req.URL.Path, "/events") {
		return true
	}
	f.writes++
	if f.left < 0 || f.writes <= f.left {
		return true
	}
	close(f.broken)
	return f.behind
}

func (f *fuse) written() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.writes
}

func (f *fuse) isBroken() bool {
	select {
	case <-f.broken:
		return true
	default:
		return false
	}
}

// IPAM-04c before IPAM-04d: no address is allocated twice, and none is lost. A manager dies at each of its writes,
// before and after it, while a claim is created and deleted, and another claim gets its address. The next manager
// completes all of it. Row IPAM-05.
func TestKilledAtEachWrite(t *testing.T) {
	w := startWitness(t)
	var all int
	t.Run("not killed", func(t *testing.T) {
		f := newFuse(-1, false)
		dieAt(t, f)
		all = f.written()
	})
	if all < 8 { // two finalizers, two IPAddresses, two addressRefs, the record, the pool's finalizer
		t.Fatalf("%d writes were counted", all)
	}
	t.Run("killed", func(t *testing.T) {
		for n := range all {
			for _, behind := range []bool{false, true} {
				t.Run(fmt.Sprintf("write %d, behind %v", n+1, behind), func(t *testing.T) {
					t.Parallel()
					dieAt(t, newFuse(n, behind))
				})
			}
		}
	})
	w.report(t)
}

func dieAt(t *testing.T, f *fuse) {
	ns := env.Namespace(t)
	opts := options()
	opts.WatchNamespace, opts.Quarantine = ns, time.Second
	pool := newPool(ns, "p", subnet("10.8.0.0/24", "10.8.0.10"))
	a, b := newClaim(ns, "a", pool), newClaim(ns, "b", pool)

	stop := startManager(t, f.config(), opts)
	create(t, pool, a)
	f.orUntil(t, "the first claim's address", func() error { return served(a) })
	expect.NoError(t, env.Client.Delete(ctx, a))
	create(t, b)
	f.orUntil(t, "the second claim's address", func() error { return served(b) })
	f.orUntil(t, "the first claim to be removed", func() error { return missing(a) })
	stop()
	wantMarkedFirst(t, pool, a, b)

	startManager(t, env.Config, opts)
	wantAddress(t, b, "10.8.0.10")
	wantGone(t, a)
	expect.Eventually(t, "the pool's record and counts", func() error {
		list := &capiipamv1.IPAddressList{}
		if err := env.Client.List(ctx, list, client.InNamespace(ns)); err != nil || len(list.Items) != 1 {
			return errOr(err, "%d IPAddresses remain", len(list.Items))
		}
		if _, err := get(pool); err != nil {
			return err
		}
		if s := pool.Status; s.Addresses == nil || s.Addresses.Used != 1 || s.Addresses.Free != "0" || s.Addresses.Waiting != 0 {
			return fmt.Errorf("counts are %+v", s.Addresses)
		}
		return nil
	})
}

// wantMarkedFirst checks that every claim with an allocated address has the finalizer (IPAM-04c before IPAM-04d), at
// whichever write the manager has died. Without the finalizer, the deletion of the claim would not release the address.
func wantMarkedFirst(t *testing.T, pool *ipamv1.CapstanIPPool, claims ...*capiipamv1.IPAddressClaim) {
	t.Helper()
	chosen := map[string]bool{} // UIDs of claims
	ips := &capiipamv1.IPAddressList{}
	expect.NoError(t, env.Client.List(ctx, ips, client.InNamespace(pool.Namespace)))
	for _, ip := range ips.Items {
		chosen[string(metav1.GetControllerOf(&ip).UID)] = true
	}
	_, err := get(pool)
	expect.NoError(t, err)
	if record := pool.Status.Allocator; record != nil { // The manager may have died before the record existed.
		for _, pending := range record.Pending {
			chosen[pending.UID] = true
		}
	}
	for _, c := range claims {
		_, err := get(c)
		expect.NoError(t, client.IgnoreNotFound(err))
		if err == nil && chosen[string(c.UID)] && !slices.Contains(c.Finalizers, ipamv1.ClaimFinalizer) {
			t.Errorf("IPAM-04c: an address is chosen for claim %s, and its finalizers are %v", c.Name, c.Finalizers)
		}
	}
}

func served(c *capiipamv1.IPAddressClaim) error {
	if _, err := get(c); err != nil || c.Status.AddressRef.Name == "" {
		return errOr(err, "the claim has no address")
	}
	return nil
}

func missing(c *capiipamv1.IPAddressClaim) error {
	if _, err := get(c); !apierrors.IsNotFound(err) {
		return errOr(err, "the object exists")
	}
	return nil
}

// orUntil waits until the manager is dead or the check succeeds.
func (f *fuse) orUntil(t *testing.T, what string, done func() error) {
	t.Helper()
	expect.Eventually(t, what, func() error {
		if f.isBroken() {
			return nil
		}
		return done()
	})
}

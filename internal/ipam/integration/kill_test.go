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
)

// fuse is a manager's connection, which breaks for good at one of its writes: before that reaches the
// API server, or behind it, so that the answer is lost. To the API server a manager that was killed
// there looks the same.
type fuse struct {
	next http.RoundTripper
	// left is how many writes go through; negative: all of them.
	left   int
	behind bool

	mu     sync.Mutex
	writes int
	broken chan struct{}
}

var errBroken = errors.New("the manager is as good as dead")

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

// passes counts a request that writes. Events are no part of any decision, and come when they like.
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

// IPAM-04c before IPAM-04d, never twice, nothing lost: a manager dies at each of its writes in turn, before it and right behind it,
// while a claim comes, goes, and another one gets its address. The next manager finishes all of it.
// Row IPAM-05.
func TestKilledBetweenAnyTwoWrites(t *testing.T) {
	w := startWitness(t)
	var all int
	t.Run("not killed", func(t *testing.T) {
		f := newFuse(-1, false)
		dieAt(t, f)
		all = f.written()
	})
	if all < 8 { // two finalizers, two IPAddresses, two addressRefs, a record, a pool's finalizer
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
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range w.duplicates {
		t.Errorf("handed out twice: %s", d)
	}
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
	must(t, env.Client.Delete(ctx, a))
	create(t, b)
	f.orUntil(t, "the second claim's address", func() error { return served(b) })
	f.orUntil(t, "the first claim to go", func() error { return missing(a) })
	stop()
	wantMarkedFirst(t, pool, a, b)

	startManager(t, env.Config, opts)
	wantAddress(t, b, "10.8.0.10")
	wantGone(t, a)
	eventually(t, "the pool's record and counts", func() error {
		list := &capiipamv1.IPAddressList{}
		if err := env.Client.List(ctx, list, client.InNamespace(ns)); err != nil || len(list.Items) != 1 {
			return errOr(err, "%d IPAddresses are left", len(list.Items))
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

// wantMarkedFirst checks that every claim that an address was chosen for has the finalizer (IPAM-04c before IPAM-04d),
// wherever the manager has died: without it, a claim that is deleted would take no address back.
func wantMarkedFirst(t *testing.T, pool *ipamv1.CapstanIPPool, claims ...*capiipamv1.IPAddressClaim) {
	t.Helper()
	chosen := map[string]bool{} // UIDs of claims
	ips := &capiipamv1.IPAddressList{}
	must(t, env.Client.List(ctx, ips, client.InNamespace(pool.Namespace)))
	for _, ip := range ips.Items {
		chosen[string(metav1.GetControllerOf(&ip).UID)] = true
	}
	_, err := get(pool)
	must(t, err)
	if record := pool.Status.Allocator; record != nil { // the manager may have died before it had one
		for _, pending := range record.Pending {
			chosen[pending.UID] = true
		}
	}
	for _, c := range claims {
		_, err := get(c)
		must(t, client.IgnoreNotFound(err))
		if err == nil && chosen[string(c.UID)] && !slices.Contains(c.Finalizers, ipamv1.ClaimFinalizer) {
			t.Errorf("IPAM-04c: an address is chosen for claim %s, and its finalizers are %v", c.Name, c.Finalizers)
		}
	}
}

func served(c *capiipamv1.IPAddressClaim) error {
	if _, err := get(c); err != nil || c.Status.AddressRef.Name == "" {
		return errOr(err, "it has none")
	}
	return nil
}

func missing(c *capiipamv1.IPAddressClaim) error {
	if _, err := get(c); !apierrors.IsNotFound(err) {
		return errOr(err, "it is there")
	}
	return nil
}

// orUntil waits until the manager is dead or what it does is done.
func (f *fuse) orUntil(t *testing.T, what string, done func() error) {
	t.Helper()
	eventually(t, what, func() error {
		if f.isBroken() {
			return nil
		}
		return done()
	})
}

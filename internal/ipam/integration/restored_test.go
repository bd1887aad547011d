package integration

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
)

// restoring restores the finalizer of an IPAddress right before its first deletion, like another manager with an older cache.
type restoring struct {
	t    *testing.T
	next http.RoundTripper
	once *sync.Once
	ip   *capiipamv1.IPAddress
}

func (r restoring) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method == http.MethodDelete && strings.HasSuffix(req.URL.Path, "/ipaddresses/"+r.ip.Name) {
		r.once.Do(func() {
			now, err := get(r.ip)
			if err == nil {
				controllerutil.AddFinalizer(now, ipamv1.AddressFinalizer)
				err = env.Client.Update(ctx, now)
			}
			if err != nil {
				r.t.Error(err)
			}
		})
	}
	return r.next.RoundTrip(req)
}

// Another manager restores the finalizer of an IPAddress between the removal of the finalizer and the deletion. No other claim gets the
// address while the IPAddress exists.
func TestFinalizerRestoredMeanwhile(t *testing.T) {
	w := startWitness(t)
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.9.1.0/24", "10.9.1.10-10.9.1.10"))
	a, b := newClaim(ns, "a", pool), newClaim(ns, "b", pool)
	config := rest.CopyConfig(env.Config)
	restored := restoring{t: t, once: &sync.Once{}, ip: &capiipamv1.IPAddress{ObjectMeta: a.ObjectMeta}}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { restored.next = next; return restored })
	opts := options()
	opts.WatchNamespace = ns
	startManager(t, config, opts)
	create(t, pool, a)
	wantAddress(t, a, "10.9.1.10")
	create(t, b)
	expect.NoError(t, env.Client.Delete(ctx, a))
	wantGone(t, a)
	wantAddress(t, b, "10.9.1.10")
	w.report(t)
}

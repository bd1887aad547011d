package integration

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	"capstan.dev/capstan/internal/testenv/expect"
)

// delayed is a connection that keeps the first request to create an IPAddress. The manager gets an error instead of an
// answer, as it does when the API server is too slow. The test executes the request later.
type delayed struct {
	next http.RoundTripper
	once sync.Once
	kept chan []byte
}

// first returns true once.
func (d *delayed) first() (first bool) {
	d.once.Do(func() { first = true })
	return first
}

func (d *delayed) config() *rest.Config {
	config := rest.CopyConfig(env.Config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { d.next = next; return d })
	return config
}

func (d *delayed) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method != http.MethodPost || !strings.HasSuffix(req.URL.Path, "/ipaddresses") || !d.first() {
		return d.next.RoundTrip(req)
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	d.kept <- body
	return nil, errBroken
}

// A request to create an IPAddress ends without an answer. A second request serves the claim, and the claim is deleted.
// No other claim gets the address, because the API server can still execute the first request.
func TestLateCreation(t *testing.T) {
	w := startWitness(t)
	ns := env.Namespace(t)
	d := &delayed{kept: make(chan []byte, 1)}
	opts := options()
	opts.WatchNamespace, opts.Quarantine = ns, time.Minute
	startManager(t, d.config(), opts)
	pool := newPool(ns, "p", subnet("10.9.0.0/24", "10.9.0.10-10.9.0.11"))
	a, b := newClaim(ns, "a", pool), newClaim(ns, "b", pool)
	create(t, pool, a)
	wantAddress(t, a, "10.9.0.10")
	expect.NoError(t, env.Client.Delete(ctx, a))
	wantGone(t, a)
	create(t, b)
	wantAddress(t, b, "10.9.0.11")

	late := &capiipamv1.IPAddress{}
	expect.NoError(t, json.Unmarshal(<-d.kept, late))
	expect.NoError(t, env.Client.Create(ctx, late))
	expect.Eventually(t, "the removal of the late IPAddress", func() error {
		if _, err := get(late); !apierrors.IsNotFound(err) {
			return errOr(err, "it exists")
		}
		return nil
	})
	w.report(t)
}

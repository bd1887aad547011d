package endpoint

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/fake"

	"capstan.dev/capstan/internal/machineapi"
)

// clock of a test. Electors of one test share it, as monotonic clocks with equal rates.
type clock struct{ at time.Duration }

func (c *clock) now() time.Duration { return c.at }

func newElector(t *testing.T, name string, leases dynamic.ResourceInterface, c *clock) *Elector {
	return &Elector{Name: name, Dir: t.TempDir(), Leases: leases, Log: slog.New(slog.DiscardHandler), now: c.now}
}

// term is what capstand reads.
func (e *Elector) term(t *testing.T) (out machineapi.EndpointTerm) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(e.Dir, machineapi.EndpointLeaseFile))
	if err == nil {
		err = json.Unmarshal(data, &out)
	}
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return out
}

// IC-10: however the steps of a holder that becomes silent and of its successor interleave, the term of the first has ended before
// the second one's begins, and the second one has the Lease soon after.
func TestTermsDoNotOverlap(t *testing.T) {
	for offset := time.Duration(0); offset < time.Second; offset += 100 * time.Millisecond {
		client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{})
		leases := client.Resource(schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}).Namespace("kube-system")
		c := &clock{at: time.Hour}
		first, second := newElector(t, "first", leases, c), newElector(t, "second", leases, c)
		// The fake API server has no resource versions, so the test counts the renewals.
		silent, taken := time.Duration(0), time.Duration(0)
		for range 200 {
			c.at += 50 * time.Millisecond
			if silent == 0 && c.at > time.Hour+4*time.Second+offset {
				silent = c.at
			}
			if silent == 0 {
				if first.step(t.Context()); first.own != nil {
					lease := first.own.DeepCopy()
					lease.SetResourceVersion(first.until.String())
					if err := client.Tracker().Update(schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}, lease, "kube-system"); err != nil {
						t.Fatal(err)
					}
				}
			}
			second.step(t.Context())
			if end := second.term(t).Until; end > 0 && taken == 0 {
				taken = c.at
			}
			if taken > 0 && first.term(t).Until >= taken {
				t.Fatalf("the term of the first ends at %s, and that of the second begins at %s", first.term(t).Until, taken)
			}
		}
		if silent == 0 || taken == 0 || taken < silent {
			t.Fatalf("silent at %s, taken at %s", silent, taken)
		}
		if gap := taken - silent; gap > machineapi.EndpointLease+pause {
			t.Errorf("the second takes the Lease %s after the first has become silent", gap)
		}
	}
}

// A machine takes part only while its capstand offers the host.
func TestOffer(t *testing.T) {
	e := newElector(t, "one", nil, &clock{at: time.Hour})
	write := func(until time.Duration) {
		data, _ := json.Marshal(machineapi.EndpointTerm{Until: until})
		if err := os.WriteFile(filepath.Join(e.Dir, machineapi.EndpointOfferFile), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if e.offered() {
		t.Error("without a file")
	}
	if write(time.Hour + time.Second); !e.offered() {
		t.Error("not with an offer")
	}
	if write(time.Hour); e.offered() {
		t.Error("with an offer that has ended")
	}
}

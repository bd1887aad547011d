package cluster

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

func TestTurns(t *testing.T) {
	key := func(name string) client.ObjectKey { return client.ObjectKey{Namespace: "ns", Name: name} }
	now := time.Now()
	turns := turns{wake: make(chan event.TypedGenericEvent[client.ObjectKey], 10)}
	take := func(name, host string, want time.Duration) {
		t.Helper()
		if got := turns.take(key(name), host, 1, now); got != want {
			t.Errorf("%s on %s waits %s, want %s", name, host, got, want)
		}
	}
	take("a", "one", 0)
	take("a", "one", 0) // a repeated request
	take("b", "one", turnLength)
	take("c", "two", 0) // Turns of different hosts are independent.

	turns.done(key("c")) // This wakes the waiting clusters of all hosts.
	if woken := <-turns.wake; woken.Object != key("b") {
		t.Errorf("%s was woken", woken.Object)
	}
	take("b", "one", turnLength)

	now = now.Add(turnLength - time.Second)
	take("b", "one", time.Second)
	now = now.Add(time.Second) // The turn of a ends, because its boot takes too long.
	take("b", "one", 0)

	turns.done(key("a")) // This is late and does not affect the turn of b.
	take("d", "one", turnLength)
	turns.done(key("b"))
	take("d", "one", 0)
}

func TestTurnsSlots(t *testing.T) {
	turns := turns{wake: make(chan event.TypedGenericEvent[client.ObjectKey], 10)}
	for i, want := range []time.Duration{0, 0, turnLength} {
		if got := turns.take(client.ObjectKey{Name: string(rune('a' + i))}, "host", 2, time.Unix(0, 0)); got != want {
			t.Errorf("cluster %d of two slots waits %s, want %s", i, got, want)
		}
	}
}

// Somebody can remove the finalizer of a cluster. The cluster is then gone without its deletion: it has no turn, and does not wait for one.
func TestTurnsOfRemovedCluster(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	r := &Reconciler{Client: fake.NewClientBuilder().WithScheme(scheme).Build()}
	boots, waits := client.ObjectKey{Namespace: "ns", Name: "boots"}, client.ObjectKey{Namespace: "ns", Name: "waits"}
	r.turns.take(boots, "h", 1, time.Now())
	r.turns.take(waits, "h", 1, time.Now())
	for _, key := range []client.ObjectKey{waits, boots} {
		if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key}); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.turns.waiting) > 0 || len(r.turns.booting) > 0 {
		t.Errorf("waiting %v, booting %v", r.turns.waiting, r.turns.booting)
	}
}

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
	slots := bootSlots{wake: make(chan event.TypedGenericEvent[client.ObjectKey], 10)}
	take := func(name, host string, want time.Duration) {
		t.Helper()
		if got := slots.acquire(key(name), host, 1, now); got != want {
			t.Errorf("%s on %s waits %s, want %s", name, host, got, want)
		}
	}
	take("a", "one", 0)
	take("a", "one", 0) // a repeated request
	take("b", "one", slotLength)
	take("c", "two", 0) // Turns of different hosts are independent.

	slots.release(key("c")) // This wakes the waiting clusters of all hosts.
	if woken := <-slots.wake; woken.Object != key("b") {
		t.Errorf("%s was woken", woken.Object)
	}
	take("b", "one", slotLength)

	now = now.Add(slotLength - time.Second)
	take("b", "one", time.Second)
	now = now.Add(time.Second) // The slot of a ends, because its boot takes too long.
	take("b", "one", 0)

	slots.release(key("a")) // This is late and does not affect the slot of b.
	take("d", "one", slotLength)
	slots.release(key("b"))
	take("d", "one", 0)
}

func TestTurnsSlots(t *testing.T) {
	slots := bootSlots{wake: make(chan event.TypedGenericEvent[client.ObjectKey], 10)}
	for i, want := range []time.Duration{0, 0, slotLength} {
		if got := slots.acquire(client.ObjectKey{Name: string(rune('a' + i))}, "host", 2, time.Unix(0, 0)); got != want {
			t.Errorf("cluster %d of two slots waits %s, want %s", i, got, want)
		}
	}
}

// A user can remove the finalizer of a CapstanCluster. The reconciler then finds no object: it releases the slot, and the place in the queue.
func TestTurnsOfRemovedCluster(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	r := &Reconciler{Client: fake.NewClientBuilder().WithScheme(scheme).Build()}
	boots, waits := client.ObjectKey{Namespace: "ns", Name: "boots"}, client.ObjectKey{Namespace: "ns", Name: "waits"}
	r.slots.acquire(boots, "h", 1, time.Now())
	r.slots.acquire(waits, "h", 1, time.Now())
	for _, key := range []client.ObjectKey{waits, boots} {
		if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key}); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.slots.waiting) > 0 || len(r.slots.booting) > 0 {
		t.Errorf("waiting %v, booting %v", r.slots.waiting, r.slots.booting)
	}
}

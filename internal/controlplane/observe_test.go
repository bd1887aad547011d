package controlplane

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"capstan.dev/capstan/internal/reconciling"
)

// A manager forgets the times of a control plane, and of its Machines, with the control plane.
func TestDeletedControlPlaneIsForgotten(t *testing.T) {
	c := fake.NewClientBuilder().WithScheme(env.Client.Scheme()).Build()
	r := newReconciler(c, nil, reconciling.Options{LiveClient: c})
	gone, other := client.ObjectKey{Namespace: "a", Name: "gone"}, client.ObjectKey{Namespace: "a", Name: "other"}
	all := map[string]*sightings{"reached": r.observation.reached, "answered": r.health.answered, "abandoned": &r.deletion.since}
	for _, seen := range all {
		seen.saw(gone, "1", time.Unix(1, 0))
		seen.saw(other, "1", time.Unix(1, 0))
	}
	if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: gone}); err != nil {
		t.Fatal(err)
	}
	for name, seen := range all {
		if len(seen.at) != 1 || len(seen.at[other]) != 1 {
			t.Errorf("%s: expected only the times of %s, found %v", name, other, seen.at)
		}
	}
}

func TestSightings(t *testing.T) {
	var k sightings
	cp, start := client.ObjectKey{Name: "cp"}, time.Unix(1000, 0)
	expect := func(uid types.UID, now, want time.Time) {
		t.Helper()
		if got := k.last(cp, uid, now); !got.Equal(want) {
			t.Errorf("expected %s, found %s", want, got)
		}
	}
	expect("1", start, start)
	expect("1", start.Add(time.Hour), start)
	k.saw(cp, "1", start.Add(time.Minute))
	expect("1", start.Add(time.Hour), start.Add(time.Minute))
	expect("2", start.Add(time.Hour), start.Add(time.Hour)) // A new control plane with the same name.
	k.forgetAllBut(cp, "2")
	if len(k.at[cp]) != 1 {
		t.Errorf("expected one object, found %v", k.at)
	}
	k.forgetAllBut(cp)
	if len(k.at) != 0 {
		t.Errorf("expected no control plane, found %v", k.at)
	}
}

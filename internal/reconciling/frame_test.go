package reconciling_test

import (
	"testing"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// ALL-08: a new object gets the condition Paused together with its other conditions, in one write. A pause is written at once, and so
// is its end.
func TestFrameWritesPaused_ALL08(t *testing.T) {
	c, m := stored(t)
	var wrote []string
	frame := reconciling.Frame{Client: c, Live: c, Wrote: func(_ reconciling.Object, version string) { wrote = append(wrote, version) }}
	reconcile := func(paused bool) (begun *infrav1.CapstanMachine) {
		t.Helper()
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(m), m); err != nil {
			t.Fatal(err)
		}
		cluster := &clusterv1.Cluster{Spec: clusterv1.ClusterSpec{Paused: ptr.To(paused)}}
		patch, err := frame.Begin(t.Context(), cluster, m)
		if err != nil || (patch == nil) != paused {
			t.Fatalf("the reconcile of an object that is paused (%v) continues with %v, %v", paused, patch, err)
		}
		begun = &infrav1.CapstanMachine{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(m), begun); err != nil {
			t.Fatal(err)
		}
		if patch != nil {
			conditions.Set(m, condition("A", "new"))
			if err := frame.End(t.Context(), patch, m); err != nil {
				t.Fatal(err)
			}
		}
		return begun
	}
	read := func(version string) {
		t.Helper()
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(m), m); err != nil {
			t.Fatal(err)
		}
		if m.ResourceVersion != version || !conditions.IsFalse(m, clusterv1.PausedCondition) || conditions.GetReason(m, "A") != "new" {
			t.Errorf("stored version %s, want %s: %+v", m.ResourceVersion, version, m.Status.Conditions)
		}
	}

	before := m.ResourceVersion
	if begun := reconcile(false); begun.ResourceVersion != before {
		t.Error("the start of the reconcile has written the object")
	}
	if len(wrote) != 1 {
		t.Fatalf("Wrote was called with %v", wrote)
	}
	read(wrote[0])
	reconcile(false)
	if len(wrote) != 1 {
		t.Errorf("a reconcile without changes wrote %v", wrote)
	}
	if begun := reconcile(true); !conditions.IsTrue(begun, clusterv1.PausedCondition) {
		t.Errorf("paused: %+v", begun.Status.Conditions)
	}
	if begun := reconcile(false); !conditions.IsFalse(begun, clusterv1.PausedCondition) {
		t.Errorf("not paused any more: %+v", begun.Status.Conditions)
	}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(m), m); err != nil {
		t.Fatal(err)
	}
	m.Generation++
	if err := c.Update(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	reconcile(false)
	if got := conditions.Get(m, clusterv1.PausedCondition); got == nil || got.ObservedGeneration != m.Generation {
		t.Errorf("Paused after a change of the spec, generation %d: %+v", m.Generation, got)
	}
}

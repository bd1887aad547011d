package reconciling_test

import (
	"testing"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"capstan.dev/capstan/internal/reconciling"
)

// TestControlPlaneInitialized: of all events, only one update lets the objects of a cluster continue.
func TestControlPlaneInitialized(t *testing.T) {
	waiting, failed, initialized := &clusterv1.Cluster{}, &clusterv1.Cluster{}, &clusterv1.Cluster{}
	failed.Status.Initialization.ControlPlaneInitialized = ptr.To(false)
	initialized.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
	p := reconciling.ControlPlaneInitialized()
	for name, tc := range map[string]struct {
		before, after *clusterv1.Cluster
		want          bool
	}{
		"it answers":         {before: waiting, after: initialized, want: true},
		"after false":        {before: failed, after: initialized, want: true},
		"no change":          {before: initialized, after: initialized},
		"nothing yet":        {before: waiting, after: failed},
		"the status is lost": {before: initialized, after: waiting},
	} {
		if got := p.Update(event.UpdateEvent{ObjectOld: tc.before, ObjectNew: tc.after}); got != tc.want {
			t.Errorf("%s: got %t, want %t", name, got, tc.want)
		}
	}
	if p.Create(event.CreateEvent{Object: initialized}) || p.Delete(event.DeleteEvent{Object: initialized}) || p.Generic(event.GenericEvent{Object: initialized}) {
		t.Error("expected no event but updates")
	}
}

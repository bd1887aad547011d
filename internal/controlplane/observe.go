package controlplane

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/controlplane/model"
)

// observation is the step that reads the Machines and the workload cluster.
type observation struct {
	*machineReader
	workloads *workloads
	// reached is the time of the last successful request to a workload cluster.
	reached *sightings
}

// reconcile reads the state of the Machines: the differences from the spec, and the state in the workload cluster. The next
// reconciliation is when that state is outdated.
func (r *observation) reconcile(ctx context.Context, s *scope) (result, error) {
	key := client.ObjectKeyFromObject(s.Object)
	// Until it answers. The Machines that cannot be read say nothing about it.
	s.Interrupted = s.Initialized() && s.Now.Sub(r.reached.last(key, s.Object.UID, s.Now)) < model.Grace
	if err := r.findOutdated(ctx, s); err != nil {
		return result{}, err
	}
	s.Workload = r.workloads.look(ctx, s)
	measure(s)
	if !s.Initialized() {
		return result{}, nil
	}
	if f := s.Fleet(); f.Unknown == "" {
		s.Interrupted = false
		r.reached.saw(key, s.Object.UID, s.Now)
		return requeueAfter(f.LookAgain(s.Workload.Stale(s.Now), s.Now)), nil
	}
	switch {
	case s.client == nil:
		return result{}, nil // A connection that is made is an event.
	case s.Workload.Care.Alive(s.Now) == metav1.ConditionUnknown:
		return requeueAfter(model.FirstRetry), nil
	}
	return requeueAfter(model.SilentRetry(s.Object, s.Now)), nil
}

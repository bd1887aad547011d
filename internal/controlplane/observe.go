package controlplane

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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

// reconcile reads the state of the Machines: the differences from the spec, and the state in the workload cluster.
// again is the time until that state is outdated.
func (r *observation) reconcile(ctx context.Context, s *scope) (result, error) {
	if err := r.findOutdated(ctx, s); err != nil {
		return result{}, err
	}
	s.Workload = r.workloads.look(ctx, s)
	measure(s)
	if !s.Initialized() {
		return result{}, nil
	}
	if f := s.Fleet(); f.Unknown == "" {
		r.reached.saw(client.ObjectKeyFromObject(s.Object), s.Object.UID, s.Now)
		return requeueAfter(f.LookAgain(s.Workload.Stale(s.Now), s.Now)), nil
	}
	s.Interrupted = s.Now.Sub(r.reached.last(client.ObjectKeyFromObject(s.Object), s.Object.UID, s.Now)) < model.Grace
	switch {
	case s.client == nil:
		return result{}, nil // A connection that is made is an event.
	case s.Workload.Care.Alive(s.Now) == metav1.ConditionUnknown:
		return requeueAfter(model.FirstRetry), nil
	}
	return requeueAfter(model.SilentRetry(s.Object, s.Now)), nil
}

// sightings contains times by the UIDs of objects: of control planes, or of their Machines. It has them by control plane, so that they
// are forgotten with it.
type sightings struct {
	mu sync.Mutex
	at map[client.ObjectKey]map[types.UID]time.Time
}

func (k *sightings) saw(controlPlane client.ObjectKey, uid types.UID, at time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.of(controlPlane)[uid] = at
}

// last returns the last time of an object. It is now if there was none.
func (k *sightings) last(controlPlane client.ObjectKey, uid types.UID, now time.Time) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	of := k.of(controlPlane)
	if _, ok := of[uid]; !ok {
		of[uid] = now
	}
	return of[uid]
}

// forgetAllBut forgets the objects of a control plane that are not in left.
func (k *sightings) forgetAllBut(controlPlane client.ObjectKey, left ...types.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.at[controlPlane], func(uid types.UID, _ time.Time) bool { return !slices.Contains(left, uid) })
	if len(k.at[controlPlane]) == 0 {
		delete(k.at, controlPlane)
	}
}

// of returns the times of the objects of a control plane; mu is held.
func (k *sightings) of(controlPlane client.ObjectKey) map[types.UID]time.Time {
	if k.at == nil {
		k.at = map[client.ObjectKey]map[types.UID]time.Time{}
	}
	if k.at[controlPlane] == nil {
		k.at[controlPlane] = map[types.UID]time.Time{}
	}
	return k.at[controlPlane]
}

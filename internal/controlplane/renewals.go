package controlplane

import (
	"maps"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// renewal is when the holder of a Lease last gave a sign of life, by our own clock: the clocks of hosts may be
// wrong. As in leader election it is one that the Lease changes, whatever is written in it.
type renewal struct {
	// at is not before that; zero when there is no Lease.
	at time.Time
	// seen says that the Lease has changed before our eyes. Until then it may be from any time.
	seen bool
}

// alive says whether the holder lives. A Lease that we meet for the first time says so with its next renewal.
func (r renewal) alive(now time.Time) metav1.ConditionStatus {
	switch {
	case r.at.IsZero() || now.Sub(r.at) > leaseDuration:
		return metav1.ConditionFalse
	case !r.seen:
		return metav1.ConditionUnknown
	}
	return metav1.ConditionTrue
}

// glance is what a Lease said when we looked.
type glance struct {
	renewal
	holder string
	said   time.Time
}

// compare says what follows from a Lease, with what it said before if it was there at the last look.
func compare(lease *coordinationv1.Lease, before *glance, last, now time.Time) glance {
	out := glance{renewal: renewal{at: now}, holder: ptr.Deref(lease.Spec.HolderIdentity, "")}
	if lease.Spec.RenewTime != nil {
		out.said = lease.Spec.RenewTime.Time
	}
	switch {
	case before == nil:
		// It was made since. With clocks that agree it is no former one that a restore has brought back.
		out.seen = now.Sub(last) <= leaseDuration && out.said.Sub(now).Abs() <= leaseDuration
	case out.said.Equal(before.said):
		return *before
	case out.said.After(before.said):
		out.seen = true
		// What passed between two renewals is the same by any clock: this one was no later than that.
		if at := before.at.Add(out.said.Sub(before.said)); out.holder == before.holder && at.After(last) && at.Before(now) {
			out.at = at
		}
	}
	return out // One from earlier, by a clock that was set back or by a restore, is as new to us.
}

// renewals remembers from one look at a workload cluster to the next what its Leases said.
type renewals struct {
	mu    sync.Mutex
	looks map[lookKey]look
}

// lookKey names what is looked at together.
type lookKey struct {
	controlPlane types.NamespacedName
	what         string
}

const (
	ofAPIServers = "API servers"
	ofCare       = "care"
)

type look struct {
	at     time.Time
	leases map[types.UID]glance
}

// saw says when each of the Leases was renewed. They are all that there are: the others are forgotten.
func (r *renewals) saw(key lookKey, leases []coordinationv1.Lease, now time.Time) map[types.UID]renewal {
	r.mu.Lock()
	defer r.mu.Unlock()
	last := r.looks[key]
	next, out := look{at: now, leases: map[types.UID]glance{}}, map[types.UID]renewal{}
	for i := range leases {
		uid := leases[i].UID
		var before *glance
		if known, ok := last.leases[uid]; ok {
			before = &known
		}
		next.leases[uid] = compare(&leases[i], before, last.at, now)
		out[uid] = next.leases[uid].renewal
	}
	r.keep(key, next)
	return out
}

// begin is for a cluster whose API server has answered for the first time: it has no Lease from before that.
func (r *renewals) begin(controlPlane types.NamespacedName, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, what := range []string{ofAPIServers, ofCare} {
		key := lookKey{controlPlane, what}
		if _, ok := r.looks[key]; !ok {
			r.keep(key, look{at: now})
		}
	}
}

func (r *renewals) keep(key lookKey, l look) {
	if r.looks == nil {
		r.looks = map[lookKey]look{}
	}
	r.looks[key] = l
}

// forget is for a control plane that is gone.
func (r *renewals) forget(controlPlane types.NamespacedName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.looks, func(key lookKey, _ look) bool { return key.controlPlane == controlPlane })
}

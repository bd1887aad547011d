package model

import (
	"maps"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// Renewal is the time of the last sign of life of a Lease holder, by the clock of this manager: the clocks of hosts may be
// wrong. As in leader election, a sign of life is a change of the Lease, regardless of its content.
type Renewal struct {
	// At is the latest possible time of the sign of life; zero without a Lease.
	At time.Time
	// Changed: this manager has seen the Lease change. Before that, the Lease may be of any age.
	Changed bool
}

// Alive reports whether the holder lives. The answer for a Lease that is new to this manager is Unknown until its next
// renewal.
func (r Renewal) Alive(now time.Time) metav1.ConditionStatus {
	switch {
	case r.At.IsZero() || now.Sub(r.At) > leaseDuration:
		return metav1.ConditionFalse
	case !r.Changed:
		return metav1.ConditionUnknown
	}
	return metav1.ConditionTrue
}

// observation is the content of a Lease at one look.
type observation struct {
	Renewal
	holder    string
	renewTime time.Time
}

// observe compares a Lease with its content at the last look; before is nil when it did not exist then.
func observe(lease *coordinationv1.Lease, before *observation, last, now time.Time) observation {
	out := observation{Renewal: Renewal{At: now}, holder: ptr.Deref(lease.Spec.HolderIdentity, "")}
	if lease.Spec.RenewTime != nil {
		out.renewTime = lease.Spec.RenewTime.Time
	}
	switch {
	case before == nil:
		// It was created since the last look. With synchronized clocks it does not come from a restored backup.
		out.Changed = now.Sub(last) <= leaseDuration && out.renewTime.Sub(now).Abs() <= leaseDuration
	case out.renewTime.Equal(before.renewTime):
		return *before
	case out.renewTime.After(before.renewTime):
		out.Changed = true
		// The time between two renewals is the same by any clock, so this renewal happened no later than that.
		if at := before.At.Add(out.renewTime.Sub(before.renewTime)); out.holder == before.holder && at.After(last) && at.Before(now) {
			out.At = at
		}
	}
	return out // An earlier time, after a clock change or a restore, counts as a new Lease.
}

// LeaseHistory keeps the content of Leases between two reads of a workload cluster.
type LeaseHistory struct {
	mu   sync.Mutex
	sets map[LeaseSetKey]leaseSet
}

// LeaseSetKey identifies Leases that are read together.
type LeaseSetKey struct {
	ControlPlane types.NamespacedName
	Set          string
}

// Sets of Leases of a workload cluster.
const (
	// LeasesOfAPIServers are the Leases that each API server renews while it works.
	LeasesOfAPIServers = "API servers"
	// LeaseOfEtcdCare is the Lease of the node agent that reports the states of etcd's members.
	LeaseOfEtcdCare = "care"
)

type leaseSet struct {
	at     time.Time
	leases map[types.UID]observation
}

// Observe returns the last renewal of each Lease. The list is complete: other Leases are forgotten.
func (r *LeaseHistory) Observe(key LeaseSetKey, leases []coordinationv1.Lease, now time.Time) map[types.UID]Renewal {
	r.mu.Lock()
	defer r.mu.Unlock()
	last := r.sets[key]
	next, out := leaseSet{at: now, leases: map[types.UID]observation{}}, map[types.UID]Renewal{}
	for i := range leases {
		uid := leases[i].UID
		var before *observation
		if known, ok := last.leases[uid]; ok {
			before = &known
		}
		next.leases[uid] = observe(&leases[i], before, last.at, now)
		out[uid] = next.leases[uid].Renewal
	}
	r.keep(key, next)
	return out
}

// Begin records that a cluster whose API server has answered for the first time had no Lease before.
func (r *LeaseHistory) Begin(controlPlane types.NamespacedName, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, what := range []string{LeasesOfAPIServers, LeaseOfEtcdCare} {
		key := LeaseSetKey{controlPlane, what}
		if _, ok := r.sets[key]; !ok {
			r.keep(key, leaseSet{at: now})
		}
	}
}

func (r *LeaseHistory) keep(key LeaseSetKey, l leaseSet) {
	if r.sets == nil {
		r.sets = map[LeaseSetKey]leaseSet{}
	}
	r.sets[key] = l
}

// Forget removes a control plane that does not exist any more.
func (r *LeaseHistory) Forget(controlPlane types.NamespacedName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.sets, func(key LeaseSetKey, _ leaseSet) bool { return key.ControlPlane == controlPlane })
}

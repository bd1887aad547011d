package pool

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
	"capstan.dev/capstan/internal/ipam/ledger"
)

// overlap is another pool with some of the same addresses.
type overlap struct {
	other   ledger.Key
	first   alloc.Range
	v6      bool
	refused bool
}

// String describes the overlap.
func (o overlap) String() string {
	s := fmt.Sprintf("has %s-%s in common with %s", o.first.First.Addr(o.v6), o.first.Last.Addr(o.v6), o.other)
	if o.refused {
		s += ", which is refused: change one of them"
	}
	return s
}

// sees reports whether a pool is compared with another one. A CapstanIPPool is compared with the pools of its namespace
// and the global ones. A GlobalCapstanIPPool is compared only with global ones. A namespace can therefore neither block
// the pools of other namespaces nor read their names in messages.
func sees(p, other ipamv1.Pool) bool {
	return other.GetNamespace() == "" || other.GetNamespace() == p.GetNamespace()
}

// overlapsOf finds the pools that have addresses in common with a pool, among those that it is compared with.
func overlapsOf(of ipamv1.Pool, others []ipamv1.Pool, plans PlanFunc) []overlap {
	mine := plans(of)
	if mine == nil {
		return nil
	}
	key := ledger.KeyOfPool(of)
	var found []overlap
	for _, other := range others {
		otherKey := ledger.KeyOfPool(other)
		theirs := plans(other)
		if otherKey == key || !sees(of, other) || theirs == nil || theirs.V6 != mine.V6 {
			continue
		}
		if common, ok := mine.Pool.Overlap(theirs.Pool); ok {
			found = append(found, overlap{otherKey, common, mine.V6, refuse(of, other) && yields(of, other)})
		}
	}
	slices.SortFunc(found, func(a, b overlap) int { return compareKeys(a.other, b.other) })
	return found
}

// refuse reports whether one of two pools refuses common addresses.
func refuse(a, b ipamv1.Pool) bool {
	return a.PoolSpec().Overlap == ipamv1.RefuseOverlap || b.PoolSpec().Overlap == ipamv1.RefuseOverlap
}

// Refused returns the reason why a new or changed pool must not overlap another one, or nothing. old is the pool before
// its change, or nil. The common addresses that old has as well are no reason: the other pool can be younger and still be
// valid, and the pool must stay editable.
func Refused(of, old ipamv1.Pool, others []ipamv1.Pool, plans PlanFunc) []string {
	var out []string
	for _, o := range overlapsOf(of, others, plans) {
		other := others[slices.IndexFunc(others, func(p ipamv1.Pool) bool { return ledger.KeyOfPool(p) == o.other })]
		if !refuse(of, other) {
			continue
		}
		if old != nil && refuse(old, other) {
			var grows bool
			if o.first, grows = added(plans(of), plans(old)).Overlap(plans(other).Pool); !grows {
				continue
			}
		}
		o.refused = true
		out = append(out, o.String())
	}
	return out
}

// added returns the addresses of a plan that the plan before it did not have.
func added(now, before *alloc.Plan) alloc.Ranges {
	if before == nil || before.V6 != now.V6 {
		return now.Pool
	}
	return now.Pool.Without(before.Pool)
}

func compareKeys(a, b ledger.Key) int {
	switch {
	case a.String() < b.String():
		return -1
	case a.String() > b.String():
		return 1
	}
	return 0
}

// yields reports which of two incompatible pools is refused. The namespaced one is refused rather than the global one,
// so that a namespace cannot block a global pool. Of two pools of a kind, the younger one is refused, so that a new pool
// cannot block an old one.
func yields(p, other ipamv1.Pool) bool {
	if namespaced := p.GetNamespace() != ""; namespaced != (other.GetNamespace() != "") {
		return namespaced
	}
	return younger(p, other)
}

// younger reports which of two pools was created later. A pool that is not stored yet has no creation time and is the
// younger.
func younger(a, b ipamv1.Pool) bool {
	ta, tb := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	switch {
	case ta.IsZero() || tb.IsZero():
		return ta.IsZero()
	case !ta.Time.Equal(tb.Time):
		return ta.After(tb.Time)
	}
	return compareKeys(ledger.KeyOfPool(a), ledger.KeyOfPool(b)) > 0
}

// PlanFunc compiles the spec of a pool. It returns nil for an invalid one.
type PlanFunc func(ipamv1.Pool) *alloc.Plan

// Compile is a PlanFunc.
func Compile(p ipamv1.Pool) *alloc.Plan {
	plan, errs := alloc.Compile(p.PoolSpec(), field.NewPath("spec"))
	if len(errs) > 0 {
		return nil
	}
	return plan
}

// planCache caches the plans of pools by UID and generation, because every change of a pool compares it with all others.
type planCache map[types.UID]cachedPlan

// mostPlans is the size of the cache. A full cache is cleared, which also removes the plans of deleted pools.
const mostPlans = 10_000

type cachedPlan struct {
	generation int64
	plan       *alloc.Plan
}

func (c planCache) get(p ipamv1.Pool) *alloc.Plan {
	if old, ok := c[p.GetUID()]; ok && old.generation == p.GetGeneration() {
		return old.plan
	}
	plan := Compile(p)
	c[p.GetUID()] = cachedPlan{p.GetGeneration(), plan}
	return plan
}

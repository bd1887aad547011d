package ledger

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
)

// pendingEntry is an address that is allocated to a claim and whose IPAddress may not exist yet.
type pendingEntry struct {
	uid   types.UID
	claim types.NamespacedName
	span  alloc.Range
	// until is the time until which a request to create the IPAddress may be in progress.
	until time.Time
	// marked is the time when this process wrote it into the record. For a short time after that the process may create
	// the IPAddress. Later it must write the record again. It is zero when another process wrote it.
	marked time.Time
	// shared is the time until which another process, an abandoned reconciliation, or a request without an answer may
	// still create the IPAddress. The address stays used until then. It is zero without such a request.
	shared time.Time
	// done is true if this process will not create the IPAddress any more.
	done bool
}

// outstanding reports whether a request to create the IPAddress may still be in progress.
func (e *pendingEntry) outstanding(now time.Time) bool {
	return !e.done || e.shared.After(now)
}

// readPending returns the pending allocations of a record. The processes that wrote them may still create the
// IPAddresses.
func readPending(record *ipamv1.AllocatorStatus, space *space) map[types.UID]*pendingEntry {
	out := map[types.UID]*pendingEntry{}
	if record == nil {
		return out
	}
	for _, r := range record.Pending {
		a, err := alloc.ParseAddr(r.Address)
		if err != nil || a.Is6() != space.plan.V6 {
			continue
		}
		out[types.UID(r.UID)] = &pendingEntry{
			uid:    types.UID(r.UID),
			claim:  types.NamespacedName{Namespace: r.Namespace, Name: r.Name},
			span:   space.block(alloc.FromAddr(a)),
			until:  r.Until.Time,
			shared: r.Until.Time,
		}
	}
	return out
}

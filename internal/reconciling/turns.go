package reconciling

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	// slowTurn is the duration of a turn from which its namespace is slow, for slowFor.
	slowTurn, slowFor = 3 * time.Second, 10 * time.Minute
	// retryPause and slowRetryPause are the shortest times until the next attempt of an object without a turn, in another and in a slow
	// namespace.
	retryPause, slowRetryPause = 100 * time.Millisecond, time.Second
)

// Turns bounds how many workers of a controller wait for the API servers of workload clusters, or for hosts. Tenants control these servers
// and can let all requests wait, and a namespace can have any number of clusters. A namespace takes a part of the workers, and all
// namespaces that were slow lately take half of them together. One of them leaves a tenth of this half to the rest of them. The other half is
// for namespaces whose API servers answer. The same holds for hosts, if a controller takes the turns of a host by its name.
type Turns struct {
	// The largest numbers of turns at a time.
	perNamespace, perSlowNamespace, allSlowNamespaces int
	now                                               func() time.Time

	mu sync.Mutex
	// taken turns by namespace.
	taken     map[string]int
	slowUntil map[string]time.Time
}

// NewTurns returns the turns of a controller with a number of workers, of which a namespace takes a number at most.
func NewTurns(workers, perNamespace int) *Turns {
	perNamespace, allSlow := max(1, perNamespace), max(1, workers/2)
	return &Turns{
		perNamespace: perNamespace, perSlowNamespace: min(perNamespace, leaveTenth(allSlow)), allSlowNamespaces: allSlow,
		now: time.Now, taken: map[string]int{}, slowUntil: map[string]time.Time{},
	}
}

// FairTurns returns the turns of a controller with a number of workers, of which a namespace leaves a tenth to others.
func FairTurns(workers int) *Turns { return NewTurns(workers, leaveTenth(workers)) }

// leaveTenth returns how many of a number of turns one namespace takes at most: it leaves a tenth, and at least one if there are two.
func leaveTenth(turns int) int { return max(1, turns-max(1, turns/10)) }

// Take returns the function that ends a turn. It is nil if the namespace gets none now, and again is the time until the next attempt: no
// event follows the end of another turn. waited is the time that the turn has waited for an API server or a host.
func (t *Turns) Take(namespace string) (end func(waited time.Duration), again time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	isSlow := t.isSlow(namespace)
	switch {
	case isSlow && (t.taken[namespace] >= t.perSlowNamespace || t.takenBySlow() >= t.allSlowNamespaces):
		return nil, wait.Jitter(slowRetryPause, 1)
	case t.taken[namespace] >= t.perNamespace:
		return nil, wait.Jitter(retryPause, 1)
	}
	t.taken[namespace]++
	return func(waited time.Duration) { t.end(namespace, waited) }, 0
}

// TakeTimed is Take for a turn that waits from its begin to its end.
func (t *Turns) TakeTimed(namespace string) (end func(), again time.Duration) {
	endAfter, again := t.Take(namespace)
	if endAfter == nil {
		return nil, again
	}
	start := t.now()
	return func() { endAfter(t.now().Sub(start)) }, 0
}

func (t *Turns) end(namespace string, waited time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.taken[namespace]--; t.taken[namespace] == 0 {
		delete(t.taken, namespace)
	}
	if waited > slowTurn {
		t.slowUntil[namespace] = t.now().Add(slowFor)
	}
}

// isSlow forgets the namespaces that are not slow any more; mu is held.
func (t *Turns) isSlow(namespace string) bool {
	now := t.now()
	maps.DeleteFunc(t.slowUntil, func(_ string, until time.Time) bool { return !now.Before(until) })
	_, found := t.slowUntil[namespace]
	return found
}

// takenBySlow is the number of turns of slow namespaces; mu is held.
func (t *Turns) takenBySlow() (sum int) {
	for namespace := range t.slowUntil {
		sum += t.taken[namespace]
	}
	return sum
}

// Fair returns a reconciler of a controller with a number of workers, of which the objects of a namespace leave a tenth to others. It is
// for reconcilers that wait for API servers of workload clusters, or for hosts.
func Fair(workers int, r reconcile.Reconciler) reconcile.Reconciler {
	turns := FairTurns(workers)
	return reconcile.Func(func(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
		end, again := turns.TakeTimed(request.Namespace)
		if end == nil {
			return ctrl.Result{RequeueAfter: again}, nil
		}
		defer end()
		return r.Reconcile(ctx, request)
	})
}

package machine

import (
	"context"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"

	"capstan.dev/capstan/internal/reconciling"
)

// longWait is the time after which a condition shows that a machine waits for its turn. Machines that are made together wait shorter.
const longWait = 10 * time.Second

// turnWaits are the machines that wait for their turn of a host.
type turnWaits struct {
	mu    sync.Mutex
	since map[client.ObjectKey]attempts
}

// attempts to get a turn without a success: the times of the first and of the last one.
type attempts struct{ first, last time.Time }

// long records an attempt without a success, and returns whether there was none for longWait. A machine that made no attempt for that long
// waited for something else, and begins again.
func (w *turnWaits) long(key client.ObjectKey, now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.since == nil {
		w.since = map[client.ObjectKey]attempts{}
	}
	a := w.since[key]
	if now.Sub(a.last) >= longWait {
		a.first = now
	}
	a.last = now
	w.since[key] = a
	return now.Sub(a.first) >= longWait
}

func (w *turnWaits) end(key client.ObjectKey) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.since, key)
}

// turn begins calls to a host or about it, and returns the function that ends them. Root on a host can let all calls wait. Without a turn
// the reconcile is repeated, so that other hosts have workers. show shows a longer wait in a condition.
func (r *Reconciler) turn(ctx context.Context, s *scope, host string, show func(s *scope, host string)) (end func(), err error) {
	key := client.ObjectKeyFromObject(s.capstan)
	end, again := r.turns.TakeTimed(host)
	if end == nil {
		ctrl.LoggerFrom(ctx).V(4).Info("Other calls to the host have to end first", "CapstanHost", klog.KRef("", host), "again", again)
		if r.waiting.long(key, time.Now()) {
			show(s, host)
		}
		s.again = again
		return nil, reconciling.ErrWaiting
	}
	r.waiting.end(key)
	return end, nil
}

// showWait sets a condition of a machine that is not complete yet, or is being deleted. The text is the same for each attempt, so only the
// first one is a write. The conditions of another machine come from reports of its host, which need no turn.
func showWait(s *scope, host string) {
	const format = "Host %s does not answer the calls for other machines, and this machine waits for its turn. If this lasts, restart capstand on the host, or look for the cause in its log"
	switch {
	case !s.capstan.DeletionTimestamp.IsZero():
		reconciling.SetCondition(s.capstan, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.WaitingForTurnReason, format, host)
	case s.capstan.Spec.ProviderID == "":
		reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForTurnReason, format, host)
	}
}

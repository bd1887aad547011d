package connections

import (
	"context"
	"testing"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// TestSourceAfter: requests of a source with a delay are not in the queue at once, and several events of one object are one request.
func TestSourceAfter(t *testing.T) {
	for name, tc := range map[string]struct {
		delay time.Duration
		want  int
	}{"at once": {0, 1}, "later": {time.Hour, 0}} {
		p := &Pool{}
		queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
		t.Cleanup(queue.ShutDown)
		if err := p.SourceAfter(tc.delay, func(_ context.Context, e Event) []reconcile.Request {
			return []reconcile.Request{{NamespacedName: client.ObjectKey{Name: e.Host}}}
		}).Start(t.Context(), queue); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			p.notify(Event{Host: "h", Capacity: true})
		}
		if got := queue.Len(); got != tc.want {
			t.Errorf("%s: %d requests, want %d", name, got, tc.want)
		}
	}
}

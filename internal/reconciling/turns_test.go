package reconciling

import (
	"context"
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// must takes turns of a namespace, or fails the test.
func must(t *testing.T, turns *Turns, namespace string, n int) (ends []func(time.Duration)) {
	t.Helper()
	for i := range n {
		end, _ := turns.Take(namespace)
		if end == nil {
			t.Fatalf("namespace %s has %d turns, expected %d", namespace, i, n)
		}
		ends = append(ends, end)
	}
	return ends
}

// none fails the test if a namespace has a turn left, or would try again at another time than between a pause and its double.
func none(t *testing.T, turns *Turns, namespace string, pause time.Duration) {
	t.Helper()
	if end, again := turns.Take(namespace); end != nil || again < pause || again > 2*pause {
		t.Fatalf("namespace %s has one turn more, or tries again after %s", namespace, again)
	}
}

func endAll(ends []func(time.Duration), waited time.Duration) {
	for _, end := range ends {
		end(waited)
	}
}

// A namespace takes its turns, gives them back, and takes none of another namespace.
func TestTurns(t *testing.T) {
	turns := NewTurns(20, 2)
	first := must(t, turns, "a", 2)
	none(t, turns, "a", retryPause)
	endAll(must(t, turns, "b", 2), 0)
	endAll(first, 0)
	must(t, turns, "a", 2)
	few := NewTurns(3, 0)
	must(t, few, "a", 1)
	none(t, few, "a", retryPause)
}

// Any number of namespaces whose API servers are slow leave half of the workers to the others, also while a server answers at times.
func TestSlowNamespaces(t *testing.T) {
	now := time.Now()
	turns := NewTurns(50, 5)
	turns.now = func() time.Time { return now }
	var ends []func(time.Duration)
	for n := range 10 { // They are not known yet.
		ends = append(ends, must(t, turns, fmt.Sprint("hostile-", n), 5)...)
	}
	endAll(ends, 30*time.Second)
	for n := range 10 {
		endAll(must(t, turns, fmt.Sprint("hostile-", n), 1), 0) // This answer changes nothing.
	}
	for n := range 5 {
		must(t, turns, fmt.Sprint("hostile-", n), 5)
	}
	for n := range 10 {
		none(t, turns, fmt.Sprint("hostile-", n), slowRetryPause)
	}
	for n := range 5 {
		must(t, turns, fmt.Sprint("other-", n), 5)
	}
	now = now.Add(slowFor)
	must(t, turns, "hostile-9", 5)
}

// A slow namespace leaves turns to a namespace that gets slow later, with any number of workers that gives slow namespaces two turns.
func TestSlowNamespaceLeavesTurns(t *testing.T) {
	for _, test := range []struct{ workers, most, rest int }{{1, 1, 0}, {3, 1, 0}, {4, 1, 1}, {10, 4, 1}, {50, 23, 2}} {
		turns := FairTurns(test.workers)
		for _, namespace := range []string{"a", "b"} {
			endAll(must(t, turns, namespace, 1), slowTurn+1)
		}
		must(t, turns, "a", test.most)
		none(t, turns, "a", slowRetryPause)
		must(t, turns, "b", test.rest)
		none(t, turns, "b", slowRetryPause)
	}
}

// The duration of a turn decides whether its namespace is slow.
func TestTakeTimed(t *testing.T) {
	now := time.Now()
	turns := NewTurns(6, 5)
	turns.now = func() time.Time { return now }
	for _, test := range []struct {
		takes time.Duration
		slow  bool
	}{{slowTurn, false}, {slowTurn + 1, true}} {
		end, _ := turns.TakeTimed("a")
		now = now.Add(test.takes)
		end()
		if found := turns.isSlow("a"); found != test.slow {
			t.Errorf("after a turn of %s the namespace is slow: %v", test.takes, found)
		}
	}
	must(t, turns, "a", 2)
	if end, again := turns.TakeTimed("a"); end != nil || again < slowRetryPause {
		t.Errorf("a slow namespace has a turn more, or another attempt after %s", again)
	}
}

// The objects of a namespace leave workers to others, and are reconciled later.
func TestFair(t *testing.T) {
	started, release := make(chan string, 100), make(chan struct{})
	r := Fair(10, reconcile.Func(func(_ context.Context, request ctrl.Request) (ctrl.Result, error) {
		started <- request.Namespace
		<-release
		return ctrl.Result{}, nil
	}))
	results := make(chan time.Duration, 100)
	start := func(namespace string) {
		go func() {
			result, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Namespace: namespace}})
			if err != nil {
				t.Error(err)
			}
			results <- result.RequeueAfter
		}()
	}
	for range 9 {
		start("a")
	}
	for range 9 {
		<-started
	}
	start("a")
	select {
	case <-started:
		t.Error("the namespace takes the last worker")
	case again := <-results:
		if again <= 0 {
			t.Error("expected another attempt")
		}
	}
	start("b")
	if namespace := <-started; namespace != "b" {
		t.Errorf("found %s, expected b", namespace)
	}
	close(release)
	for range 10 {
		<-results
	}
	start("a")
	if again := <-results; again != 0 {
		t.Error("the namespace got no turn back")
	}
}

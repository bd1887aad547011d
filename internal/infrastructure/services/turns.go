package services

import "sync"

// turns bounds how many clusters of a namespace wait for their API servers at the same time. Tenants control these servers and can let all
// requests wait, and a namespace can have any number of clusters.
type turns struct {
	// most for a namespace.
	most  int
	mu    sync.Mutex
	taken map[string]int
}

// share is the part of the workers that one namespace can occupy: one of ten.
const share = 10

// newTurns returns the turns of a controller with a number of workers.
func newTurns(workers int) *turns {
	return &turns{most: max(1, workers/share), taken: map[string]int{}}
}

// take returns the function that ends the turn, or nil if the namespace has no turn left.
func (t *turns) take(namespace string) (done func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.taken[namespace] >= t.most {
		return nil
	}
	t.taken[namespace]++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.taken[namespace]--; t.taken[namespace] == 0 {
			delete(t.taken, namespace)
		}
	}
}

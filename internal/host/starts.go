package host

import (
	"context"
	"sync"
)

// starts counts the starts of machines that call runc. A runc that outlives capstand would start the machine beside that of the next capstand.
type starts struct {
	// mu is held while a start begins: none begins during wait.
	mu      sync.Mutex
	running sync.WaitGroup
}

// begin counts a start until end is called. After the end of life no start begins.
func (s *starts) begin(life context.Context) (end func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := life.Err(); err != nil {
		return nil, err
	}
	s.running.Add(1)
	return s.running.Done, nil
}

// wait waits for the end of all starts.
func (s *starts) wait() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running.Wait()
}

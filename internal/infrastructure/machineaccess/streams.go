package machineaccess

import "sync"

// streams counts the open logs, shells and uploads.
type streams struct {
	mu          sync.Mutex
	all         int
	byUser      map[string]int
	byNamespace map[string]int
}

// take counts a stream of a user to a machine of a namespace until it is released. It refuses a stream above a limit.
func (s *streams) take(user, namespace string) (release func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all >= maxStreams || s.byUser[user] >= maxUserStreams || s.byNamespace[namespace] >= maxNamespaceStreams {
		return nil, false
	}
	if s.byUser == nil {
		s.byUser, s.byNamespace = map[string]int{}, map[string]int{}
	}
	s.all++
	s.byUser[user]++
	s.byNamespace[namespace]++
	return func() { s.put(user, namespace) }, true
}

func (s *streams) put(user, namespace string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all--
	decrement(s.byUser, user)
	decrement(s.byNamespace, namespace)
}

func decrement(counts map[string]int, key string) {
	if counts[key]--; counts[key] == 0 {
		delete(counts, key)
	}
}

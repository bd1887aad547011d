package machineaccess

import "sync"

// streams counts the open logs and shells.
type streams struct {
	mu     sync.Mutex
	all    int
	byUser map[string]int
}

// take counts a stream of a user until it is released. It refuses a stream above a limit.
func (s *streams) take(user string) (release func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all >= maxStreams || s.byUser[user] >= maxUserStreams {
		return nil, false
	}
	if s.byUser == nil {
		s.byUser = map[string]int{}
	}
	s.all++
	s.byUser[user]++
	return func() { s.put(user) }, true
}

func (s *streams) put(user string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all--
	if s.byUser[user]--; s.byUser[user] == 0 {
		delete(s.byUser, user)
	}
}

package wakeup

import "testing"

func TestSignal(t *testing.T) {
	s := New()
	if len(s) != 0 {
		t.Error("a new signal has a value")
	}
	s.Send()
	s.Send()
	<-s
	if len(s) != 0 {
		t.Error("two calls of Send left two values")
	}
	s.Send()
	if len(s) != 1 {
		t.Error("Send after a receive left no value")
	}
}

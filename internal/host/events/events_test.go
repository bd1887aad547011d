package events

import (
	"context"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
)

// A slow watcher gets the newest state of each object once. It does not delay others.
func TestHubCoalesces(t *testing.T) {
	h := New()
	w, end := h.Subscribe()
	event := func(id string, restarts int32, kind hostpb.Event_Type) *hostpb.Event {
		return Machine(kind, &hostpb.Machine{Spec: &hostpb.MachineSpec{Id: id}, Status: &hostpb.MachineStatus{Restarts: restarts}})
	}
	for i := range int32(1000) {
		h.Publish(event("a", i, hostpb.Event_CHANGED))
		h.Publish(event("b", i, hostpb.Event_CHANGED))
	}
	h.Publish(event("b", 1000, hostpb.Event_DELETED))
	got, err := w.Take(context.Background())
	if err != nil || len(got) != 2 {
		t.Fatalf("got %d events, %v; want 2", len(got), err)
	}
	if a := got[0].GetMachine(); a.Spec.Id != "a" || a.Status.Restarts != 999 {
		t.Errorf("first event is %v", a)
	}
	if got[1].Type != hostpb.Event_DELETED {
		t.Errorf("second event is %v", got[1])
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if more, err := w.Take(ctx); err == nil {
		t.Errorf("the watcher got an event twice: %v", more)
	}
	end()
	h.Publish(event("a", 0, hostpb.Event_CHANGED))
	if len(w.pending) != 0 {
		t.Error("the watcher got an event after its end")
	}
}

package controlplane

import (
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// objects reads and writes the objects of a control plane in the management cluster. Every step has it.
type objects struct {
	// Client reads from the cache, except for Secrets, and writes.
	Client client.Client
	// LiveClient reads from the API server.
	LiveClient client.Client
	// SecretClient reads Secrets with the cluster-name label from the cache.
	SecretClient client.Client

	// StrictContract leaves to core what core does.
	StrictContract bool

	recorder events.EventRecorder
	// abandoned is the time since which a Machine is the only remaining object of a machine.
	abandoned sightings
}

// event records an event of the control plane.
func (r *objects) event(s *scope, kind, reason, action, format string, args ...any) {
	if r.recorder != nil {
		r.recorder.Eventf(s.Object, nil, kind, reason, action, format, args...)
	}
}

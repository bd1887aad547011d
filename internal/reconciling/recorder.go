package reconciling

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	"capstan.dev/capstan/internal/shorten"
)

// maxNote is the length of the longest text of an event in bytes. The API server refuses an event with a longer one.
const maxNote = 1024

// Recorders is the part of a manager that makes recorders of events.
type Recorders interface {
	GetEventRecorder(name string) events.EventRecorder
}

// EventRecorder returns a recorder of events whose texts the API server accepts: errors of hosts and machines can be longer.
func EventRecorder(mgr Recorders, name string) events.EventRecorder {
	return shortRecorder{mgr.GetEventRecorder(name)}
}

type shortRecorder struct{ events.EventRecorder }

// Eventf implements events.EventRecorder.
func (r shortRecorder) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	text := fmt.Sprintf(note, args...)
	if len(text) > maxNote {
		text = shorten.Marked(text, maxNote-len("…"))
	}
	r.EventRecorder.Eventf(regarding, related, kind, reason, action, "%s", text)
}

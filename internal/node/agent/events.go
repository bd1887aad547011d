package agent

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"capstan.dev/capstan/internal/node/kube"
)

const (
	// eventRepeat keeps an event of a problem in existence: the API server removes events after an hour.
	eventRepeat = 10 * time.Minute
	// eventTimeout bounds the request, because the work of the node does not depend on the API server.
	eventTimeout = 5 * time.Second
)

// events show the problems that this node has with objects of the cluster.
type events struct {
	client dynamic.Interface
	log    *slog.Logger
	node   string

	mu sync.Mutex
	// reported has the last event of each object and reason.
	reported map[string]reportedEvent
}

type reportedEvent struct {
	message string
	at      time.Time
}

func newEvents(a *agent, client dynamic.Interface) *events {
	return &events{client: client, log: a.log, node: a.name, reported: map[string]reportedEvent{}}
}

// report writes one event for an object and a reason, again when its message changes or when it is old. An event that cannot be
// written is in the log, and the next report writes it. report returns whether the API server has all events.
func (e *events) report(ctx context.Context, object corev1.ObjectReference, reason, message string) bool {
	key := string(object.UID) + reason
	e.mu.Lock()
	last := e.reported[key]
	e.mu.Unlock()
	if last.message == message && time.Since(last.at) < eventRepeat {
		return true
	}
	namespace := object.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	event := warning(object, namespace, reason, message, e.node)
	_, err := e.client.Resource(kube.Events).Namespace(namespace).Apply(ctx, event.GetName(), event,
		metav1.ApplyOptions{FieldManager: kube.FieldManager, Force: true})
	if err != nil {
		e.log.Error("Cannot write an event", "reason", reason, "error", err)
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.reported, func(_ string, r reportedEvent) bool { return time.Since(r.at) > 2*eventRepeat })
	e.reported[key] = reportedEvent{message: message, at: time.Now()}
	return true
}

// warning has a name that depends only on the object and the reason, so that several agents and repetitions are one event.
func warning(object corev1.ObjectReference, namespace, reason, message, node string) *unstructured.Unstructured {
	now := metav1.Now().UTC().Format(time.RFC3339)
	sum := sha256.Sum256([]byte(string(object.UID) + reason))
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Event",
		"metadata": map[string]any{"name": fmt.Sprintf("capstan-node-agent.%x", sum[:8]), "namespace": namespace},
		"involvedObject": map[string]any{
			"apiVersion": object.APIVersion, "kind": object.Kind, "namespace": object.Namespace, "name": object.Name, "uid": string(object.UID),
		},
		"type": corev1.EventTypeWarning, "reason": reason, "message": message,
		"source":         map[string]any{"component": "capstan-node-agent", "host": node},
		"firstTimestamp": now, "lastTimestamp": now, "count": int64(1),
	}}
}

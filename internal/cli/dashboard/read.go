package dashboard

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/utils/ptr"

	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/wakeup"
)

const (
	// pageSize bounds the memory of one answer of the API: an object can have more than a megabyte.
	pageSize = 50
	// maxPages of events are read to find the newest ones.
	maxPages = 200
	// watchSeconds is the length of a watch. Then the kind is listed again, so that a right that was taken away has an effect.
	watchSeconds = 300
	// firstPause and lastPause bound the pauses between attempts. refusedPause is the one after a refusal.
	firstPause, lastPause, refusedPause = time.Second, 15 * time.Second, 30 * time.Second
)

// Access is the part of a kind that the page can read.
type Access struct {
	Kind string `json:"kind"`
	// State is one of the constants below.
	State string `json:"state"`
	// Namespace is set if only this namespace could be read, and the page was not restricted to it.
	Namespace string `json:"namespace,omitempty"`
	Message   string `json:"message,omitempty"`
	Shown     int    `json:"shown"`
	// Cut: there are more objects than the page keeps.
	Cut bool `json:"cut,omitempty"`
}

// States of Access.
const (
	StateReading   = "reading"
	StateReadable  = "readable"
	StateForbidden = "forbidden"
	StateMissing   = "missing"
	StateFailed    = "failed"
)

// shelf contains the objects of a kind.
type shelf struct {
	kind    *kind
	objects map[types.NamespacedName]*unstructured.Unstructured
	access  Access
}

// reader follows the kinds of the page.
type reader struct {
	dynamic             dynamic.Interface
	mapper              apimeta.RESTMapper
	namespace, fallback string
	changed             wakeup.Signal

	mutex   sync.Mutex
	shelves map[*kind]*shelf
}

func newReader(dyn dynamic.Interface, mapper apimeta.RESTMapper, namespace, fallback string) *reader {
	r := &reader{dynamic: dyn, mapper: mapper, namespace: namespace, fallback: fallback, changed: wakeup.New(), shelves: map[*kind]*shelf{}}
	for _, k := range kinds {
		r.shelves[k] = &shelf{kind: k, access: Access{Kind: k.title, State: StateReading}}
	}
	return r
}

// snapshot is the state of all kinds at one time. Its objects are never changed.
type snapshot struct {
	objects map[*kind][]*unstructured.Unstructured
	access  []Access
}

func (r *reader) snapshot() snapshot {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	s := snapshot{objects: map[*kind][]*unstructured.Unstructured{}}
	for _, k := range kinds {
		shelf := r.shelves[k]
		s.objects[k] = sorted(shelf.objects)
		access := shelf.access
		access.Shown = len(shelf.objects)
		s.access = append(s.access, access)
	}
	return s
}

// sorted returns the objects by namespace and name.
func sorted(objects map[types.NamespacedName]*unstructured.Unstructured) []*unstructured.Unstructured {
	return slices.SortedFunc(maps.Values(objects), func(a, b *unstructured.Unstructured) int {
		return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
	})
}

// follow reads a kind until the context ends.
func (r *reader) follow(ctx context.Context, k *kind) {
	pauses := backoff.Jittered(firstPause, lastPause)
	for {
		listed, err := r.read(ctx, k)
		if ctx.Err() != nil {
			return
		}
		if listed {
			pauses = backoff.Jittered(firstPause, lastPause)
		}
		next := pauses.Step()
		if r.failed(k, err) {
			next = refusedPause
		}
		if !pause(ctx, next) {
			return
		}
	}
}

// failed notes why a kind cannot be read. It reports true if that lasts until an administrator changes it; the objects are then
// forgotten. After other errors, the page keeps showing the objects of the last read.
func (r *reader) failed(k *kind, err error) (refused bool) {
	if err == nil || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return false
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	s := r.shelves[k]
	switch {
	case apimeta.IsNoMatchError(err) || apierrors.IsNotFound(err):
		*s = shelf{kind: k, access: Access{Kind: k.title, State: StateMissing}}
		refused = true
	case apierrors.IsForbidden(err):
		*s = shelf{kind: k, access: Access{Kind: k.title, State: StateForbidden, Message: clip(err.Error())}}
		refused = true
	default:
		s.access.State, s.access.Message = StateFailed, clip(err.Error())
	}
	r.changed.Send()
	return refused
}

// read lists and watches a kind until the watch ends. listed: the list was successful.
func (r *reader) read(ctx context.Context, k *kind) (listed bool, err error) {
	mapping, err := r.mapper.RESTMapping(k.GroupKind)
	if err != nil {
		return false, err
	}
	resource := r.dynamic.Resource(mapping.Resource)
	in, access := "", Access{Kind: k.title, State: StateReadable}
	if mapping.Scope.Name() == apimeta.RESTScopeNameNamespace {
		in = r.namespace
	}
	version, err := r.list(ctx, k, resource.Namespace(in), access)
	if apierrors.IsForbidden(err) && in == "" && r.fallback != "" && mapping.Scope.Name() == apimeta.RESTScopeNameNamespace {
		in, access.Namespace = r.fallback, r.fallback
		version, err = r.list(ctx, k, resource.Namespace(in), access)
	}
	if err != nil {
		return false, err
	}
	w, err := resource.Namespace(in).Watch(ctx, metav1.ListOptions{
		ResourceVersion: version, TimeoutSeconds: ptr.To(int64(watchSeconds + rand.IntN(watchSeconds/5))),
	})
	if err != nil {
		return true, err
	}
	defer w.Stop()
	for event := range w.ResultChan() {
		if event.Type == watch.Error {
			return true, apierrors.FromObject(event.Object)
		}
		if o, ok := event.Object.(*unstructured.Unstructured); ok {
			r.apply(k, event.Type, o)
		}
	}
	return true, nil
}

// list replaces the objects of a kind, and returns the version of the list.
func (r *reader) list(ctx context.Context, k *kind, in dynamic.ResourceInterface, access Access) (version string, err error) {
	s := &shelf{kind: k, objects: map[types.NamespacedName]*unstructured.Unstructured{}, access: access}
	options := metav1.ListOptions{Limit: pageSize}
	for page := 1; ; page++ {
		list, err := in.List(ctx, options)
		if err != nil {
			return "", err
		}
		for i := range list.Items {
			s.put(&list.Items[i])
		}
		version = list.GetResourceVersion()
		if options.Continue = list.GetContinue(); options.Continue == "" {
			break
		}
		if page == maxPages || s.full() {
			s.access.Cut = true
			break
		}
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.shelves[k] = s
	r.changed.Send()
	return version, nil
}

func (r *reader) apply(k *kind, change watch.EventType, o *unstructured.Unstructured) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	s := r.shelves[k]
	if change == watch.Deleted {
		delete(s.objects, keyOf(o))
	} else {
		s.put(o)
	}
	r.changed.Send()
}

func keyOf(o *unstructured.Unstructured) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// full reports whether another object has no room. There is always room for a newer event.
func (s *shelf) full() bool { return !s.kind.events && len(s.objects) >= maxObjects }

// put adds or replaces an object. Of the events, the newest ones stay. Of other objects, those stay that were read first.
func (s *shelf) put(o *unstructured.Unstructured) {
	key := keyOf(o)
	if s.kind.events && !concerned(o) {
		return
	}
	if _, replaces := s.objects[key]; !replaces && s.full() {
		s.access.Cut = true
		return
	}
	s.objects[key] = trim(o, s.kind)
	if s.kind.events && len(s.objects) > maxEvents {
		oldest := slices.MinFunc(slices.Collect(maps.Values(s.objects)), func(a, b *unstructured.Unstructured) int { return eventTime(a).Compare(eventTime(b)) })
		delete(s.objects, keyOf(oldest))
		s.access.Cut = true
	}
}

// concerned reports whether an event is about an object of Cluster API or Capstan.
func concerned(event *unstructured.Unstructured) bool {
	group, _, _ := strings.Cut(text(event, "involvedObject.apiVersion"), "/")
	return group == coreGroup || strings.HasSuffix(group, "."+coreGroup) || strings.HasSuffix(group, ".capstan.dev")
}

// eventTime is the time of the last occurrence, in whichever field the reporter writes it.
func eventTime(event *unstructured.Unstructured) time.Time {
	for _, path := range []string{"series.lastObservedTime", "lastTimestamp", "eventTime", "metadata.creationTimestamp"} {
		if at, err := time.Parse(time.RFC3339, text(event, path)); err == nil && !at.IsZero() {
			return at
		}
	}
	return time.Time{}
}

// text returns the value at a path as text; "" without a value.
func text(o *unstructured.Unstructured, path string) string {
	value, found, err := unstructured.NestedFieldNoCopy(o.Object, strings.Split(path, ".")...)
	if !found || err != nil || value == nil {
		return ""
	}
	return fmt.Sprint(value)
}

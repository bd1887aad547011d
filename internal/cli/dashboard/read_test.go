package dashboard

import (
	"errors"
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

func named(name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{}}
	o.SetNamespace("team")
	o.SetName(name)
	return o
}

func event(name, group string, minute int) *unstructured.Unstructured {
	o := named(name)
	o.Object["involvedObject"] = map[string]any{"apiVersion": group + "/v1beta2"}
	o.Object["lastTimestamp"] = noon.Add(time.Duration(minute) * time.Minute).Format(time.RFC3339)
	return o
}

func readerFor(k *kind) *reader {
	r := newReader(nil, nil, "", "")
	r.shelves[k] = &shelf{kind: k, objects: map[types.NamespacedName]*unstructured.Unstructured{}, access: Access{Kind: k.title, State: StateReadable}}
	return r
}

func TestObjectsAreBounded(t *testing.T) {
	r := readerFor(clusters)
	for i := range maxObjects + 5 {
		r.apply(clusters, watch.Added, named(fmt.Sprint(i)))
	}
	s := r.shelves[clusters]
	if len(s.objects) != maxObjects || !s.access.Cut {
		t.Errorf("%d objects are kept, cut: %v", len(s.objects), s.access.Cut)
	}
	changed := named("0")
	changed.Object["status"] = map[string]any{"phase": "Deleting"}
	r.apply(clusters, watch.Modified, changed)
	if got := text(s.objects[keyOf(changed)], "status.phase"); got != "Deleting" {
		t.Errorf("a change of a kept object is lost: phase %q", got)
	}
	r.apply(clusters, watch.Deleted, changed)
	if len(s.objects) != maxObjects-1 {
		t.Errorf("%d objects after a deletion", len(s.objects))
	}
}

func TestEventsAreBounded(t *testing.T) {
	r := readerFor(eventsKind)
	for i := range maxEvents + 3 {
		r.apply(eventsKind, watch.Added, event(fmt.Sprint(i), infraGroup, i))
	}
	r.apply(eventsKind, watch.Added, event("old", coreGroup, -5))
	r.apply(eventsKind, watch.Added, event("foreign", "apps", 9999))
	r.apply(eventsKind, watch.Added, event("similar", "evilcapstan.dev", 9999))
	s := r.shelves[eventsKind]
	if len(s.objects) != maxEvents || !s.access.Cut {
		t.Errorf("%d events are kept, cut: %v", len(s.objects), s.access.Cut)
	}
	for _, name := range []string{"0", "2", "old", "foreign", "similar"} {
		if s.objects[keyOf(named(name))] != nil {
			t.Errorf("event %s is kept, want the newest ones of our groups", name)
		}
	}
}

func TestFailed(t *testing.T) {
	resource := schema.GroupResource{Group: coreGroup, Resource: "clusters"}
	for name, test := range map[string]struct {
		err           error
		state         string
		refused, kept bool
	}{
		"the end of a watch":  {nil, StateReadable, false, true},
		"an expired version":  {apierrors.NewResourceExpired("old"), StateReadable, false, true},
		"no right":            {apierrors.NewForbidden(resource, "", errors.New("no")), StateForbidden, true, false},
		"not installed":       {&apimeta.NoKindMatchError{GroupKind: clusters.GroupKind}, StateMissing, true, false},
		"removed":             {apierrors.NewNotFound(resource, ""), StateMissing, true, false},
		"no connection":       {errors.New("connection refused"), StateFailed, false, true},
		"an overloaded plane": {apierrors.NewTooManyRequests("later", 1), StateFailed, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := readerFor(clusters)
			r.apply(clusters, watch.Added, named("a"))
			if refused := r.failed(clusters, test.err); refused != test.refused {
				t.Errorf("refused: %v, want %v", refused, test.refused)
			}
			s := r.shelves[clusters]
			if s.access.State != test.state || (len(s.objects) == 1) != test.kept {
				t.Errorf("state %s with %d objects, want %s, kept: %v", s.access.State, len(s.objects), test.state, test.kept)
			}
		})
	}
}

package embedded

import (
	"context"
	"io"
	"net/url"
	"syscall"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// TestApplyOnABusyBox: an object is applied again after an error that can pass, and not after one that cannot.
func TestApplyOnABusyBox(t *testing.T) {
	for name, c := range map[string]struct {
		errors []error
		fails  bool
	}{
		"success at once":                 {[]error{nil}, false},
		"a request that timed out, twice": {[]error{apierrors.NewTimeoutError("request did not complete", 0), apierrors.NewTimeoutError("request did not complete", 0), nil}, false},
		"an overloaded server":            {[]error{apierrors.NewTooManyRequests("later", 0), apierrors.NewServiceUnavailable("starting"), nil}, false},
		"a server that is started again":  {[]error{&url.Error{Op: "Patch", Err: syscall.ECONNREFUSED}, &url.Error{Op: "Patch", Err: io.EOF}, &url.Error{Op: "Patch", Err: syscall.ECONNRESET}, nil}, false},
		"an invalid object":               {[]error{apierrors.NewInvalid(schema.GroupKind{Kind: "X"}, "x", nil)}, true},
	} {
		t.Run(name, func(t *testing.T) {
			calls := 0
			apply := func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
				calls++
				return c.errors[min(calls, len(c.errors))-1]
			}
			i := &installation{client: interceptor.NewClient(fake.NewFakeClient(), interceptor.Funcs{Apply: apply})}
			o := &unstructured.Unstructured{}
			o.SetAPIVersion("v1")
			o.SetKind("Namespace")
			o.SetName("x")
			if err := i.applyOne(t.Context(), o); (err != nil) != c.fails || calls != len(c.errors) {
				t.Errorf("%d calls, want %d: %v", calls, len(c.errors), err)
			}
		})
	}
}

// TestAggregatedRolesOnABusyBox: the creation of a role is repeated, and a role that exists by then is no error.
func TestAggregatedRolesOnABusyBox(t *testing.T) {
	answers := []error{&url.Error{Op: "Post", Err: syscall.ECONNREFUSED}, apierrors.NewTimeoutError("request did not complete", 0), apierrors.NewAlreadyExists(schema.GroupResource{}, "x")}
	calls := 0
	i := &installation{client: interceptor.NewClient(fake.NewFakeClient(), interceptor.Funcs{
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
			calls++
			return answers[min(calls, len(answers))-1]
		},
	})}
	role := object("rbac.authorization.k8s.io/v1", "ClusterRole", "", "x", map[string]any{"aggregationRule": map[string]any{}})
	if err := i.seedAggregatedRoles(t.Context(), []*unstructured.Unstructured{role}); err != nil || calls != len(answers) {
		t.Errorf("%d calls, want %d: %v", calls, len(answers), err)
	}
}

// TestEstablishedOnABusyBox: a watch that ends, ends with an error or is refused for now is repeated, and a final refusal is not.
func TestEstablishedOnABusyBox(t *testing.T) {
	crd := func(name string) *apiextensionsv1.CustomResourceDefinition {
		c := &apiextensionsv1.CustomResourceDefinition{}
		c.Name = name
		c.Status.Conditions = []apiextensionsv1.CustomResourceDefinitionCondition{{Type: apiextensionsv1.Established, Status: apiextensionsv1.ConditionTrue}}
		return c
	}
	ended := func(events ...watch.Event) watch.Interface {
		w := watch.NewFakeWithChanSize(len(events), false)
		for _, e := range events {
			w.Action(e.Type, e.Object)
		}
		w.Stop()
		return w
	}
	status := apierrors.NewResourceExpired("too old").Status()
	watches := []struct {
		w   watch.Interface
		err error
	}{
		{err: apierrors.NewTooManyRequests("later", 0)},
		{w: ended()},
		{w: ended(watch.Event{Type: watch.Added, Object: crd("a")}, watch.Event{Type: watch.Error, Object: &status})},
		{w: ended(watch.Event{Type: watch.Modified, Object: crd("b")})},
		{err: apierrors.NewForbidden(schema.GroupResource{}, "x", nil)},
	}
	calls := 0
	i := &installation{client: interceptor.NewClient(fake.NewFakeClient(), interceptor.Funcs{
		Watch: func(context.Context, client.WithWatch, client.ObjectList, ...client.ListOption) (watch.Interface, error) {
			calls++
			return watches[calls-1].w, watches[calls-1].err
		},
	})}
	kinds := []*unstructured.Unstructured{{}, {}}
	kinds[0].SetName("a")
	kinds[1].SetName("b")
	if err := i.established(t.Context(), kinds); err != nil || calls != 4 {
		t.Fatalf("%d watches, want 4: %v", calls, err)
	}
	if err := i.established(t.Context(), kinds); !apierrors.IsForbidden(err) || calls != 5 {
		t.Errorf("%d watches, want 5, and a refusal: %v", calls, err)
	}
}

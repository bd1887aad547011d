package embedded

import (
	"context"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
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

package machine

import (
	"context"
	"errors"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	capicontroller "sigs.k8s.io/cluster-api/util/controller"
)

// A conflict with a write of core does not delay the next attempt by the time between two reconciles of an object.
func TestConflictDoesNotDelay(t *testing.T) {
	req := ctrl.Request{NamespacedName: types.NamespacedName{Namespace: "a", Name: "b"}}
	for name, test := range map[string]struct {
		failure error
		atOnce  bool
	}{
		"conflict":      {apierrors.NewConflict(schema.GroupResource{}, "b", nil), true},
		"another error": {errors.New("no answer"), false},
	} {
		controller := capicontroller.NewFakeController()
		r := &Reconciler{controller: controller, Client: interceptor.NewClient(fake.NewClientBuilder().Build(), interceptor.Funcs{
			Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
				return test.failure
			},
		})}
		if _, err := r.Reconcile(t.Context(), req); !errors.Is(err, test.failure) {
			t.Errorf("%s: %v", name, err)
		}
		if next, ok := controller.Deferrals[req]; ok != test.atOnce || next.After(time.Now()) {
			t.Errorf("%s: the next attempt from %s: %v", name, next, ok)
		}
	}
}

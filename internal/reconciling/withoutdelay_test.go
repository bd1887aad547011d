package reconciling

import (
	"context"
	"errors"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// deferred records from when on the controller serves the next event of an object.
type deferred map[ctrl.Request]time.Time

// DeferNextReconcile implements the method of the controllers of Cluster API.
func (d deferred) DeferNextReconcile(req ctrl.Request, from time.Time) { d[req] = from }

// The next event is served after a success or a conflict, from the end of the reconcile and its pause on. After another error, the queue decides.
func TestPrompt(t *testing.T) {
	req := ctrl.Request{NamespacedName: types.NamespacedName{Namespace: "a", Name: "b"}}
	conflict := apierrors.NewConflict(schema.GroupResource{}, "b", nil)
	for failure, pause := range map[error]time.Duration{nil: 0, errors.New("no answer"): 0, errors.Join(errors.New("a step"), conflict): time.Hour} {
		var ended time.Time
		served := deferred{}
		p := &withoutDelay{controller: served, pause: pause, Reconciler: reconcile.Func(func(context.Context, ctrl.Request) (ctrl.Result, error) {
			ended = time.Now()
			return ctrl.Result{RequeueAfter: time.Minute}, failure
		})}
		result, err := p.Reconcile(t.Context(), req)
		if !errors.Is(err, failure) || result.RequeueAfter != time.Minute {
			t.Errorf("the result has changed: %+v, %v", result, err)
		}
		if from, ok := served[req]; ok != (failure == nil || errors.Is(failure, conflict)) || ok && (from.Before(ended.Add(pause)) || from.After(time.Now().Add(pause))) {
			t.Errorf("after the error %v: the next reconcile from %s", failure, from)
		}
	}
}

// Package testevents checks in tests the functions that map an event to requests.
package testevents

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Mapper maps an event to requests. It reads objects with the client.
type Mapper func(context.Context, client.Client) []reconcile.Request

// LogFailedReads calls functions with a client whose reads fail. Each of them must log the error, because the event is lost, and return no
// requests.
func LogFailedReads(t *testing.T, mappers map[string]Mapper) {
	t.Helper()
	const why = "the test lets this read fail"
	failure := errors.New(why)
	c := interceptor.NewClient(nil, interceptor.Funcs{
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return failure
		},
		List: func(context.Context, client.WithWatch, client.ObjectList, ...client.ListOption) error { return failure },
	})
	for name, mapper := range mappers {
		logged := ""
		log := funcr.New(func(_, line string) { logged += line + "\n" }, funcr.Options{})
		if requests := mapper(ctrl.LoggerInto(t.Context(), log), c); len(requests) > 0 {
			t.Errorf("%s: got %v, want no requests", name, requests)
		}
		if !strings.Contains(logged, why) {
			t.Errorf("%s: the log does not contain the error of the read: %q", name, logged)
		}
	}
}

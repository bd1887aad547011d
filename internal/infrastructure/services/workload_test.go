package services

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// silent returns a client of an API server that does not answer.
func silent(asked *int) client.Client {
	wait := func(ctx context.Context) error {
		*asked++
		<-ctx.Done()
		return ctx.Err()
	}
	return interceptor.NewClient(nil, interceptor.Funcs{
		Create: func(ctx context.Context, _ client.WithWatch, _ client.Object, _ ...client.CreateOption) error {
			return wait(ctx)
		},
		Patch: func(ctx context.Context, _ client.WithWatch, _ client.Object, _ client.Patch, _ ...client.PatchOption) error {
			return wait(ctx)
		},
		SubResourcePatch: func(ctx context.Context, _ client.Client, _ string, _ client.Object, _ client.Patch, _ ...client.SubResourcePatchOption) error {
			return wait(ctx)
		},
	})
}

// All requests of a reconcile to an API server that does not answer end together, and unsent events are not forgotten.
func TestSilentAPIServer(t *testing.T) {
	asked := 0
	s := &scope{capstan: &infrav1.CapstanCluster{}, workload: silent(&asked), until: time.Now().Add(20 * time.Millisecond)}
	r := &Reconciler{}
	web := with("web", []int32{80}).Service
	r.report(t.Context(), s, web, corev1.EventTypeNormal, publishedEvent, "the first")
	for name := range r.reported.at[client.ObjectKey{}] {
		if s.again != eventPause || !r.reported.first(client.ObjectKey{}, name, time.Now().Add(eventPause)) {
			t.Errorf("an event without an answer is not repeated after %s; the next attempt follows after %s", eventPause, s.again)
		}
	}
	for _, err := range []error{r.mark(t.Context(), s, web), r.setIngress(t.Context(), s, web, []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}), r.unmark(t.Context(), s, web)} {
		if err == nil {
			t.Error("a request without an answer succeeds")
		}
	}
	before := asked
	for i := range 10 {
		r.report(t.Context(), s, web, corev1.EventTypeNormal, publishedEvent, fmt.Sprint("message ", i))
	}
	if asked != before || len(r.reported.at[client.ObjectKey{}]) != 1 {
		t.Errorf("%d more requests after the time, and %d events count as sent", asked-before, len(r.reported.at[client.ObjectKey{}]))
	}
}

// A cluster with any number of Services that cannot be published gets events for some of them, and another cluster keeps the record of its
// events.
func TestManyRefusedServices(t *testing.T) {
	created := 0
	workload := interceptor.NewClient(nil, interceptor.Funcs{Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
		created++
		return nil
	}})
	of := func(namespace string) *scope {
		c := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "c"}}
		return &scope{capstan: c, workload: workload, until: time.Now().Add(time.Hour), trouble: map[string]string{}}
	}
	r := &Reconciler{}
	victim, web := of("a"), with("web", nil).Service
	r.refuse(t.Context(), victim, web, "why")
	hostile, all := of("b"), maxRefusals+10
	for pass := range maxTold/maxRefusals + 2 {
		created = 0
		hostile.chosen.refused = map[*corev1.Service]string{}
		for i := range all {
			hostile.chosen.refused[with(fmt.Sprintf("s-%d", i), nil).Service] = fmt.Sprint("why ", pass)
		}
		r.refuseChosen(t.Context(), hostile)
		if created != maxRefusals || len(hostile.trouble) != all {
			t.Errorf("pass %d: %d events and %d refusals, want %d and %d", pass, created, len(hostile.trouble), maxRefusals, all)
		}
	}
	r.refuseChosen(t.Context(), hostile)
	if created != maxRefusals {
		t.Errorf("%d more requests for the same refusals", created-maxRefusals)
	}
	r.refuse(t.Context(), victim, web, "why")
	if created != maxRefusals {
		t.Error("another cluster reports its event again")
	}
	r.reported.forget(client.ObjectKeyFromObject(hostile.capstan))
	if len(r.reported.at) != 1 {
		t.Errorf("records of %d clusters", len(r.reported.at))
	}
}

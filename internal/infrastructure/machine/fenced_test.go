package machine

import (
	"context"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/fencing"
	"capstan.dev/capstan/internal/reconciling"
)

// A host that does not report its contacts prevents the decision, and the error names it. A host that the administrator has abandoned is
// not asked.
func TestHostWithoutContacts(t *testing.T) {
	r, calls := hung(t, "ListContacts")
	lost := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "other"}}
	cluster := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-calls
		cancel()
	}()
	ask := func(ctx context.Context) ([]fencing.Other, error) {
		others, err := r.observers(ctx, lost, "c", cluster)
		if err != nil {
			return nil, err
		}
		s := &scope{capstan: &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m"}}}
		return others, r.askContacts(ctx, s, lost.Name, others, "net")
	}
	if _, err := ask(ctx); err == nil || !strings.Contains(err.Error(), "host hung") {
		t.Errorf("expected an error that names the host, found %v", err)
	}
	host := &infrav1.CapstanHost{}
	if err := r.Client.Get(t.Context(), client.ObjectKey{Name: "hung"}, host); err != nil {
		t.Fatal(err)
	}
	host.Annotations = map[string]string{infrav1.HostAbandonedAnnotation: ""}
	if err := r.Client.Update(t.Context(), host); err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	others, err := ask(ctx)
	if err != nil || len(others) != 1 || !others[0].Abandoned || len(calls) > 0 {
		t.Errorf("expected an abandoned host without a call, found %+v, %d calls, %v", others, len(calls), err)
	}
}

// A host that was connected and that cannot be asked any more is no host without contacts.
func TestRemovedHostIsNotAsked(t *testing.T) {
	r := &Reconciler{Pool: connections.NewPool(t.Context(), nil), turns: reconciling.NewTurns(4, 2)}
	s := &scope{capstan: &infrav1.CapstanMachine{}}
	err := r.askContacts(t.Context(), s, "lost", []fencing.Other{{Name: "removed", Connected: true}}, "net")
	if err == nil || !strings.Contains(err.Error(), "host removed") {
		t.Errorf("expected an error that names the host, found %v", err)
	}
}

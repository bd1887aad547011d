package services

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/reconciling"
)

// mute is a cache of clusters whose API servers accept requests and never answer.
type mute struct {
	clustercache.ClusterCache
	waits chan string
}

func (m mute) Watch(ctx context.Context, cluster client.ObjectKey, _ clustercache.Watcher) error {
	m.waits <- cluster.Namespace
	<-ctx.Done()
	return ctx.Err()
}

// The clusters of a namespace occupy a tenth of the workers while their API servers do not answer. The others come later, without an
// error.
func TestNamespaceOccupiesItsShare(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, clusterv1.AddToScheme, capiipamv1.AddToScheme, infrav1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	objects := []client.Object{}
	for _, namespace := range []string{"hostile", "other"} {
		objects = append(objects, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
	}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build()
	waits := make(chan string, 100)
	r := &Reconciler{Client: c, Options: reconciling.Options{LiveClient: c, ClusterCache: mute{waits: waits}}, turns: reconciling.NewTurns(50, 5)}
	ctx, cancel := context.WithCancel(t.Context())
	results := make(chan error, 100)
	start := func(namespace string, n int) *scope {
		s := &scope{cluster: &clusterv1.Cluster{}, capstan: &infrav1.CapstanCluster{}, trouble: map[string]string{}, until: time.Now().Add(time.Hour)}
		s.cluster.Namespace, s.cluster.Name = namespace, fmt.Sprint("c-", n)
		s.capstan.Namespace, s.capstan.Name = namespace, fmt.Sprint("c-", n)
		go func() { results <- r.reconcile(ctx, s) }()
		return s
	}
	first := start("hostile", 0)
	for n := range 4 {
		start("hostile", 1+n)
	}
	for range 5 {
		if namespace := <-waits; namespace != "hostile" {
			t.Fatal(namespace)
		}
	}
	for n := range 20 {
		late := start("hostile", 5+n)
		select {
		case err := <-results:
			if err != nil || late.again <= 0 {
				t.Errorf("cluster %d: %v, and another attempt after %s; want one without an error", 5+n, err, late.again)
			}
		case <-waits:
			t.Fatalf("cluster %d waits too", 5+n)
		}
	}
	start("other", 0)
	if namespace := <-waits; namespace != "other" {
		t.Error("another namespace waits for the hostile one")
	}
	cancel()
	for range 6 {
		if err := <-results; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	if first.waited <= 0 {
		t.Error("the time that a cluster waits is not counted")
	}
}

// The clusters of a host that lets the calls for its Services wait leave workers to others. They come later, without an error.
func TestHungHostLeavesWorkers(t *testing.T) {
	const most = 5
	s := newSite(t)
	s.hostTurns = reconciling.NewTurns(50, most)
	waits, hangs := make(chan struct{}, 100), make(chan struct{})
	s.fake.Before("SetServices", func() {
		waits <- struct{}{}
		<-hangs
	})
	results := make(chan error, 100)
	withdraw := func(n int) *scope {
		of, _ := s.begin()
		of.capstan = of.capstan.DeepCopy()
		of.capstan.Spec.ID = fmt.Sprint("c-", n)
		of.hosts["h"].allowed = nil // an administrator has withdrawn the permission
		go func() { results <- s.withdraw(t.Context(), of) }()
		return of
	}
	for n := range most {
		withdraw(n)
		<-waits
	}
	late := withdraw(most)
	select {
	case err := <-results:
		if err != nil || late.again <= 0 {
			t.Errorf("%v, and another attempt after %s; want one without an error", err, late.again)
		}
	case <-waits:
		t.Error("the host occupies one more worker")
	}
	close(hangs)
	for range most {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}

// TestUnchangedServicesNeedNoTurn: a host that has the Services already is not called, so its clusters wait for no other call.
func TestUnchangedServicesNeedNoTurn(t *testing.T) {
	s := newSite(t)
	s.hostTurns = reconciling.NewTurns(1, 1)
	of, _ := s.begin()
	services := []*hostpb.PublishedService{{Name: "default/web", Address: "203.0.113.9", Ports: []*hostpb.PublishedPort{{Port: 80, Protocol: hostpb.PublishedPort_TCP, NodePort: 30080}}}}
	if _, err := s.set(t.Context(), of, "h", services); err != nil {
		t.Fatal(err)
	}
	end, _ := s.hostTurns.TakeTimed("h")
	defer end()
	if _, err := s.set(t.Context(), of, "h", services); err != nil {
		t.Errorf("the same Services: %v", err)
	}
	if _, err := s.set(t.Context(), of, "h", nil); !errors.Is(err, reconciling.ErrWaiting) {
		t.Errorf("other Services: %v", err)
	}
}

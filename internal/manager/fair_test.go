package manager

import (
	"context"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	crmanager "sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"sigs.k8s.io/cluster-api/controllers/clustercache"

	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane"
	"capstan.dev/capstan/internal/infrastructure"
	"capstan.dev/capstan/internal/ipam"
	"capstan.dev/capstan/internal/reconciling"
)

// fair are the controllers whose reconciles wait for servers of tenants: API servers of workload clusters, or hosts. A namespace must
// not occupy all of their workers. Two others take turns inside of a reconcile: those of machines, by host, and of Services.
var fair = []string{"capstan-csr", "capstancluster", "capstanconfig", "capstancontrolplane", "capstanmachinepool", "capstanvolume"}

// Each controller in fair leaves a worker to other namespaces. The test finds the controllers of all providers, and calls them with a
// client that does not answer.
func TestFairControllers(t *testing.T) {
	m := newSilentManager(t)
	var found []string
	for name, c := range m.controllers {
		if leavesWorkers(t, m, c) {
			found = append(found, name)
		}
	}
	slices.Sort(found)
	if !slices.Equal(found, fair) {
		t.Errorf("expected that these controllers leave workers to other namespaces: %v; found %v of %d", fair, found, len(m.controllers))
	}
}

// leavesWorkers reports whether a second object of a namespace is postponed while the first one waits, with two workers.
func leavesWorkers(t *testing.T, m *silentManager, c reconcile.Reconciler) bool {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	m.asked = make(chan struct{}, 100)
	defer running.Wait()
	defer cancel()
	results := make(chan ctrl.Result, 2)
	start := func(name string) {
		running.Go(func() {
			result, _ := c.Reconcile(ctx, ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "a", Name: name}})
			results <- result
		})
	}
	start("first")
	select {
	case <-m.asked:
	case <-results:
		return false // It asks nobody.
	}
	start("second")
	select {
	case <-m.asked:
		return false
	case result := <-results:
		return result.RequeueAfter > 0 && result.RequeueAfter < time.Minute
	}
}

// silentManager is a manager without an API server, which records the controllers of the providers.
type silentManager struct {
	ctrl.Manager
	client      client.Client
	asked       chan struct{}
	controllers map[string]reconcile.Reconciler
}

func newSilentManager(t *testing.T) *silentManager {
	t.Helper()
	providers := []reconciling.Provider{infrastructure.Provider(), controlplane.Provider, bootstrap.Provider, ipam.Provider}
	scheme := Scheme(providers)
	mgr, err := ctrl.NewManager(&rest.Config{Host: "https://127.0.0.1:1"}, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: ptr.To(true)},
		MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) { return mapper(scheme), nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	m := &silentManager{Manager: mgr, controllers: map[string]reconcile.Reconciler{}}
	m.client = silentClient{mgr.GetClient(), m}
	opts := reconciling.Options{
		SecretCachingClient: m.client, LiveClient: m.client, ClusterCache: clustercache.NewFakeEmptyClusterCache(), Concurrency: map[string]int{},
	}
	for _, p := range providers {
		for _, kind := range p.Kinds {
			opts.Concurrency[kind] = 2
		}
		if p.AddFlags != nil {
			p.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
		}
		if err := p.Setup(t.Context(), m, opts); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// Add implements manager.Manager.
func (m *silentManager) Add(r crmanager.Runnable) error {
	if c, ok := r.(reconcile.Reconciler); ok {
		m.controllers[reflect.ValueOf(r).Elem().FieldByName("Name").String()] = c
	}
	return m.Manager.Add(r)
}

// GetClient implements cluster.Cluster.
func (m *silentManager) GetClient() client.Client { return m.client }

// GetAPIReader implements cluster.Cluster.
func (m *silentManager) GetAPIReader() client.Reader { return m.client }

// silentClient reads until the end of the context.
type silentClient struct {
	client.Client
	manager *silentManager
}

func (c silentClient) Get(ctx context.Context, _ client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	return c.wait(ctx)
}

func (c silentClient) List(ctx context.Context, _ client.ObjectList, _ ...client.ListOption) error {
	return c.wait(ctx)
}

func (c silentClient) wait(ctx context.Context) error {
	c.manager.asked <- struct{}{}
	<-ctx.Done()
	return ctx.Err()
}

// mapper has all kinds of a scheme.
func mapper(scheme *runtime.Scheme) meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(scheme.PreferredVersionAllGroups())
	for gvk := range scheme.AllKnownTypes() {
		m.Add(gvk, meta.RESTScopeNamespace)
	}
	return m
}

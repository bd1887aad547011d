package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/wakeup"
)

// getCluster returns a Cluster, or an error with exitNotFound.
func (m *management) getCluster(ctx context.Context, key client.ObjectKey) (*clusterv1.Cluster, error) {
	cluster := &clusterv1.Cluster{}
	err := m.client.Get(ctx, key, cluster)
	if apierrors.IsNotFound(err) {
		return nil, coded{fmt.Errorf("there is no cluster %s in namespace %s; `capstan get clusters` lists all clusters", key.Name, key.Namespace), exitNotFound}
	}
	return cluster, err
}

// hosts returns all hosts. A user who cannot list hosts gets none.
func (m *management) hosts(ctx context.Context) ([]infrav1.CapstanHost, error) {
	list := &infrav1.CapstanHostList{}
	if err := m.client.List(ctx, list); apierrors.IsForbidden(err) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// hostsWithVersions returns all hosts after one of them has reported its Kubernetes versions: a new plane is ready before its host
// has reported. It calls waiting before it waits. It returns no hosts if there are none, or if ctx ends first.
func (m *management) hostsWithVersions(ctx context.Context, waiting func()) ([]infrav1.CapstanHost, error) {
	hosts, err := m.hosts(ctx)
	if versions, _ := versionsOf(hosts); err != nil || len(versions) > 0 || len(hosts) == 0 {
		return hosts, err
	}
	waiting()
	w, err := m.client.Watch(ctx, &infrav1.CapstanHostList{}) // starts with the current objects
	if err != nil {
		return nil, err
	}
	defer w.Stop()
	for event := range w.ResultChan() {
		if h, ok := event.Object.(*infrav1.CapstanHost); ok && len(h.Status.Versions) > 0 {
			return m.hosts(ctx)
		}
	}
	return nil, nil
}

// clusterKinds returns the kinds that are parts of clusters, of all providers: those with the category cluster-api,
// except for templates and classes, which have no status.
func (m *management) clusterKinds() ([]schema.GroupVersionResource, error) {
	d, err := discovery.NewDiscoveryClientForConfig(m.config)
	if err != nil {
		return nil, err
	}
	lists, err := d.ServerPreferredNamespacedResources()
	if err != nil && len(lists) == 0 {
		return nil, err
	}
	var kinds []schema.GroupVersionResource
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, err
		}
		for _, r := range list.APIResources {
			if slices.Contains(r.Categories, "cluster-api") && slices.Contains(r.Verbs, "watch") && !stateless(r.Name) {
				kinds = append(kinds, gv.WithResource(r.Name))
			}
		}
	}
	return kinds, nil
}

// readable returns the kinds that the user can list in the namespace. An informer of another kind would never be in sync.
func readable(ctx context.Context, c dynamic.Interface, namespace string, kinds []schema.GroupVersionResource) ([]schema.GroupVersionResource, error) {
	allowed := make([]bool, len(kinds))
	var g errgroup.Group
	for i, kind := range kinds {
		g.Go(func() error {
			_, err := c.Resource(kind).Namespace(namespace).List(ctx, metav1.ListOptions{Limit: 1})
			allowed[i] = err == nil
			if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
				return nil
			}
			return err
		})
	}
	err := g.Wait()
	var out []schema.GroupVersionResource
	for i, kind := range kinds {
		if allowed[i] {
			out = append(out, kind)
		}
	}
	return out, err
}

func stateless(resource string) bool {
	return strings.HasSuffix(resource, "templates") || resource == "clusterclasses" || resource == "machinedrainrules" || resource == "clusters"
}

// follow calls next with the cluster and its objects, at once and after each change, until next returns true. A value in
// tick causes an additional call. tick may be nil.
func (m *management) follow(ctx context.Context, key client.ObjectKey, tick <-chan struct{}, next func(view) (bool, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dyn, err := dynamic.NewForConfig(m.config)
	if err != nil {
		return err
	}
	kinds, err := m.clusterKinds()
	if err != nil {
		return err
	}
	if kinds, err = readable(ctx, dyn, key.Namespace, kinds); err != nil {
		return err
	}
	named := fields.OneTermEqualSelector("metadata.name", key.Name).String()
	if _, err := dyn.Resource(clusterv1.GroupVersion.WithResource("clusters")).Namespace(key.Namespace).List(ctx, metav1.ListOptions{FieldSelector: named}); err != nil {
		return err // Without this right, the list would never be complete.
	}
	changed := wakeup.New()
	clusters := dynamicinformer.NewFilteredDynamicSharedInformerFactory(dyn, 0, key.Namespace, func(o *metav1.ListOptions) {
		o.FieldSelector = named
	})
	parts := dynamicinformer.NewFilteredDynamicSharedInformerFactory(dyn, 0, key.Namespace, func(o *metav1.ListOptions) {
		o.LabelSelector = clusterv1.ClusterNameLabel + "=" + key.Name
	})
	own := watchKind(clusters, clusterv1.GroupVersion.WithResource("clusters"), changed.Send)
	var others []cache.Store
	for _, kind := range kinds {
		others = append(others, watchKind(parts, kind, changed.Send))
	}
	clusters.Start(ctx.Done())
	parts.Start(ctx.Done())
	for _, factory := range []dynamicinformer.DynamicSharedInformerFactory{clusters, parts} {
		factory.WaitForCacheSync(ctx.Done())
	}
	changed.Send()
	for {
		select {
		case <-ctx.Done():
		case <-changed:
		case <-tick:
		}
		if ctx.Err() != nil { // Perhaps before all objects are known: the cluster would seem to be deleted.
			return context.Cause(ctx)
		}
		if done, err := next(viewOf(own, others)); done || err != nil {
			return err
		}
	}
}

func watchKind(factory dynamicinformer.DynamicSharedInformerFactory, kind schema.GroupVersionResource, notify func()) cache.Store {
	informer := factory.ForResource(kind).Informer()
	_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { notify() }, UpdateFunc: func(any, any) { notify() }, DeleteFunc: func(any) { notify() },
	})
	return informer.GetStore()
}

func viewOf(own cache.Store, others []cache.Store) view {
	var v view
	for _, o := range own.List() {
		v.cluster = o.(*unstructured.Unstructured)
	}
	for _, store := range others {
		for _, o := range store.List() {
			v.objects = append(v.objects, o.(*unstructured.Unstructured))
		}
	}
	return v
}

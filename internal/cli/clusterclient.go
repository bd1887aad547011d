package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/embedded"
)

// management is a client of a management cluster.
type management struct {
	config *rest.Config
	client client.WithWatch
}

// management connects to the management cluster of --kubeconfig, or to the plane of this box.
func (a *app) management() (*management, error) {
	path := a.kubeconfig
	if path == "" {
		path = a.layout().AdminKubeconfig()
		if _, err := os.ReadFile(path); errors.Is(err, fs.ErrNotExist) {
			return nil, a.noPlane(err)
		} else if errors.Is(err, fs.ErrPermission) {
			return nil, embedded.ErrNotRoot
		}
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = -1, -1
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), clusterv1.AddToScheme(scheme), infrav1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	c, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("wanted a management API at %s: %w; run `capstan status`", config.Host, err)
	}
	return &management{config: config, client: c}, nil
}

// getCluster returns a Cluster, or an error with exitNotFound.
func (m *management) getCluster(ctx context.Context, key client.ObjectKey) (*clusterv1.Cluster, error) {
	cluster := &clusterv1.Cluster{}
	err := m.client.Get(ctx, key, cluster)
	if apierrors.IsNotFound(err) {
		return nil, coded{fmt.Errorf("there is no cluster %s in namespace %s; `capstan get clusters` lists all clusters", key.Name, key.Namespace), exitNotFound}
	}
	return cluster, err
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

func stateless(resource string) bool {
	return strings.HasSuffix(resource, "templates") || resource == "clusterclasses" || resource == "machinedrainrules" || resource == "clusters"
}

// follow calls next with the cluster and its objects, at once and after each change, until next returns true. A value in
// tick causes an additional call. tick may be nil.
func (m *management) follow(ctx context.Context, key client.ObjectKey, tick <-chan struct{}, next func(view) (bool, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	kinds, err := m.clusterKinds()
	if err != nil {
		return err
	}
	dyn, err := dynamic.NewForConfig(m.config)
	if err != nil {
		return err
	}
	changed := make(chan struct{}, 1)
	notify := func() {
		select {
		case changed <- struct{}{}:
		default: // A call is pending already. It includes this change.
		}
	}
	clusters := dynamicinformer.NewFilteredDynamicSharedInformerFactory(dyn, 0, key.Namespace, func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("metadata.name", key.Name).String()
	})
	parts := dynamicinformer.NewFilteredDynamicSharedInformerFactory(dyn, 0, key.Namespace, func(o *metav1.ListOptions) {
		o.LabelSelector = clusterv1.ClusterNameLabel + "=" + key.Name
	})
	own := watchKind(clusters, clusterv1.GroupVersion.WithResource("clusters"), notify)
	var others []cache.Store
	for _, kind := range kinds {
		others = append(others, watchKind(parts, kind, notify))
	}
	clusters.Start(ctx.Done())
	parts.Start(ctx.Done())
	for _, factory := range []dynamicinformer.DynamicSharedInformerFactory{clusters, parts} {
		factory.WaitForCacheSync(ctx.Done())
	}
	notify()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-changed:
		case <-tick:
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

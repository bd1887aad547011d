package controlplane

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/util"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
)

const (
	// workloadTimeout limits one look at a workload cluster.
	workloadTimeout = 5 * time.Second

	// Every kube-apiserver renews a Lease of its own, through itself and its etcd. These labels are on it.
	apiServerIdentityLabel = "apiserver.kubernetes.io/identity"
	apiServerIdentity      = "kube-apiserver"
)

// workloads reads the state of workload clusters, and keeps the kinds and roles of their agents current.
type workloads struct {
	// ClusterCache connects to workload clusters. Its connections are events of the control plane.
	ClusterCache clustercache.ClusterCache
	controller   controller.Controller
	// leases remembers the Leases of workload clusters.
	leases model.LeaseHistory
	// installed remembers which workload clusters have the current kinds and roles.
	installed memory
}

// look reads the state of the control plane in its workload cluster. An error is part of the state, because most errors need
// no immediate retry.
func (r *workloads) look(ctx context.Context, s *scope) *model.Workload {
	if !s.Initialized() {
		return &model.Workload{Err: errors.New("its API server has not answered yet")}
	}
	ctx, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	w := &model.Workload{}
	if w.Err = r.read(ctx, s, w); errors.Is(w.Err, clustercache.ErrClusterNotConnected) {
		w.Err = errors.New("there is no connection to it")
	}
	return w
}

func (r *workloads) read(ctx context.Context, s *scope, w *model.Workload) (err error) {
	if r.ClusterCache == nil {
		return clustercache.ErrClusterNotConnected
	}
	if s.client, err = r.ClusterCache.GetUncachedClient(ctx, util.ObjectKey(s.Cluster)); err != nil {
		return err
	}
	controlPlane := client.ObjectKeyFromObject(s.Object)
	if w.APIServers, err = r.readAPIServers(ctx, s.client, controlPlane, s.Now); err != nil {
		return fmt.Errorf("cannot read the Leases of its API servers: %w", err)
	}
	if !s.Stacked() {
		return nil
	}
	start := time.Now()
	w.Members, err = readMembers(ctx, s.client)
	if err == nil {
		etcdRead.WithLabelValues(s.Object.Namespace, s.Object.Name).Observe(time.Since(start).Seconds())
	}
	switch {
	case apimeta.IsNoMatchError(err) || apierrors.IsNotFound(err):
		w.Missing = true
		return nil
	case err != nil:
		return fmt.Errorf("cannot read its EtcdMembers: %w", err)
	}
	if w.Care, err = r.readCare(ctx, s.client, controlPlane, s.Now); err != nil {
		return fmt.Errorf("cannot read the Lease %s: %w", etcdv1.CareLeaseName, err)
	}
	return r.watchWorkload(ctx, s, "etcdmembers", &etcdv1.EtcdMember{})
}

func readMembers(ctx context.Context, c client.Client) (map[string]etcdv1.EtcdMember, error) {
	list := &etcdv1.EtcdMemberList{}
	if err := reconciling.ListBounded(ctx, c, list); err != nil {
		return nil, err
	}
	out := map[string]etcdv1.EtcdMember{}
	for _, m := range list.Items {
		out[m.Name] = m
	}
	return out, nil
}

func (r *workloads) readCare(ctx context.Context, c client.Client, controlPlane client.ObjectKey, now time.Time) (model.Renewal, error) {
	lease := coordinationv1.Lease{}
	var found []coordinationv1.Lease
	switch err := c.Get(ctx, client.ObjectKey{Namespace: etcdv1.CareLeaseNamespace, Name: etcdv1.CareLeaseName}, &lease); {
	case err == nil:
		found = append(found, lease)
	case !apierrors.IsNotFound(err):
		return model.Renewal{}, err
	}
	return r.leases.Observe(model.LeaseSetKey{ControlPlane: controlPlane, Set: model.LeaseOfEtcdCare}, found, now)[lease.UID], nil
}

func (r *workloads) readAPIServers(ctx context.Context, c client.Client, controlPlane client.ObjectKey, now time.Time) (map[string]model.Renewal, error) {
	list := &coordinationv1.LeaseList{}
	if err := reconciling.ListBounded(ctx, c, list, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{apiServerIdentityLabel: apiServerIdentity}); err != nil {
		return nil, err
	}
	renewed := r.leases.Observe(model.LeaseSetKey{ControlPlane: controlPlane, Set: model.LeasesOfAPIServers}, list.Items, now)
	out := map[string]model.Renewal{}
	for _, lease := range list.Items {
		name := lease.Labels[corev1.LabelHostname]
		if at := renewed[lease.UID]; at.At.After(out[name].At) {
			out[name] = at
		}
	}
	return out, nil
}

// watchWorkload makes changes of a kind in the workload cluster events of the control plane.
func (r *workloads) watchWorkload(ctx context.Context, s *scope, name string, kind client.Object) error {
	if r.controller == nil {
		return nil // A test without a manager.
	}
	request := ctrl.Request{NamespacedName: client.ObjectKeyFromObject(s.Object)}
	return r.ClusterCache.Watch(ctx, util.ObjectKey(s.Cluster), clustercache.NewWatcher(clustercache.WatcherOptions{
		Name:    "capstancontrolplane-" + name,
		Watcher: r.controller,
		Kind:    kind,
		EventHandler: handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []ctrl.Request {
			return []ctrl.Request{request}
		}),
	}))
}

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/util"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

const (
	// workloadTimeout limits one look at a workload cluster.
	workloadTimeout = 5 * time.Second
	// leaseDuration is for how long a Lease that is renewed every ten seconds, as those of API servers and of
	// etcd's care are, says that its holder lives.
	leaseDuration = etcdv1.CareLeaseDuration

	// Every kube-apiserver renews a Lease of its own, through itself and its etcd. These labels are on it.
	apiServerIdentityLabel = "apiserver.kubernetes.io/identity"
	apiServerIdentity      = "kube-apiserver"
)

// workload is what a workload cluster says of its control plane. All of it is read live, because
// decisions that cannot be taken back rest on it; the watch only says when to look.
type workload struct {
	client client.Client
	// err is why the workload cluster says nothing.
	err error
	// members by name. missing says that the cluster does not know the kind: its machines do not tell.
	members map[string]etcdv1.EtcdMember
	missing bool
	// care is when the Lease of whoever looks after etcd was renewed; apiServers when those of the API
	// servers were, by host name.
	care       renewal
	apiServers map[string]renewal
}

// unknown is why nothing that is of now is known of etcd; "" when it is known.
func (w *workload) unknown(stacked bool, now time.Time) string {
	switch {
	case w.err != nil:
		return "the workload cluster cannot be asked about its machines: " + w.err.Error()
	case !stacked:
		return ""
	case w.missing || len(w.members) == 0:
		return "the machines do not report their etcd members yet"
	case w.care.at.IsZero():
		return "nobody looks after etcd yet"
	}
	switch w.care.alive(now) {
	case metav1.ConditionFalse:
		return fmt.Sprintf("nobody has looked after etcd since %s", w.care.at.UTC().Format(time.RFC3339))
	case metav1.ConditionUnknown:
		return fmt.Sprintf("it is not known yet whether anybody looks after etcd: the Lease %s has not been renewed since it was read first", etcdv1.CareLeaseName)
	}
	return ""
}

// apiServer says whether the API server on the machine with one of the names works.
func (w *workload) apiServer(names []string, now time.Time) metav1.ConditionStatus {
	if w.err != nil {
		return metav1.ConditionUnknown
	}
	out := metav1.ConditionFalse
	for _, name := range names {
		switch w.apiServers[name].alive(now) {
		case metav1.ConditionTrue:
			return metav1.ConditionTrue
		case metav1.ConditionUnknown:
			out = metav1.ConditionUnknown
		}
	}
	return out
}

// served says that the API server on the machine with one of the names has worked, or that nobody can tell.
func (w *workload) served(names []string) bool {
	return w.err != nil || slices.ContainsFunc(names, func(name string) bool { return !w.apiServers[name].at.IsZero() })
}

// stale is how long what was read can be taken for true; 0 when it already cannot. It is no event when a
// Lease is not renewed, so we have to look.
func (w *workload) stale(now time.Time) time.Duration {
	oldest := w.care.at
	for _, renewed := range w.apiServers {
		if renewed.alive(now) == metav1.ConditionTrue && (oldest.IsZero() || renewed.at.Before(oldest)) {
			oldest = renewed.at
		}
	}
	return max(0, leaseDuration+time.Second-now.Sub(oldest))
}

func (w *workload) sortedMembers() []etcdv1.EtcdMember {
	out := make([]etcdv1.EtcdMember, 0, len(w.members))
	for _, m := range w.members {
		out = append(out, m)
	}
	slices.SortFunc(out, func(a, b etcdv1.EtcdMember) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// look asks the workload cluster about its control plane. What goes wrong is part of the answer: most of
// it is no reason to try again at once.
func (r *Reconciler) look(ctx context.Context, s *scope) *workload {
	if !s.initialized() {
		return &workload{err: errors.New("its API server has not answered yet")}
	}
	ctx, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	w := &workload{}
	if w.err = r.read(ctx, s, w); errors.Is(w.err, clustercache.ErrClusterNotConnected) {
		w.err = errors.New("there is no connection to it")
	}
	return w
}

func (r *Reconciler) read(ctx context.Context, s *scope, w *workload) (err error) {
	if r.ClusterCache == nil {
		return clustercache.ErrClusterNotConnected
	}
	if w.client, err = r.ClusterCache.GetUncachedClient(ctx, util.ObjectKey(s.cluster)); err != nil {
		return err
	}
	controlPlane := client.ObjectKeyFromObject(s.controlPlane)
	if w.apiServers, err = r.readAPIServers(ctx, w.client, controlPlane); err != nil {
		return fmt.Errorf("cannot read the Leases of its API servers: %w", err)
	}
	if !s.stacked() {
		return nil
	}
	start := time.Now()
	w.members, err = readMembers(ctx, w.client)
	if err == nil {
		etcdRead.WithLabelValues(s.controlPlane.Namespace, s.controlPlane.Name).Observe(time.Since(start).Seconds())
	}
	switch {
	case meta.IsNoMatchError(err) || apierrors.IsNotFound(err):
		w.missing = true
		return nil
	case err != nil:
		return fmt.Errorf("cannot read its EtcdMembers: %w", err)
	}
	if w.care, err = r.readCare(ctx, w.client, controlPlane); err != nil {
		return fmt.Errorf("cannot read the Lease %s: %w", etcdv1.CareLeaseName, err)
	}
	return r.watchWorkload(ctx, s, "etcdmembers", &etcdv1.EtcdMember{})
}

func readMembers(ctx context.Context, c client.Client) (map[string]etcdv1.EtcdMember, error) {
	list := &etcdv1.EtcdMemberList{}
	if err := c.List(ctx, list); err != nil {
		return nil, err
	}
	out := map[string]etcdv1.EtcdMember{}
	for _, m := range list.Items {
		out[m.Name] = m
	}
	return out, nil
}

func (r *Reconciler) readCare(ctx context.Context, c client.Client, controlPlane client.ObjectKey) (renewal, error) {
	lease := coordinationv1.Lease{}
	var found []coordinationv1.Lease
	switch err := c.Get(ctx, client.ObjectKey{Namespace: etcdv1.CareLeaseNamespace, Name: etcdv1.CareLeaseName}, &lease); {
	case err == nil:
		found = append(found, lease)
	case !apierrors.IsNotFound(err):
		return renewal{}, err
	}
	return r.renewals.saw(lookKey{controlPlane, ofCare}, found, now())[lease.UID], nil
}

func (r *Reconciler) readAPIServers(ctx context.Context, c client.Client, controlPlane client.ObjectKey) (map[string]renewal, error) {
	list := &coordinationv1.LeaseList{}
	if err := c.List(ctx, list, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{apiServerIdentityLabel: apiServerIdentity}); err != nil {
		return nil, err
	}
	renewed := r.renewals.saw(lookKey{controlPlane, ofAPIServers}, list.Items, now())
	out := map[string]renewal{}
	for _, lease := range list.Items {
		name := lease.Labels[corev1.LabelHostname]
		if at := renewed[lease.UID]; at.at.After(out[name].at) {
			out[name] = at
		}
	}
	return out, nil
}

// watchWorkload makes changes of a kind in the cluster events of the control plane.
func (r *Reconciler) watchWorkload(ctx context.Context, s *scope, name string, kind client.Object) error {
	if r.controller == nil {
		return nil // A test without a manager.
	}
	request := ctrl.Request{NamespacedName: client.ObjectKeyFromObject(s.controlPlane)}
	return r.ClusterCache.Watch(ctx, util.ObjectKey(s.cluster), clustercache.NewWatcher(clustercache.WatcherOptions{
		Name:    "capstancontrolplane-" + name,
		Watcher: r.controller,
		Kind:    kind,
		EventHandler: handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []ctrl.Request {
			return []ctrl.Request{request}
		}),
	}))
}

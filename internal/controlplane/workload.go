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
	care       time.Time
	apiServers map[string]time.Time
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
	case w.care.IsZero():
		return "nobody looks after etcd yet"
	case now.Sub(w.care) > leaseDuration:
		return fmt.Sprintf("nobody has looked after etcd since %s", w.care.UTC().Format(time.RFC3339))
	}
	return ""
}

// apiServer says whether the API server on the machine with one of the names works.
func (w *workload) apiServer(names []string, now time.Time) metav1.ConditionStatus {
	if w.err != nil {
		return metav1.ConditionUnknown
	}
	for _, name := range names {
		if renewed, ok := w.apiServers[name]; ok && now.Sub(renewed) <= leaseDuration {
			return metav1.ConditionTrue
		}
	}
	return metav1.ConditionFalse
}

// stale is how long what was read can be taken for true; 0 when it already cannot. It is no event when a
// Lease is not renewed, so we have to look.
func (w *workload) stale(now time.Time) time.Duration {
	oldest := w.care
	for _, renewed := range w.apiServers {
		if now.Sub(renewed) <= leaseDuration && (oldest.IsZero() || renewed.Before(oldest)) {
			oldest = renewed
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
	key := util.ObjectKey(s.cluster)
	if w.client, err = r.ClusterCache.GetUncachedClient(ctx, key); err != nil {
		return err
	}
	if w.apiServers, err = readAPIServers(ctx, w.client); err != nil {
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
	if w.care, err = readCare(ctx, w.client); err != nil {
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

func readCare(ctx context.Context, c client.Client) (time.Time, error) {
	lease := &coordinationv1.Lease{}
	err := c.Get(ctx, client.ObjectKey{Namespace: etcdv1.CareLeaseNamespace, Name: etcdv1.CareLeaseName}, lease)
	return renewed(lease), client.IgnoreNotFound(err)
}

func readAPIServers(ctx context.Context, c client.Client) (map[string]time.Time, error) {
	list := &coordinationv1.LeaseList{}
	if err := c.List(ctx, list, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{apiServerIdentityLabel: apiServerIdentity}); err != nil {
		return nil, err
	}
	out := map[string]time.Time{}
	for i := range list.Items {
		name := list.Items[i].Labels[corev1.LabelHostname]
		if at := renewed(&list.Items[i]); at.After(out[name]) {
			out[name] = at
		}
	}
	return out, nil
}

func renewed(lease *coordinationv1.Lease) time.Time {
	if lease.Spec.RenewTime == nil {
		return time.Time{}
	}
	return lease.Spec.RenewTime.Time
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

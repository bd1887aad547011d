package services

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	servicehelper "k8s.io/cloud-provider/service/helpers"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"sigs.k8s.io/cluster-api/controllers/clustercache"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/reconciling"
)

// view is the part of the workload cluster that the publication depends on.
type view struct {
	services []corev1.Service
	// eligible are the Nodes that can get connections.
	eligible map[string]bool
	// slices are the EndpointSlices by the namespace and name of the Service. They are read only if a Service needs them.
	slices map[string][]discoveryv1.EndpointSlice
}

// view watches and reads the workload cluster.
func (r *Reconciler) view(ctx context.Context, s *scope) (*view, error) {
	ctx, cancel := s.asking(ctx)
	defer cancel()
	key := client.ObjectKeyFromObject(s.cluster)
	if err := r.watch(ctx, s, &corev1.Service{}, relevant()); err != nil {
		return nil, err
	}
	if err := r.watch(ctx, s, &corev1.Node{}, nodeChanged()); err != nil {
		return nil, err
	}
	var err error
	if s.workload, err = r.ClusterCache.GetClient(ctx, key); err != nil {
		return nil, err
	}
	services, nodes := &corev1.ServiceList{}, &corev1.NodeList{}
	if err := s.workload.List(ctx, services); err != nil {
		return nil, err
	}
	if err := s.workload.List(ctx, nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	v := &view{services: services.Items, eligible: eligibleNodes(nodes.Items), slices: map[string][]discoveryv1.EndpointSlice{}}
	local := func(s corev1.Service) bool {
		return wants(&s) && s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	}
	if !s.optedIn() || !slices.ContainsFunc(v.services, local) {
		return v, nil
	}
	if err := r.watch(ctx, s, &discoveryv1.EndpointSlice{}, predicate.NewPredicateFuncs(func(o client.Object) bool {
		return o.GetLabels()[discoveryv1.LabelServiceName] != ""
	})); err != nil {
		return nil, err
	}
	list := &discoveryv1.EndpointSliceList{}
	if err := s.workload.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	for _, slice := range list.Items {
		name := slice.Namespace + "/" + slice.Labels[discoveryv1.LabelServiceName]
		v.slices[name] = append(v.slices[name], slice)
	}
	return v, nil
}

func (r *Reconciler) watch(ctx context.Context, s *scope, kind client.Object, passes predicate.Predicate) error {
	request := ctrl.Request{NamespacedName: client.ObjectKeyFromObject(s.capstan)}
	return r.ClusterCache.Watch(ctx, client.ObjectKeyFromObject(s.cluster), clustercache.NewWatcher(clustercache.WatcherOptions{
		Name:    fmt.Sprintf("%s-%T", controllerName, kind),
		Watcher: r.controller,
		Kind:    kind,
		EventHandler: handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []ctrl.Request {
			return []ctrl.Request{request}
		}),
		Predicates: []predicate.TypedPredicate[client.Object]{passes},
	}))
}

// relevant passes Services that have, had or want an address.
func relevant() predicate.Predicate {
	is := func(o client.Object) bool { return wants(o.(*corev1.Service)) || marked(o.(*corev1.Service)) }
	return predicate.Funcs{
		CreateFunc:  func(e event.CreateEvent) bool { return is(e.Object) },
		DeleteFunc:  func(e event.DeleteEvent) bool { return is(e.Object) },
		UpdateFunc:  func(e event.UpdateEvent) bool { return is(e.ObjectOld) || is(e.ObjectNew) },
		GenericFunc: func(event.GenericEvent) bool { return false },
	}
}

// nodeChanged passes the changes of a Node that can change eligibleNodes: a Node reports its state every few minutes.
func nodeChanged() predicate.Predicate {
	eligible := func(n *corev1.Node) bool { return len(eligibleNodes([]corev1.Node{*n})) > 0 }
	return reconciling.FilterUpdates(func(before, after *corev1.Node) bool { return eligible(before) != eligible(after) })
}

// marked reports whether a Service has, or may have, an address of ours.
func marked(s *corev1.Service) bool { return s.Annotations[infrav1.ServiceClaimAnnotation] != "" }

// mark makes a Service of type LoadBalancer wait for its address to be removed before it is deleted. This comes before the claim.
func (r *Reconciler) mark(ctx context.Context, s *scope, service *corev1.Service) error {
	name := claimNames(s.capstan.Name, service)[0]
	if isNodePort(service) || service.Annotations[infrav1.ServiceClaimAnnotation] == name && controllerutil.ContainsFinalizer(service, servicehelper.LoadBalancerCleanupFinalizer) {
		return nil
	}
	ctx, cancel := s.asking(ctx)
	defer cancel()
	return reconciling.Change(ctx, s.workload, service, func() {
		metav1.SetMetaDataAnnotation(&service.ObjectMeta, infrav1.ServiceClaimAnnotation, name)
		controllerutil.AddFinalizer(service, servicehelper.LoadBalancerCleanupFinalizer)
	})
}

// unmark removes the mark and the address from the status, and lets a deleted Service go.
func (r *Reconciler) unmark(ctx context.Context, s *scope, service *corev1.Service) error {
	if err := r.setIngress(ctx, s, service, nil); err != nil {
		return err
	}
	ctx, cancel := s.asking(ctx)
	defer cancel()
	err := reconciling.Change(ctx, s.workload, service, func() {
		delete(service.Annotations, infrav1.ServiceClaimAnnotation)
		controllerutil.RemoveFinalizer(service, servicehelper.LoadBalancerCleanupFinalizer)
	})
	return client.IgnoreNotFound(err)
}

// setIngress shows the addresses of a Service of type LoadBalancer, or none.
func (r *Reconciler) setIngress(ctx context.Context, s *scope, service *corev1.Service, want []corev1.LoadBalancerIngress) error {
	ctx, cancel := s.asking(ctx)
	defer cancel()
	// Older API servers drop the mode.
	same := func(a, b corev1.LoadBalancerIngress) bool { return a.IP == b.IP && slices.Equal(a.Ports, b.Ports) }
	if isNodePort(service) || slices.EqualFunc(service.Status.LoadBalancer.Ingress, want, same) {
		return nil
	}
	return client.IgnoreNotFound(reconciling.ChangeStatus(ctx, s.workload, service, func() { service.Status.LoadBalancer.Ingress = want }))
}

// ingress returns the addresses that a Service shows.
func ingress(service *corev1.Service) (addresses []string) {
	for _, i := range service.Status.LoadBalancer.Ingress {
		addresses = append(addresses, i.IP)
	}
	return addresses
}

// report creates an event on a Service. An event with the same reason and message exists at most once until Kubernetes removes
// it, an hour later.
func (r *Reconciler) report(ctx context.Context, s *scope, service *corev1.Service, kind, reason, message string) {
	sum := sha256.Sum256([]byte(string(service.UID) + reason + message))
	name := fmt.Sprintf("%.200s.%x", service.Name, sum[:8])
	now := metav1.NewTime(time.Now())
	ctx, cancel := s.asking(ctx)
	defer cancel()
	if ctx.Err() != nil || !r.reported.first(client.ObjectKeyFromObject(s.capstan), name, now.Time) {
		return
	}
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: service.Namespace, Name: name},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: service.Namespace, Name: service.Name, UID: service.UID},
		Type:           kind, Reason: reason, Message: fmt.Sprintf("%.1000s", message),
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
		Source: corev1.EventSource{Component: controllerName}, ReportingController: controllerName,
	}
	if err := s.workload.Create(ctx, e); err != nil && !apierrors.IsAlreadyExists(err) {
		r.reported.repeat(client.ObjectKeyFromObject(s.capstan), name, now.Time)
		s.lookAgain(eventPause)
		ctrl.LoggerFrom(ctx).V(4).Info("Cannot create an event in the workload cluster", "error", err.Error())
	}
}

// reported contains the times of the last events of each cluster, so that not every reconcile sends a request for each Service. A cluster
// with many events loses only its own record.
type reported struct {
	mu sync.Mutex
	at map[client.ObjectKey]map[string]time.Time
}

const (
	// eventLife is the time after which an event is created again if its reason still applies.
	eventLife = time.Hour
	// eventPause is the time after which an event that the API server refused, or did not answer, is created again.
	eventPause = time.Minute
	// maxRefusals is the number of unsuitable Services that events name.
	maxRefusals = hostpb.MaxServices
	// maxTold bounds the memory for a cluster. Without the record, a request has no effect while the event exists.
	maxTold = 8 * hostpb.MaxServices
)

// first records an event of a cluster, and returns whether it is due.
func (t *reported) first(cluster client.ObjectKey, name string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	told := t.at[cluster]
	if at, ok := told[name]; ok && now.Sub(at) < eventLife {
		return false
	}
	if t.at == nil {
		t.at = map[client.ObjectKey]map[string]time.Time{}
	}
	if told == nil || len(told) >= maxTold {
		told = map[string]time.Time{}
		t.at[cluster] = told
	}
	told[name] = now
	return true
}

// repeat makes an event due again after a pause.
func (t *reported) repeat(cluster client.ObjectKey, name string, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if told := t.at[cluster]; told != nil {
		told[name] = now.Add(eventPause - eventLife)
	}
}

// forget drops the record of a cluster that publishes nothing any more.
func (t *reported) forget(cluster client.ObjectKey) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.at, cluster)
}

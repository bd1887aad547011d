// Package services publishes the Services of workload clusters: each Service of type LoadBalancer gets an address from a pool,
// and a host with machines of the cluster has this address and forwards its ports to machines. A Service of the class
// capstan.dev/host-ports has ports of the own addresses of all hosts with machines of the cluster instead, and so has a Service of type
// NodePort.
//
// A cluster opts in with spec.services.loadBalancer of its CapstanCluster. A host opts in with spec.services of its CapstanHost.
//
// The IPAddressClaim of a Service is the record of its publication: the annotation service-hosts names all hosts that may have
// the address. It is written before a host gets the address, and the claim is deleted after all of them lost it. Users of the
// namespace can delete the claim, so the IPAddress has a finalizer meanwhile: no address is free while a host has it. Ports of the hosts
// have no claim: an annotation of the CapstanCluster names the hosts that may publish some.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package services

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/keymutex"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/conditions"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/addresses"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/order"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/selection"
)

// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanclusters,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanclusters/status,verbs=patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters;machines,verbs=get;list;watch
// +kubebuilder:rbac:groups=ipam.cluster.x-k8s.io,resources=ipaddressclaims,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=ipam.cluster.x-k8s.io,resources=ipaddresses,verbs=get;list;watch;patch;update
// +kubebuilder:rbac:groups="",resources=secrets;namespaces,verbs=get;list;watch

// controllerName is the name of the controller, and that of its events.
const controllerName = "capstan-services"

// Reconciler publishes the Services of the clusters that opt in.
type Reconciler struct {
	reconciling.Options
	Client client.Client
	Pool   *connections.Pool

	controller capicontroller.Controller
	reported   reported
	setting    locks
	// turns are those of namespaces, and hostTurns those of hosts. Root on a host can let all calls wait.
	turns, hostTurns *reconciling.Turns
}

// scope contains the objects of one reconcile.
type scope struct {
	cluster *clusterv1.Cluster
	capstan *infrav1.CapstanCluster
	// workload is the client of the workload cluster, or nil while it is not connected.
	workload client.Client
	hosts    map[string]*host
	// claims are those of the cluster's Services, by name.
	claims map[string]*capiipamv1.IPAddressClaim
	// records are the hosts that may have the address of a claim, by its name, and recorded the numbers of claims by such a host.
	records  map[string][]string
	recorded map[string]int
	// chosen are the Services to publish, and the reasons against the others.
	chosen choice
	// asked: all connected hosts with the network of the cluster have accepted the lists of their Services, so they have no other address.
	asked bool
	// portHosts are the hosts that may publish ports of their own addresses: the record in an annotation of the cluster.
	portHosts []string
	// unsettled: a connected host may still publish ports that it should not.
	unsettled bool
	// trouble contains the reasons why Services are not published, by their namespace and name.
	trouble map[string]string
	// again is the time until the next look: no event follows when a host counts as silent or lost, or when an address becomes free.
	again time.Duration
	// until is the end of the time for requests to the workload cluster, and waited the part of it that they took.
	until  time.Time
	waited time.Duration
}

// answerTime is the time that a reconcile waits for the API server of the cluster. This server belongs to a tenant, and may let all requests
// wait. The next reconcile ends publications that an administrator has forbidden meanwhile.
const answerTime = 30 * time.Second

// turnShare is the part of the workers that the clusters of a namespace can occupy: one of ten.
const turnShare = 10

// asking returns the context of requests to the workload cluster. The function that ends it counts the time.
func (s *scope) asking(ctx context.Context) (context.Context, context.CancelFunc) {
	start := time.Now()
	ctx, cancel := context.WithDeadline(ctx, s.until)
	return ctx, func() {
		s.waited += time.Since(start)
		cancel()
	}
}

// lookAgain makes a reconcile follow after a time at the latest.
func (s *scope) lookAgain(after time.Duration) {
	s.again = order.Sooner(s.again, max(after, time.Millisecond))
}

// network is that of the cluster on its hosts.
func (s *scope) network() connections.Network {
	return connections.NetworkOf(s.capstan.Spec.ID, s.cluster)
}

func (s *scope) optedIn() bool { return s.capstan.Spec.Services.LoadBalancer != nil }

// publishesAddresses reports whether the cluster publishes Services at addresses of pools.
func (s *scope) publishesAddresses() bool {
	return s.optedIn() && len(poolsOf(s.capstan.Spec.Services.LoadBalancer)) > 0
}

// publishesPorts reports whether the cluster publishes Services at ports of the hosts' own addresses.
func (s *scope) publishesPorts() bool {
	lb := s.capstan.Spec.Services.LoadBalancer
	return lb != nil && (ptr.Deref(lb.HostPorts, false) || ptr.Deref(lb.NodePorts, false))
}

// pause between two reconciles of a cluster. Users of the cluster change its Services and EndpointSlices, and each reconcile reads all of them
// and can write the rules of hosts.
const pause = 500 * time.Millisecond

// SetupWithManager adds the reconciler. It uses the index of package cluster.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	gvk := infrav1.GroupVersion.WithKind(infrav1.ClusterKind)
	toInfrastructure := util.ClusterToInfrastructureMapFunc(ctx, gvk, mgr.GetClient(), &infrav1.CapstanCluster{})
	b := r.Controller(mgr, controllerName).
		WithOptions(r.For(infrav1.ClusterKind)).
		For(&infrav1.CapstanCluster{}, builder.WithPredicates(predicate.NewPredicateFuncs(concerned))).
		Owns(&capiipamv1.IPAddressClaim{}).
		Watches(&capiipamv1.IPAddress{}, handler.EnqueueRequestsFromMapFunc(clusterOfAddress), predicate.NewPredicateFuncs(held)).
		Watches(&capiipamv1.IPAddress{}, handler.EnqueueRequestsFromMapFunc(addresses.OfOwner(mgr.GetClient(), gvk.Kind)), reconciling.OnlyCreates).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(toInfrastructure), reconciling.IgnoreStatus()).
		Watches(&infrav1.CapstanHost{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []ctrl.Request {
			return r.listed(ctx)
		}), reconciling.IgnoreStatus()).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []ctrl.Request {
			return r.listed(ctx, client.InNamespace(o.GetName()))
		}), selection.NamespaceChanged()).
		WatchesRawSource(r.ClusterCache.GetClusterSource(controllerName, toInfrastructure)).
		WatchesRawSource(r.Pool.Source(r.ofEvent))
	c, err := reconciling.BuildWithPause(ctx, b, reconciling.Traced("Services", r), pause)
	workers := r.For(infrav1.ClusterKind).MaxConcurrentReconciles
	r.controller, r.setting = c, locks{keymutex.NewHashed(lockCount)}
	r.turns, r.hostTurns = reconciling.NewTurns(workers, workers/turnShare), reconciling.FairTurns(workers)
	return errors.Join(err, withdrawal{r}.setupWithManager(ctx, mgr))
}

// concerned reports whether a cluster publishes Services, or has not ended this.
func concerned(o client.Object) bool {
	c := o.(*infrav1.CapstanCluster)
	return c.Spec.Services.LoadBalancer != nil || conditions.Has(c, infrav1.ServicesPublishedCondition)
}

// listed returns the requests for the concerned clusters.
func (r *Reconciler) listed(ctx context.Context, opts ...client.ListOption) []ctrl.Request {
	return reconciling.RequestsIf(ctx, r.Client, &infrav1.CapstanClusterList{}, concerned, opts...)
}

// ofEvent maps a machine to its cluster, and a connection to all clusters.
func (r *Reconciler) ofEvent(ctx context.Context, e connections.Event) []ctrl.Request {
	switch {
	case e.Machine != nil:
		return r.listed(ctx, client.MatchingFields{"spec.id": e.Machine.GetSpec().GetNetwork().GetId()})
	case e.Connection || e.Silence:
		return r.listed(ctx)
	}
	return nil
}

// Reconcile implements reconcile.Reconciler. The reconciler of package cluster ends the publication of a cluster that is being
// deleted, together with its networks.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	c := &infrav1.CapstanCluster{}
	if err := r.Client.Get(ctx, req.NamespacedName, c); apierrors.IsNotFound(err) {
		r.reported.forget(req.NamespacedName)
		return ctrl.Result{}, r.freeOrphans(ctx, req.NamespacedName)
	} else if err != nil {
		return ctrl.Result{}, err
	}
	if !r.Watches(c) || !concerned(c) || !c.DeletionTimestamp.IsZero() || c.Spec.ID == "" || annotations.IsExternallyManaged(c) {
		return ctrl.Result{}, nil
	}
	cluster, err := util.GetOwnerCluster(ctx, r.Client, c.ObjectMeta)
	if err != nil || cluster == nil || !cluster.DeletionTimestamp.IsZero() || annotations.IsPaused(cluster, c) {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	s := &scope{cluster: cluster, capstan: c, trouble: map[string]string{}, until: time.Now().Add(answerTime)}
	err = r.reconcile(ctx, s)
	return ctrl.Result{RequeueAfter: s.again}, err
}

// reconcile publishes the Services, or ends the publication, and shows the result.
func (r *Reconciler) reconcile(ctx context.Context, s *scope) error {
	if err := errors.Join(r.readClaims(ctx, s), r.readPortHosts(ctx, s), r.readHosts(ctx, s)); err != nil {
		return err
	}
	// Publications that an administrator has forbidden end now, before requests to the API server of the cluster; those of an opt-out too.
	withdrawn := errors.Join(r.withdraw(ctx, s), r.adoptClaims(ctx, s))
	end, again := r.turns.Take(s.capstan.Namespace)
	if end == nil {
		s.lookAgain(again)
		return withdrawn
	}
	defer func() { end(s.waited) }()
	v, err := r.view(ctx, s)
	if errors.Is(err, clustercache.ErrClusterNotConnected) { // The connection is an event.
		return errors.Join(withdrawn, r.show(ctx, s, metav1.ConditionUnknown, infrav1.WorkloadNotConnectedReason, "The manager is not connected to the API server of the cluster. Published Services continue"))
	}
	if err != nil {
		return errors.Join(withdrawn, err)
	}
	if s.optedIn() {
		s.chosen = choose(v.services, s.capstan.Spec.Services.LoadBalancer)
	}
	err = r.publish(ctx, s, v)
	left, endErr := r.release(ctx, s, v)
	err = errors.Join(withdrawn, err, endErr)
	switch {
	case !s.optedIn() && err == nil && left == "":
		r.reported.forget(client.ObjectKeyFromObject(s.capstan))
		return r.show(ctx, s, "", "", "")
	case !s.optedIn():
		return errors.Join(err, r.show(ctx, s, metav1.ConditionFalse, infrav1.ServicesEndingReason, left))
	case len(s.trouble) > 0:
		return errors.Join(err, r.show(ctx, s, metav1.ConditionFalse, infrav1.ServicesNotPublishedReason, summary(s.trouble)))
	}
	return errors.Join(err, r.show(ctx, s, metav1.ConditionTrue, infrav1.ServicesPublishedReason, ""))
}

// summary returns a message with the first reasons.
func summary(trouble map[string]string) string {
	const most = 10
	var all []string
	for _, name := range slices.Sorted(maps.Keys(trouble)) {
		// The API server of the cluster is the source of the names and of parts of the reasons.
		all = append(all, fmt.Sprintf("Service %.320s: %.600s", name, trouble[name]))
	}
	if more := len(all) - most; more > 0 {
		all = append(all[:most:most], fmt.Sprintf("%d more Services are not published", more))
	}
	return strings.Join(all, "; ")
}

// show writes the condition, or removes it if status is empty. It writes only this: another reconciler has the rest.
func (r *Reconciler) show(ctx context.Context, s *scope, status metav1.ConditionStatus, reason, message string) error {
	before := conditions.Get(s.capstan, infrav1.ServicesPublishedCondition)
	if before == nil && status == "" || before != nil && before.Status == status && before.Reason == reason && before.Message == message &&
		before.ObservedGeneration == s.capstan.Generation {
		return nil
	}
	return client.IgnoreNotFound(reconciling.ChangeStatus(ctx, r.LiveClient, s.capstan, func() {
		if status == "" {
			conditions.Delete(s.capstan, infrav1.ServicesPublishedCondition)
			return
		}
		reconciling.SetCondition(s.capstan, infrav1.ServicesPublishedCondition, status, reason, "%s", message)
	}))
}

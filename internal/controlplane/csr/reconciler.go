package csr

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/util/annotations"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// reason of the conditions Approved and Denied.
const reason = "CapstanControlPlane"

// answerConcurrency is the number of requests of a cluster that are answered at the same time.
const answerConcurrency = 8

// Reconciler decides on the requests of every cluster whose control plane is ours.
type Reconciler struct {
	reconciling.Options
	Client client.Client

	controller capicontroller.Controller
}

// SetupWithManager adds the reconciler. A reconciliation is for a Cluster, and handles all its
// requests that are not decided: there are few, and a Machine that changes may decide several.
func SetupWithManager(ctx context.Context, mgr ctrl.Manager, opts reconciling.Options, concurrency controller.Options) error {
	r := &Reconciler{Options: opts, Client: mgr.GetClient()}
	b := opts.Controller(mgr, "capstan-csr").
		WithOptions(concurrency).
		// A connection is made: the moment from which requests can be watched.
		WatchesRawSource(opts.ClusterCache.GetClusterSource("capstan-csr", func(_ context.Context, obj client.Object) []ctrl.Request {
			return []ctrl.Request{{NamespacedName: client.ObjectKeyFromObject(obj)}}
		})).
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(machineToCluster), machineChanged()).
		Watches(&clusterv1.MachinePool{}, handler.EnqueueRequestsFromMapFunc(poolToCluster), reconciling.IgnoreStatus()).
		// Bootstrap data: a token may reach its machine before the cache shows the Secret that holds it.
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(dataToCluster)).
		Watches(&clusterv1.Cluster{}, &handler.EnqueueRequestForObject{}, resumed()).
		// Another watch label, or the end of a pause.
		Watches(&controlplanev1.CapstanControlPlane{}, handler.EnqueueRequestsFromMapFunc(labelledToCluster),
			predicate.Or[client.Object](predicate.LabelChangedPredicate{}, resumed()))
	// A machine that joins waits for each answer.
	c, err := reconciling.BuildWithoutDelay(ctx, b, reconciling.Fair(concurrency.MaxConcurrentReconciles, reconciling.Traced("Machine certificates", r)))
	r.controller = c
	return err
}

func machineToCluster(_ context.Context, obj client.Object) []ctrl.Request {
	return []ctrl.Request{{NamespacedName: client.ObjectKey{Namespace: obj.GetNamespace(), Name: obj.(*clusterv1.Machine).Spec.ClusterName}}}
}

func poolToCluster(_ context.Context, obj client.Object) []ctrl.Request {
	return []ctrl.Request{{NamespacedName: client.ObjectKey{Namespace: obj.GetNamespace(), Name: obj.(*clusterv1.MachinePool).Spec.ClusterName}}}
}

// dataToCluster maps the Secrets of a cluster to it: among them is bootstrap data.
func dataToCluster(ctx context.Context, obj client.Object) []ctrl.Request {
	if obj.(*corev1.Secret).Type != clusterv1.ClusterSecretType {
		return nil
	}
	return labelledToCluster(ctx, obj)
}

func labelledToCluster(_ context.Context, obj client.Object) []ctrl.Request {
	cluster := obj.GetLabels()[clusterv1.ClusterNameLabel]
	if cluster == "" {
		return nil
	}
	return []ctrl.Request{{NamespacedName: client.ObjectKey{Namespace: obj.GetNamespace(), Name: cluster}}}
}

// machineChanged passes the changes that a decision depends on: a new Machine, its node, its addresses and the name of
// its bootstrap data. A status of a Machine is written a dozen times on its way up.
func machineChanged() predicate.Predicate {
	return predicate.Funcs{
		DeleteFunc: func(event.DeleteEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			old, now := e.ObjectOld.(*clusterv1.Machine), e.ObjectNew.(*clusterv1.Machine)
			return old.Status.NodeRef != now.Status.NodeRef || !slices.Equal(old.Status.Addresses, now.Status.Addresses) ||
				!ptr.Equal(old.Spec.Bootstrap.DataSecretName, now.Spec.Bootstrap.DataSecretName)
		},
	}
}

// resumed passes the update that ends a pause of a Cluster or of its control plane: requests may have come meanwhile.
func resumed() predicate.Predicate {
	paused := func(o client.Object) bool {
		if cluster, ok := o.(*clusterv1.Cluster); ok {
			return annotations.IsPaused(cluster, cluster)
		}
		return annotations.HasPaused(o)
	}
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		DeleteFunc: func(event.DeleteEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool { return paused(e.ObjectOld) && !paused(e.ObjectNew) },
	}
}

// OpenIndex finds the requests without a decision. The decided ones, two for each node, are skipped.
var OpenIndex = clustercache.CacheOptionsIndex{
	Object: &certificatesv1.CertificateSigningRequest{}, Field: "open",
	ExtractValue: func(o client.Object) []string {
		if decided(o.(*certificatesv1.CertificateSigningRequest)) {
			return nil
		}
		return []string{"true"}
	},
}

// open passes requests without a decision.
func open() predicate.TypedPredicate[client.Object] {
	return predicate.NewPredicateFuncs(func(o client.Object) bool {
		return !decided(o.(*certificatesv1.CertificateSigningRequest))
	})
}

// Reconcile watches the requests of a Cluster and decides on those that are open.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	cluster := &clusterv1.Cluster{}
	if err := r.Client.Get(ctx, req.NamespacedName, cluster); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	ref := cluster.Spec.ControlPlaneRef
	if ref.GroupKind() != controlplanev1.ControlPlaneGroupKind || annotations.HasPaused(cluster) {
		return ctrl.Result{}, nil
	}
	controlPlane := &controlplanev1.CapstanControlPlane{}
	if err := r.Client.Get(ctx, client.ObjectKey{Namespace: cluster.Namespace, Name: ref.Name}, controlPlane); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if annotations.IsPaused(cluster, controlPlane) || !r.Watches(controlPlane) {
		return ctrl.Result{}, nil
	}
	err := r.reconcile(ctx, req.NamespacedName)
	if errors.Is(err, clustercache.ErrClusterNotConnected) {
		return ctrl.Result{}, nil // The connection is an event.
	}
	return ctrl.Result{}, err
}

func (r *Reconciler) reconcile(ctx context.Context, cluster client.ObjectKey) error {
	if err := r.ClusterCache.Watch(ctx, cluster, clustercache.NewWatcher(clustercache.WatcherOptions{
		Name:    "capstan-csr",
		Watcher: r.controller,
		Kind:    &certificatesv1.CertificateSigningRequest{},
		EventHandler: handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []ctrl.Request {
			return []ctrl.Request{{NamespacedName: cluster}}
		}),
		Predicates: []predicate.TypedPredicate[client.Object]{open()},
	})); err != nil {
		return err
	}
	workload, err := r.ClusterCache.GetClient(ctx, cluster)
	if err != nil {
		return err
	}
	requests := &certificatesv1.CertificateSigningRequestList{}
	if err := workload.List(ctx, requests, client.MatchingFields{OpenIndex.Field: "true"}); err != nil {
		return err
	}
	if len(requests.Items) == 0 {
		return nil
	}
	known, err := r.known(ctx, cluster, requests.Items)
	if err != nil {
		return err
	}
	// One answer that takes long, or fails, holds up no machine that joins beside it.
	errs := make([]error, len(requests.Items))
	var group errgroup.Group
	group.SetLimit(answerConcurrency)
	for i := range requests.Items {
		group.Go(func() error {
			errs[i] = r.answer(ctx, cluster, workload, &requests.Items[i], known)
			return nil
		})
	}
	_ = group.Wait()
	return errors.Join(errs...)
}

// known reads the machines of a cluster, and the tokens of the requests in its bootstrap data. The lists are as long as the cluster is
// large, and only read: they are not copied.
func (r *Reconciler) known(ctx context.Context, cluster client.ObjectKey, requests []certificatesv1.CertificateSigningRequest) (Cluster, error) {
	asked := askedTokens(requests)
	machines, pools, secrets := &clusterv1.MachineList{}, &clusterv1.MachinePoolList{}, &corev1.SecretList{}
	options := []client.ListOption{reconciling.OfCluster(cluster), client.UnsafeDisableDeepCopy}
	err := r.Client.List(ctx, machines, options...)
	if len(asked) > 0 {
		err = errors.Join(err, r.Client.List(ctx, pools, options...), r.SecretCachingClient.List(ctx, secrets, options...))
	}
	return Cluster{Machines: machines.Items, Pools: pools.Items, Tokens: tokensOf(secrets.Items, asked)}, err
}

// answer writes the decision on one request.
func (r *Reconciler) answer(ctx context.Context, cluster client.ObjectKey, workload client.Client, request *certificatesv1.CertificateSigningRequest, known Cluster) error {
	if err := ctx.Err(); err != nil {
		return err // The API server of the cluster chooses the number of requests.
	}
	decision, err := r.decide(ctx, cluster, request, known)
	if err != nil {
		return err
	}
	log := ctrl.LoggerFrom(ctx).WithValues("request", request.Name, "user", request.Spec.Username, "signer", request.Spec.SignerName)
	condition := certificatesv1.CertificateSigningRequestCondition{Status: corev1.ConditionTrue, Reason: reason, Message: decision.Message}
	switch decision.Verdict {
	case Approved:
		condition.Type = certificatesv1.CertificateApproved
	case Denied:
		condition.Type = certificatesv1.CertificateDenied
	default:
		log.V(4).Info("Certificate request left untouched", "why", decision.Message)
		return nil
	}
	request.Status.Conditions = append(request.Status.Conditions, condition)
	if err := workload.SubResource("approval").Update(ctx, request); err != nil {
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return nil // It was changed, which is an event, or deleted.
		}
		return fmt.Errorf("cannot answer the certificate request %s: %w", request.Name, err)
	}
	log.Info("Certificate request "+string(decision.Verdict), "why", decision.Message)
	return nil
}

// decide on a request, and look at the Node on which the decision depends. It reads the Node from the API server of the cluster, because a
// cache may be stale. Both times are of this API server, so the clock of the manager does not matter.
func (r *Reconciler) decide(ctx context.Context, cluster client.ObjectKey, request *certificatesv1.CertificateSigningRequest, known Cluster) (Decision, error) {
	d := Decide(request, known)
	if d.NewNode == "" {
		return d, nil
	}
	workload, err := r.ClusterCache.GetUncachedClient(ctx, cluster)
	if err != nil {
		return Decision{}, err
	}
	node := &corev1.Node{}
	if err := workload.Get(ctx, client.ObjectKey{Name: d.NewNode}, node); err != nil {
		return d, client.IgnoreNotFound(err)
	}
	if age := request.CreationTimestamp.Sub(node.CreationTimestamp.Time); d.MaxAge == 0 || age > d.MaxAge {
		return untouched("the node %s has joined already, and the token %s is not of one machine only", d.NewNode, bootstrapToken(request)), nil
	}
	return d, nil
}

func decided(request *certificatesv1.CertificateSigningRequest) bool {
	for _, c := range request.Status.Conditions {
		if c.Type == certificatesv1.CertificateApproved || c.Type == certificatesv1.CertificateDenied {
			return true
		}
	}
	return len(request.Status.Certificate) > 0
}

package machinepool

import (
	"context"

	"k8s.io/apimachinery/pkg/api/equality"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/annotations"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/hosts"
	"capstan.dev/capstan/internal/infrastructure/machinetemplate"
	"capstan.dev/capstan/internal/manager"
)

// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachinepooltemplates,verbs=get;list;watch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachinepooltemplates/status,verbs=patch

// templateReconciler shows what a machine of a pool made from a template will have, for autoscalers that
// scale from zero (MP-10).
type templateReconciler struct {
	manager.Options
	Client client.Client
}

func (r *templateReconciler) setup(ctx context.Context, mgr ctrl.Manager) error {
	log := ctrl.LoggerFrom(ctx).WithValues("controller", "capstanmachinepooltemplate")
	return capicontroller.NewControllerManagedBy(mgr, log).
		For(&infrav1.CapstanMachinePoolTemplate{}, builder.WithPredicates(manager.IgnoreStatus())).
		WithOptions(r.For("CapstanMachinePoolTemplate")).
		Watches(&infrav1.CapstanHost{}, handler.EnqueueRequestsFromMapFunc(r.all), predicate.Or(manager.IgnoreStatus(), hostChanged())).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(r.ofCluster), predicate.GenerationChangedPredicate{}).
		Complete(ctx, r)
}

func (r *templateReconciler) all(ctx context.Context, _ client.Object) []reconcile.Request {
	return r.list(ctx)
}

// ofCluster maps a Cluster, which may have been paused or resumed, to the templates of its namespace.
func (r *templateReconciler) ofCluster(ctx context.Context, o client.Object) []reconcile.Request {
	return r.list(ctx, client.InNamespace(o.GetNamespace()))
}

func (r *templateReconciler) list(ctx context.Context, opts ...client.ListOption) []reconcile.Request {
	list := &infrav1.CapstanMachinePoolTemplateList{}
	if r.Client.List(ctx, list, opts...) != nil {
		return nil
	}
	var out []reconcile.Request
	for i := range list.Items {
		out = append(out, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
	}
	return out
}

// Reconcile implements reconcile.Reconciler.
func (r *templateReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	t := &infrav1.CapstanMachinePoolTemplate{}
	if err := r.Client.Get(ctx, req.NamespacedName, t); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	// A template has no conditions, so that only the pause itself is obeyed (ALL-08).
	if !r.Watches(t) || !t.DeletionTimestamp.IsZero() || annotations.HasPaused(t) {
		return ctrl.Result{}, nil
	}
	cluster, err := util.GetOwnerCluster(ctx, r.Client, t.ObjectMeta)
	if client.IgnoreNotFound(err) != nil || cluster != nil && annotations.IsPaused(cluster, t) {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	spec := t.Spec.Template.Spec.MachineTemplate.Spec
	usable, err := hosts.Usable(ctx, r.Client, t.Namespace, spec.HostSelector)
	if err != nil {
		return ctrl.Result{}, err
	}
	described := machinetemplate.Describe(spec, usable)
	status := infrav1.CapstanMachinePoolTemplateStatus(described)
	if equality.Semantic.DeepEqual(t.Status, status) {
		return ctrl.Result{}, nil
	}
	before := t.DeepCopy()
	t.Status = status
	return ctrl.Result{}, r.Client.Status().Patch(ctx, t, client.MergeFrom(before))
}

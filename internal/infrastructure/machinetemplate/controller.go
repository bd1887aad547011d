// Package machinetemplate reconciles the templates of machines and of pools: it reports the resources of a machine of a
// template, for autoscalers that scale from zero (IM-07, MP-10).
//
// Layer: reconciler. Allowed imports: api, library, contract.
package machinetemplate

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/annotations"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/selection"
)

// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachinetemplates;capstanmachinepooltemplates,verbs=get;list;watch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachinetemplates/status;capstanmachinepooltemplates/status,verbs=patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts;capstanclusters,verbs=get;list;watch

// Kind is a kind of template.
type Kind struct {
	name   string
	object func() client.Object
	list   func() client.ObjectList
	// parts returns the spec of a template's machines, and the status of the template.
	parts func(client.Object) (*infrav1.CapstanMachineSpec, *infrav1.CapstanMachineTemplateStatus)
}

// Kinds are the templates of machines, and those of pools.
var Kinds = []Kind{
	{
		infrav1.MachineTemplateKind,
		func() client.Object { return &infrav1.CapstanMachineTemplate{} },
		func() client.ObjectList { return &infrav1.CapstanMachineTemplateList{} },
		func(o client.Object) (*infrav1.CapstanMachineSpec, *infrav1.CapstanMachineTemplateStatus) {
			t := o.(*infrav1.CapstanMachineTemplate)
			return &t.Spec.Template.Spec, &t.Status
		},
	},
	{
		infrav1.MachinePoolTemplateKind,
		func() client.Object { return &infrav1.CapstanMachinePoolTemplate{} },
		func() client.ObjectList { return &infrav1.CapstanMachinePoolTemplateList{} },
		func(o client.Object) (*infrav1.CapstanMachineSpec, *infrav1.CapstanMachineTemplateStatus) {
			t := o.(*infrav1.CapstanMachinePoolTemplate)
			return &t.Spec.Template.Spec.MachineTemplate.Spec, (*infrav1.CapstanMachineTemplateStatus)(&t.Status)
		},
	},
}

// Reconciler fills in the status of the templates of a kind.
type Reconciler struct {
	reconciling.Options
	Client client.Client
	Kind   Kind
}

// SetupWithManager adds the reconciler.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	return r.Controller(mgr, r.Kind.name).
		For(r.Kind.object()).
		Watches(&infrav1.CapstanHost{}, handler.EnqueueRequestsFromMapFunc(r.all), predicate.Or(reconciling.IgnoreStatus(), sizeChanged)).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.ofNamespace), selection.NamespaceChanged()).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(r.ofCluster), clusterChanged).
		Watches(&infrav1.CapstanCluster{}, handler.EnqueueRequestsFromMapFunc(r.ofCapstanCluster), selectorChanged).
		Complete(ctx, reconciling.Traced(r.Kind.name, r))
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	t := r.Kind.object()
	if err := r.Client.Get(ctx, req.NamespacedName, t); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	// A template has no conditions, so that only the pause itself is obeyed (ALL-08).
	if !r.Watches(t) || !t.GetDeletionTimestamp().IsZero() || annotations.HasPaused(t) {
		return ctrl.Result{}, nil
	}
	cluster, err := util.GetOwnerCluster(ctx, r.Client, metadata(t))
	if client.IgnoreNotFound(err) != nil || cluster != nil && annotations.IsPaused(cluster, t) {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	before := t.DeepCopyObject().(client.Object)
	spec, status := r.Kind.parts(t)
	usable, err := hostselection.UsableIn(ctx, r.Client, cluster, t.GetNamespace(), spec.HostSelector)
	if err != nil {
		return ctrl.Result{}, err
	}
	described := Describe(*spec, usable)
	if equality.Semantic.DeepEqual(*status, described) {
		return ctrl.Result{}, nil
	}
	*status = described
	return ctrl.Result{}, r.Client.Status().Patch(ctx, t, client.MergeFrom(before))
}

// metadata that finds the owner of a template.
func metadata(t client.Object) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: t.GetNamespace(), OwnerReferences: t.GetOwnerReferences()}
}

// Describe returns the minimum resources of a machine of the template on any of the hosts. A machine that takes all of
// its host's processors has at least those of the smallest host.
func Describe(spec infrav1.CapstanMachineSpec, usable []infrav1.CapstanHost) infrav1.CapstanMachineTemplateStatus {
	memory := resource.MustParse(infrav1.DefaultMachineMemory)
	if spec.Memory != nil {
		memory = spec.Memory.DeepCopy()
	}
	disk := ptr.Deref(spec.Disk.Size, resource.MustParse(infrav1.DefaultMachineDiskSize))
	out := infrav1.CapstanMachineTemplateStatus{Capacity: corev1.ResourceList{
		corev1.ResourceMemory: memory, corev1.ResourceEphemeralStorage: disk.DeepCopy(),
	}}
	if spec.CPUs > 0 {
		out.Capacity[corev1.ResourceCPU] = *resource.NewQuantity(int64(spec.CPUs), resource.DecimalSI)
	}
	for _, d := range spec.Devices { // An autoscaler matches them with the resources that pods request.
		if !d.IsNode() {
			out.Capacity[corev1.ResourceName(d.Name)] = *resource.NewQuantity(int64(d.Number()), resource.DecimalSI)
		}
	}
	infos := map[infrav1.NodeInfo]bool{}
	for i := range usable {
		s := &usable[i].Status
		if cpu, ok := s.Capacity[corev1.ResourceCPU]; ok && spec.CPUs == 0 {
			if least, ok := out.Capacity[corev1.ResourceCPU]; !ok || cpu.Cmp(least) < 0 {
				out.Capacity[corev1.ResourceCPU] = cpu
			}
		}
		if s.NodeInfo != (infrav1.NodeInfo{}) {
			infos[s.NodeInfo] = true
		}
	}
	if len(infos) == 1 { // hosts of several architectures: it depends
		for info := range infos {
			out.NodeInfo = info
		}
	}
	return out
}

package controlplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/external"
	"sigs.k8s.io/cluster-api/util"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// infrastructure reads the infrastructure provider's objects, and watches their kinds.
type infrastructure struct {
	*clients
	strictContract bool
	// clusters, templates and machines watch the kinds that have these roles.
	clusters, templates, machines *roleWatch
}

// roleWatch watches the kinds of the objects of one role. A user can give one kind several roles. Each role maps the objects in its own way,
// so each needs a tracker: a tracker watches a kind once.
type roleWatch struct {
	tracker    external.ObjectTracker
	toRequests handler.MapFunc
}

// start the watch on the kind of the object, once.
func (w *roleWatch) start(ctx context.Context, obj client.Object) error {
	if w == nil {
		return nil // A test without a manager.
	}
	return w.tracker.Watch(ctrl.LoggerFrom(ctx), obj, handler.EnqueueRequestsFromMapFunc(w.toRequests))
}

// watchWith sets the controller that gets the events of the infrastructure provider's objects.
func (r *infrastructure) watchWith(c controller.Controller, from cache.Cache, scheme *runtime.Scheme, log *logr.Logger) {
	role := func(toRequests handler.MapFunc) *roleWatch {
		return &roleWatch{
			tracker:    external.ObjectTracker{Controller: c, Cache: from, Scheme: scheme, PredicateLogger: log},
			toRequests: toRequests,
		}
	}
	r.clusters = role(r.infraClusterToControlPlane)
	r.templates = role(r.templateToControlPlanes)
	r.machines = role(r.updatingToControlPlane)
}

// missingTemplateError is the message about an infrastructure template that does not exist.
type missingTemplateError string

func (e missingTemplateError) Error() string { return string(e) }

// noEndpoint is the reason why no Machine is created before the endpoint is known.
const noEndpoint = "the control plane endpoint is not known yet"

// reconcile finds the endpoint of the control plane.
func (r *infrastructure) reconcile(ctx context.Context, s *scope) (result, error) {
	known, err := r.findEndpoint(ctx, s)
	if err != nil || !known {
		return result{blocked: noEndpoint, stop: true}, err
	}
	return result{}, nil
}

// findEndpoint reads the endpoint from the Cluster or, before core has copied it there, from the field of the contract in the
// infrastructure's object (CP-02).
func (r *infrastructure) findEndpoint(ctx context.Context, s *scope) (known bool, err error) {
	s.endpoint = s.Cluster.Spec.ControlPlaneEndpoint
	if infrastructureCopied(s.Cluster) || !s.Cluster.Spec.InfrastructureRef.IsDefined() || r.strictContract {
		return s.endpoint.IsValid(), nil
	}
	infraCluster, err := external.GetObjectFromContractVersionedRef(ctx, r.Client, s.Cluster.Spec.InfrastructureRef, s.Cluster.Namespace)
	if err != nil {
		return s.endpoint.IsValid(), client.IgnoreNotFound(err)
	}
	s.InfraCluster = infraCluster
	if err := r.clusters.start(ctx, s.InfraCluster); err != nil || s.endpoint.IsValid() {
		return s.endpoint.IsValid(), err
	}
	host, _, _ := unstructured.NestedString(s.InfraCluster.Object, "spec", "controlPlaneEndpoint", "host")
	port, _, _ := unstructured.NestedInt64(s.InfraCluster.Object, "spec", "controlPlaneEndpoint", "port")
	s.endpoint = clusterv1.APIEndpoint{Host: host, Port: int32(port)}
	return s.endpoint.IsValid(), nil
}

// infrastructureCopied reports whether the Cluster has the endpoint and the failure domains of the infrastructure's object. The steps do
// not read this object then, and later changes are changes of the Cluster.
func infrastructureCopied(cluster *clusterv1.Cluster) bool {
	return ptr.Deref(cluster.Status.Initialization.InfrastructureProvisioned, false) && cluster.Spec.ControlPlaneEndpoint.IsValid()
}

// ownTemplate adds the Cluster as an owner of the infrastructure template, so that it is moved and deleted with it (ALL-11).
func (r *infrastructure) ownTemplate(ctx context.Context, s *scope) (result, error) {
	template, err := r.template(ctx, s)
	missing := missingTemplateError("")
	if errors.As(err, &missing) {
		return blocked(missing.Error()), nil
	}
	if err != nil {
		return result{}, err
	}
	ref := metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: s.Cluster.Name, UID: s.Cluster.UID}
	return result{}, reconciling.Own(ctx, r.Client, template, ref)
}

// template returns the template of the infrastructure machines. The error is a missingTemplateError when it does not exist;
// its creation is an event then.
func (r *infrastructure) template(ctx context.Context, s *scope) (*unstructured.Unstructured, error) {
	ref := s.Object.Spec.MachineTemplate.Spec.InfrastructureRef
	template, err := external.GetObjectFromContractVersionedRef(ctx, r.Client, ref, s.Object.Namespace)
	if err != nil {
		if client.IgnoreNotFound(err) == nil {
			missing := missingTemplateError(fmt.Sprintf("the %s %s does not exist", ref.Kind, ref.Name))
			return nil, cmp.Or[error](r.watchTemplates(ctx, ref), missing)
		}
		return nil, err
	}
	return template, nil
}

// infraClusterToControlPlane maps an infrastructure cluster to the control plane of its owner, until core has copied its fields.
func (r *infrastructure) infraClusterToControlPlane(ctx context.Context, obj client.Object) []ctrl.Request {
	cluster, err := util.GetOwnerCluster(ctx, r.Client, metav1.ObjectMeta{Namespace: obj.GetNamespace(), OwnerReferences: obj.GetOwnerReferences()})
	if !reconciling.Found(ctx, err) || cluster == nil || infrastructureCopied(cluster) {
		return nil
	}
	return clusterToControlPlane(ctx, cluster)
}

// watchTemplates starts the watch on a kind of infrastructure template, once: a missing template may be created later.
func (r *infrastructure) watchTemplates(ctx context.Context, ref clusterv1.ContractVersionedObjectReference) error {
	mapping, err := r.Client.RESTMapper().RESTMapping(ref.GroupKind())
	if err != nil {
		return err
	}
	obj := &unstructured.Unstructured{}
	obj.SetGroupVersionKind(mapping.GroupVersionKind)
	return r.templates.start(ctx, obj)
}

func (r *infrastructure) templateToControlPlanes(ctx context.Context, obj client.Object) []ctrl.Request {
	return reconciling.RequestsIf(ctx, r.Client, &controlplanev1.CapstanControlPlaneList{}, func(cp *controlplanev1.CapstanControlPlane) bool {
		return cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name == obj.GetName()
	}, client.InNamespace(obj.GetNamespace()))
}

// updatingToControlPlane maps an infrastructure machine that is updated in place to the control plane of its cluster:
// the progress of the update is an event.
func (r *infrastructure) updatingToControlPlane(ctx context.Context, obj client.Object) []ctrl.Request {
	_, ours := obj.GetLabels()[clusterv1.MachineControlPlaneLabel]
	if _, updating := obj.GetAnnotations()[clusterv1.UpdateInProgressAnnotation]; !ours || !updating {
		return nil
	}
	cluster, err := util.GetClusterByName(ctx, r.Client, obj.GetNamespace(), obj.GetLabels()[clusterv1.ClusterNameLabel])
	if !reconciling.Found(ctx, err) {
		return nil
	}
	return clusterToControlPlane(ctx, cluster)
}

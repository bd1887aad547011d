package reconciling

import (
	"context"
	"fmt"
	"maps"
	"slices"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Requests returns the requests for all objects of a list. An error of the read is logged, and there are no requests.
func Requests(ctx context.Context, c client.Reader, list client.ObjectList, opts ...client.ListOption) []reconcile.Request {
	return RequestsIf(ctx, c, list, func(client.Object) bool { return true }, opts...)
}

// RequestsIf returns the requests for the objects of a list that keep accepts. An error of the read is logged, and there are no requests.
// The objects can belong to the cache, so keep must not change them: only their names are needed.
func RequestsIf[T client.Object](ctx context.Context, c client.Reader, list client.ObjectList, keep func(T) bool, opts ...client.ListOption) []reconcile.Request {
	if err := c.List(ctx, list, append(slices.Clone(opts), client.UnsafeDisableDeepCopy)...); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Cannot list the objects that an event concerns", "list", fmt.Sprintf("%T", list))
		return nil
	}
	var out []reconcile.Request
	_ = apimeta.EachListItem(list, func(o runtime.Object) error { // The list is one of Capstan's and has items.
		if object := o.(T); keep(object) {
			out = append(out, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(object)})
		}
		return nil
	})
	return out
}

// Found reports whether a read of an object that an event concerns has found it. An error is logged, because the event is lost.
func Found(ctx context.Context, err error) bool {
	if client.IgnoreNotFound(err) != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Cannot read an object that an event concerns")
	}
	return err == nil
}

// IgnoreStatus drops updates that change only the status or the finalizers of an object. It is for objects that a
// reconciler watches beside its own. A reconciler must see the status of its own objects: if a write took effect
// after the next reconcile had read the object from the cache, only the event of that write corrects the status.
// Resyncs pass.
func IgnoreStatus() predicate.Predicate {
	return FilterUpdates(func(before, after client.Object) bool {
		return before.GetResourceVersion() == after.GetResourceVersion() ||
			before.GetGeneration() != after.GetGeneration() ||
			before.GetDeletionTimestamp().IsZero() != after.GetDeletionTimestamp().IsZero() ||
			!maps.Equal(before.GetLabels(), after.GetLabels()) ||
			!maps.Equal(before.GetAnnotations(), after.GetAnnotations()) ||
			!slices.EqualFunc(before.GetOwnerReferences(), after.GetOwnerReferences(), equalOwner)
	})
}

// FilterUpdates passes the updates of an object for which passes is true, and all creations and deletions.
func FilterUpdates[T client.Object](passes func(before, after T) bool) predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool { return passes(e.ObjectOld.(T), e.ObjectNew.(T)) }}
}

// Changed passes the updates of an object for which changed is true, and no other events.
func Changed[T client.Object](changed func(before, after T) bool) predicate.Predicate {
	return predicate.Funcs{
		CreateFunc:  func(event.CreateEvent) bool { return false },
		DeleteFunc:  func(event.DeleteEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
		UpdateFunc:  func(e event.UpdateEvent) bool { return changed(e.ObjectOld.(T), e.ObjectNew.(T)) },
	}
}

// Became passes the updates with which holds becomes true for an object.
func Became[T client.Object](holds func(T) bool) predicate.Predicate {
	return Changed(func(before, after T) bool { return !holds(before) && holds(after) })
}

// ControlPlaneInitialized passes the update with which the API server of a Cluster is known to answer.
func ControlPlaneInitialized() predicate.Predicate {
	return Became(func(c *clusterv1.Cluster) bool {
		return ptr.Deref(c.Status.Initialization.ControlPlaneInitialized, false)
	})
}

// OnlyCreates passes creations.
var OnlyCreates = predicate.Funcs{
	UpdateFunc:  func(event.UpdateEvent) bool { return false },
	DeleteFunc:  func(event.DeleteEvent) bool { return false },
	GenericFunc: func(event.GenericEvent) bool { return false },
}

// OnlyDeletes passes deletions.
var OnlyDeletes = predicate.Funcs{
	CreateFunc:  func(event.CreateEvent) bool { return false },
	UpdateFunc:  func(event.UpdateEvent) bool { return false },
	GenericFunc: func(event.GenericEvent) bool { return false },
}

// OwnedOrDeleting drops events of objects without an owner of the kind. The contract forbids changes of them, and with
// ReconcilerRateLimiting a reconcile without effect delays the next one.
func OwnedOrDeleting(owner schema.GroupKind) predicate.Predicate {
	return predicate.NewPredicateFuncs(func(obj client.Object) bool {
		return !obj.GetDeletionTimestamp().IsZero() || HasOwner(obj, owner)
	})
}

// ownerOf returns the owner reference of the kind, in any version, or nil.
func ownerOf(obj client.Object, owner schema.GroupKind) *metav1.OwnerReference {
	refs := obj.GetOwnerReferences()
	for i := range refs {
		gv, err := schema.ParseGroupVersion(refs[i].APIVersion)
		if err == nil && gv.Group == owner.Group && refs[i].Kind == owner.Kind {
			return &refs[i]
		}
	}
	return nil
}

// OwnerCluster returns the key of the Cluster that owns an object; ok is false if none does.
func OwnerCluster(obj client.Object) (cluster client.ObjectKey, ok bool) {
	owner := ownerOf(obj, clusterv1.GroupVersion.WithKind("Cluster").GroupKind())
	if owner == nil {
		return client.ObjectKey{}, false
	}
	return client.ObjectKey{Namespace: obj.GetNamespace(), Name: owner.Name}, true
}

// HasOwner reports whether an object has an owner of the kind, in any version.
func HasOwner(obj client.Object, owner schema.GroupKind) bool { return ownerOf(obj, owner) != nil }

func equalOwner(a, b metav1.OwnerReference) bool {
	return a.UID == b.UID && a.Kind == b.Kind && a.Name == b.Name
}

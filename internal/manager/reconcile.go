package manager

import (
	"context"
	"maps"
	"slices"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	capicontroller "sigs.k8s.io/cluster-api/util/controller"
	"sigs.k8s.io/cluster-api/util/labels"
	"sigs.k8s.io/cluster-api/util/patch"
)

// Watches says whether an object passes the watch filter (ALL-07). Reconcilers ask it for the object
// that they were called for: an event of another object may have led to it.
func (o Options) Watches(obj client.Object) bool {
	return o.WatchFilter == "" || labels.HasWatchLabel(obj, o.WatchFilter)
}

// WaitForCache keeps an object from being reconciled before the cache shows what was written for it. With a watch
// namespace it does nothing, as Cluster API's tool cannot ask the cache of a namespace, and fails each
// reconcile: then one may meet a cache that is behind, which costs a conflict and nothing else.
func (o Options) WaitForCache(c capicontroller.Controller, reconciled client.Object, written capicontroller.GroupVersionKindType, resourceVersion string) {
	if o.WatchNamespace == "" {
		c.DeferNextReconcileUntilCacheUpToDate(reconciled, written, resourceVersion)
	}
}

// Requests are those for the objects of a list of ours; none when they cannot be read.
func Requests(ctx context.Context, c client.Reader, list client.ObjectList, opts ...client.ListOption) []reconcile.Request {
	if c.List(ctx, list, opts...) != nil {
		return nil
	}
	var out []reconcile.Request
	_ = apimeta.EachListItem(list, func(o runtime.Object) error { // a list of ours: it has items
		out = append(out, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(o.(client.Object))})
		return nil
	})
	return out
}

// IgnoreStatus drops updates of an object that changed only its status or finalizers. It is for objects that a
// reconciler watches beside its own. A reconciler must see the status of its own objects: if a write took
// effect after the next reconcile had read the object from the cache, only the event of that write
// corrects the status. Resyncs pass.
func IgnoreStatus() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld, e.ObjectNew
		return before.GetResourceVersion() == after.GetResourceVersion() ||
			before.GetGeneration() != after.GetGeneration() ||
			before.GetDeletionTimestamp().IsZero() != after.GetDeletionTimestamp().IsZero() ||
			!maps.Equal(before.GetLabels(), after.GetLabels()) ||
			!maps.Equal(before.GetAnnotations(), after.GetAnnotations()) ||
			!slices.EqualFunc(before.GetOwnerReferences(), after.GetOwnerReferences(), equalOwner)
	}}
}

// OwnedOrDeleting drops events of objects that nothing of the kind owns yet: the contract says to
// do nothing for them, and a reconcile that does nothing uses up the object's turn.
func OwnedOrDeleting(owner schema.GroupKind) predicate.Predicate {
	return predicate.NewPredicateFuncs(func(obj client.Object) bool {
		return !obj.GetDeletionTimestamp().IsZero() || HasOwner(obj, owner)
	})
}

// OwnerOf is the owner of the kind, of whatever version, that an object has; nil if it has none.
func OwnerOf(obj client.Object, owner schema.GroupKind) *metav1.OwnerReference {
	refs := obj.GetOwnerReferences()
	for i := range refs {
		gv, err := schema.ParseGroupVersion(refs[i].APIVersion)
		if err == nil && gv.Group == owner.Group && refs[i].Kind == owner.Kind {
			return &refs[i]
		}
	}
	return nil
}

// HasOwner says whether an object has an owner of the kind, of whatever version.
func HasOwner(obj client.Object, owner schema.GroupKind) bool { return OwnerOf(obj, owner) != nil }

func equalOwner(a, b metav1.OwnerReference) bool {
	return a.UID == b.UID && a.Kind == b.Kind && a.Name == b.Name
}

// Record writes the spec and metadata of obj at once, and returns a patch helper for what follows.
// Decisions that must be stored before a side effect go through it. before is obj as it was read; the write
// fails when something else wrote in between, so that nothing is decided on the grounds of a cache
// that is behind. The status in memory stays as it is, for the helper to write at the end.
func Record(ctx context.Context, c client.Client, live client.Client, before, obj client.Object) (*patch.Helper, error) {
	stored := obj.DeepCopyObject().(client.Object)
	if err := c.Patch(ctx, stored, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return nil, err
	}
	obj.SetResourceVersion(stored.GetResourceVersion())
	obj.SetGeneration(stored.GetGeneration())
	obj.SetManagedFields(stored.GetManagedFields())
	return patch.NewHelper(stored, live)
}

// Package reconciling contains the common parts of all reconcilers: their options, their controllers, and the first and
// the last steps of each reconcile, and the answers of webhooks. The four providers use it. The manager runs the providers
// that are described with it.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package reconciling

import (
	"context"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/finalizers"
	"sigs.k8s.io/cluster-api/util/paused"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// Object is an object with conditions.
type Object = paused.ConditionSetter

// Frame contains the first and last steps of each reconcile of a kind.
type Frame struct {
	// Client writes finalizers.
	Client client.Client
	// Live reads from the API server; see Patch.
	Live client.Client
	// Finalizer is added to each object that is not being deleted. Empty means none.
	Finalizer string
	// Summary contains the types of the conditions that Ready summarizes; see SetReady. Without them, the reconciler
	// sets Ready.
	Summary []string
	// Wrote is called with an object and the resourceVersion of its status that End has written. It can be nil.
	Wrote func(obj Object, resourceVersion string)
}

// Begin sets the condition Paused (ALL-08) and adds the finalizer. cluster can be nil. It returns the Patch for End,
// or nil if the object is paused or does not exist any more; then the reconcile ends.
func (f *Frame) Begin(ctx context.Context, cluster *clusterv1.Cluster, obj Object) (*Patch, error) {
	if isPaused(cluster, obj) || conditions.IsTrue(obj, clusterv1.PausedCondition) {
		isPaused, _, err := paused.EnsurePausedCondition(ctx, f.Live, cluster, obj)
		if err != nil || isPaused {
			return nil, client.IgnoreNotFound(err)
		}
	}
	if f.Finalizer != "" {
		added, err := finalizers.EnsureFinalizer(ctx, f.Client, obj, f.Finalizer)
		if err != nil {
			return nil, client.IgnoreNotFound(err)
		}
		if added {
			ctrl.LoggerFrom(ctx).V(4).Info("Added the finalizer", "finalizer", f.Finalizer)
		}
	}
	patch := NewPatch(obj, f.Live)
	// End writes it with the other conditions: each write of a status makes Cluster API core reconcile its owners.
	conditions.Set(obj, metav1.Condition{Type: clusterv1.PausedCondition, Status: metav1.ConditionFalse, Reason: clusterv1.NotPausedReason})
	return patch, nil
}

// isPaused reports whether the Cluster or the object itself is paused.
func isPaused(cluster *clusterv1.Cluster, obj Object) bool {
	return cluster != nil && annotations.IsPaused(cluster, obj) || annotations.HasPaused(obj)
}

// End sets Ready and writes the changes since Begin.
func (f *Frame) End(ctx context.Context, patch *Patch, obj Object) error {
	if len(f.Summary) > 0 {
		if err := SetReady(obj, f.Summary...); err != nil {
			return err
		}
	}
	if err := patch.Write(ctx, obj); err != nil {
		return err
	}
	if f.Wrote != nil && patch.written != "" {
		f.Wrote(obj, patch.written)
	}
	return nil
}

// Record writes the spec and metadata of obj at once, and returns a Patch for later changes. It stores decisions that
// must be recorded before a side effect. before is obj as it was read. The write fails with a conflict if the stored
// object is newer, so that decisions never depend on an old cache. The status in memory does not change; End writes it.
func Record(ctx context.Context, c, live client.Client, before, obj Object) (*Patch, error) {
	stored := obj.DeepCopyObject().(Object)
	if err := c.Patch(ctx, stored, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return nil, err
	}
	obj.SetResourceVersion(stored.GetResourceVersion())
	obj.SetGeneration(stored.GetGeneration())
	obj.SetManagedFields(stored.GetManagedFields())
	return NewPatch(stored, live), nil
}

// Change applies change to the metadata and spec of an object and writes the result. It fails with a conflict if the
// stored object is newer than obj: the patch can replace lists, for example finalizers and owner references.
func Change(ctx context.Context, c client.Writer, obj client.Object, change func()) error {
	before := obj.DeepCopyObject().(client.Object)
	change()
	return c.Patch(ctx, obj, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// Own writes an owner reference, unless the object has it. It replaces an outdated reference to the same owner. It fails with a conflict like
// Change.
func Own(ctx context.Context, c client.Writer, obj client.Object, ref metav1.OwnerReference) error {
	if util.HasExactOwnerRef(obj.GetOwnerReferences(), ref) {
		return nil
	}
	return Change(ctx, c, obj, func() {
		obj.SetOwnerReferences(util.EnsureOwnerRef(slices.Clone(obj.GetOwnerReferences()), ref))
	})
}

// ChangeStatus is Change for the status.
func ChangeStatus(ctx context.Context, c client.StatusClient, obj client.Object, change func()) error {
	before := obj.DeepCopyObject().(client.Object)
	change()
	return c.Status().Patch(ctx, obj, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// DropFinalizer removes a finalizer if the object is still as it was read. The API server deletes an object that loses
// its last finalizer during its deletion. After a patch, it deletes the object that has the name at that moment, and
// this can be a successor. An update deletes only the object with the UID.
func DropFinalizer(ctx context.Context, c client.Writer, obj client.Object, finalizer string) error {
	if len(obj.GetFinalizers()) == 1 && controllerutil.ContainsFinalizer(obj, finalizer) && !obj.GetDeletionTimestamp().IsZero() {
		obj.SetFinalizers(nil)
		return c.Update(ctx, obj)
	}
	return Change(ctx, c, obj, func() { controllerutil.RemoveFinalizer(obj, finalizer) })
}

// CopyWatchLabel copies an object's label of the watch filter to an object that is created for it, so that the same
// manager reconciles both (ALL-07).
func CopyWatchLabel(labels map[string]string, from client.Object) {
	if value := from.GetLabels()[clusterv1.WatchLabel]; value != "" {
		labels[clusterv1.WatchLabel] = value
	}
}

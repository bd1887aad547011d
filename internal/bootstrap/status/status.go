// Package status holds how the bootstrap and control plane reconcilers report: pausing, and one
// patch at the end of a reconciliation.
//
// Layer: reconciler.
package status

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Object is an object of ours with conditions.
type Object interface {
	client.Object
	conditions.Setter
}

// SetPaused sets the Paused condition and reports whether the object is paused (ALL-08).
func SetPaused(cluster *clusterv1.Cluster, obj Object) bool {
	condition := metav1.Condition{Type: clusterv1.PausedCondition, Status: metav1.ConditionFalse, Reason: clusterv1.NotPausedReason}
	paused := annotations.IsPaused(cluster, obj)
	if paused {
		condition.Status, condition.Reason = metav1.ConditionTrue, clusterv1.PausedReason
		condition.Message = fmt.Sprintf("The annotation %s is set", clusterv1.PausedAnnotation)
		if ptr.Deref(cluster.Spec.Paused, false) {
			condition.Message = "The Cluster's spec.paused is true"
		}
	}
	conditions.Set(obj, condition)
	return paused
}

// Patch writes what has changed in the status since before was copied; nothing when nothing has. It
// is a merge patch without a lock, because each object's status has one writer.
func Patch(ctx context.Context, c client.Client, before, obj client.Object) error {
	patch := client.MergeFrom(before)
	data, err := patch.Data(obj)
	if err != nil {
		return err
	}
	if string(data) == "{}" {
		return nil
	}
	// The answer goes into a copy: an older answer must not overwrite what the caller has.
	answer := obj.DeepCopyObject().(client.Object)
	if err := c.Status().Patch(ctx, answer, client.RawPatch(patch.Type(), data)); err != nil {
		return client.IgnoreNotFound(err)
	}
	return nil
}

package testenv

import (
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// PausedDeletion reports whether a reconciler has seen the deletion of a paused object. The deletion increases the generation, and the
// condition Paused of a paused object has the last generation that was seen.
func PausedDeletion(obj interface {
	client.Object
	conditions.Getter
}) bool {
	c := conditions.Get(obj, clusterv1.PausedCondition)
	return !obj.GetDeletionTimestamp().IsZero() && c != nil && c.ObservedGeneration == obj.GetGeneration()
}

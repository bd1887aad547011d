package controlplane

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/external"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// abandonedAfter is for how long a Machine must be the only thing that is left of a machine before Capstan removes core's
// finalizer. Core itself takes seconds.
const abandonedAfter = 10 * time.Minute

// abandonment releases deleted Machines that Cluster API's core has abandoned.
type abandonment struct {
	*clients
	*recorder
	// since is the time since which a Machine is the only remaining object of a machine.
	since sightings
}

// releaseAbandoned removes core's finalizer from deleted Machines whose other objects no longer exist, if core does not remove it.
// A version of core without this finalizer never would. again is the time until the next Machine can be released, because no
// event marks it.
func (r *abandonment) releaseAbandoned(ctx context.Context, s *scope) (again time.Duration, err error) {
	controlPlane := client.ObjectKeyFromObject(s.Object)
	r.since.forgetAllBut(controlPlane, uidsOf(s.Machines)...)
	for _, machine := range s.Machines {
		if !onlyCoresFinalizer(machine) {
			continue
		}
		gone, err := r.partsGone(ctx, machine)
		if err != nil {
			return 0, err
		}
		if !gone {
			continue
		}
		if left := abandonedAfter - s.Now.Sub(r.since.last(controlPlane, machine.UID, s.Now)); left > 0 {
			again = earlier(again, left)
			continue
		}
		before := machine.DeepCopy()
		machine.Finalizers = nil
		if err := client.IgnoreNotFound(r.Client.Patch(ctx, machine, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))); err != nil {
			return 0, fmt.Errorf("cannot release the Machine %s: %w", machine.Name, err)
		}
		r.event(s, corev1.EventTypeWarning, "Released", "Release", "Removed the finalizer %s of Machine %s, whose objects have been gone for %s", clusterv1.MachineFinalizer, machine.Name, abandonedAfter)
	}
	return again, nil
}

func uidsOf(machines collections.Machines) (out []types.UID) {
	for _, machine := range machines {
		out = append(out, machine.UID)
	}
	return out
}

// earlier is the shorter of two durations; 0 means never.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// onlyCoresFinalizer is true for a deleted Machine that only core's finalizer keeps. Without a limit for the deletion
// of the Node, core may need any time.
func onlyCoresFinalizer(m *clusterv1.Machine) bool {
	return !m.DeletionTimestamp.IsZero() && slices.Equal(m.Finalizers, []string{clusterv1.MachineFinalizer}) &&
		!annotations.HasWithPrefix(clusterv1.PreTerminateDeleteHookAnnotationPrefix, m.Annotations) &&
		ptr.Deref(m.Spec.Deletion.NodeDeletionTimeoutSeconds, 10) > 0
}

// partsGone is true if the CapstanConfig and the infrastructure machine do not exist. Core deletes both before it removes its
// finalizer.
func (r *abandonment) partsGone(ctx context.Context, machine *clusterv1.Machine) (bool, error) {
	config := &bootstrapv1.CapstanConfig{}
	key := client.ObjectKey{Namespace: machine.Namespace, Name: machine.Spec.Bootstrap.ConfigRef.Name}
	if err := r.LiveClient.Get(ctx, key, config); !apierrors.IsNotFound(err) {
		return false, err
	}
	_, err := external.GetObjectFromContractVersionedRef(ctx, r.LiveClient, machine.Spec.InfrastructureRef, machine.Namespace)
	return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
}

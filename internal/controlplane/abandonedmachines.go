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
	"capstan.dev/capstan/internal/order"
	"capstan.dev/capstan/internal/reconciling"
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
		if !onlyCoresFinalizer(machine) || triesForever(machine) {
			continue
		}
		parts, err := r.remainingParts(ctx, machine)
		if err != nil {
			return 0, err
		}
		if len(parts) > 0 {
			continue
		}
		if left := abandonedAfter - s.Now.Sub(r.since.last(controlPlane, machine.UID, s.Now)); left > 0 {
			again = order.Sooner(again, left)
			continue
		}
		if err := r.release(ctx, s, machine, "whose objects have been gone for "+abandonedAfter.String()); err != nil {
			return 0, err
		}
	}
	return again, nil
}

// release removes the finalizer of a Machine that has only that of core.
func (r *abandonment) release(ctx context.Context, s *scope, machine *clusterv1.Machine, why string) error {
	if err := client.IgnoreNotFound(reconciling.Change(ctx, r.Client, machine, func() { machine.Finalizers = nil })); err != nil {
		return fmt.Errorf("cannot release the Machine %s: %w", machine.Name, err)
	}
	r.event(s, corev1.EventTypeWarning, "Released", "Release", "Removed the finalizer %s of Machine %s, %s", clusterv1.MachineFinalizer, machine.Name, why)
	return nil
}

func uidsOf(machines collections.Machines) (out []types.UID) {
	for _, machine := range machines {
		out = append(out, machine.UID)
	}
	return out
}

// onlyCoresFinalizer is true for a deleted Machine that only core's finalizer keeps.
func onlyCoresFinalizer(m *clusterv1.Machine) bool {
	return !m.DeletionTimestamp.IsZero() && slices.Equal(m.Finalizers, []string{clusterv1.MachineFinalizer}) && !hasHook(m)
}

// hasHook is true for a Machine whose infrastructure machine must not be deleted yet.
func hasHook(m *clusterv1.Machine) bool {
	return annotations.HasWithPrefix(clusterv1.PreTerminateDeleteHookAnnotationPrefix, m.Annotations)
}

// triesForever is true without a limit for the deletion of the Node: core may need any time.
func triesForever(m *clusterv1.Machine) bool {
	return ptr.Deref(m.Spec.Deletion.NodeDeletionTimeoutSeconds, 10) == 0
}

// remainingParts returns the existing ones of the infrastructure machine and the CapstanConfig. Core deletes both before it removes its
// finalizer.
func (r *abandonment) remainingParts(ctx context.Context, machine *clusterv1.Machine) (parts []client.Object, err error) {
	infraMachine, err := external.GetObjectFromContractVersionedRef(ctx, r.LiveClient, machine.Spec.InfrastructureRef, machine.Namespace)
	if err == nil {
		parts = append(parts, infraMachine)
	} else if !apierrors.IsNotFound(err) {
		return nil, err
	}
	config := &bootstrapv1.CapstanConfig{}
	err = r.LiveClient.Get(ctx, client.ObjectKey{Namespace: machine.Namespace, Name: machine.Spec.Bootstrap.ConfigRef.Name}, config)
	if err == nil {
		config.SetGroupVersionKind(bootstrapv1.GroupVersion.WithKind(bootstrapv1.ConfigKind))
		parts = append(parts, config)
	}
	return parts, client.IgnoreNotFound(err)
}

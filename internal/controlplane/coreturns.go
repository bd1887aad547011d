package controlplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/external"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// Cluster API's core reconciles each Machine once a second, and needs one turn for its finalizer, one for pausing, one to own
// the objects of the Machine and one to find the bootstrap data. The functions below do the same at once. They only save time
// (ALL-15): core does whatever is not done here, and releaseAbandoned covers a core that does not know its finalizer any more.
// With --strict-contract, core does all of it.

// freshMachine is newMachine with core's finalizer.
func (r *machines) freshMachine(s *scope, infraMachine *unstructured.Unstructured) *clusterv1.Machine {
	out := newMachine(s, infraMachine)
	if !r.StrictContract {
		out.Finalizers = []string{clusterv1.MachineFinalizer}
	}
	return out
}

// handOver makes the Machine the owner of its CapstanConfig and its infrastructure machine.
func (r *machines) handOver(ctx context.Context, machine *clusterv1.Machine, objects ...client.Object) error {
	if r.StrictContract {
		return nil
	}
	var errs []error
	for _, object := range objects {
		before := object.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy has the type of the original.
		object.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(machine, clusterv1.GroupVersion.WithKind("Machine"))})
		errs = append(errs, client.IgnoreNotFound(r.Client.Patch(ctx, object, client.MergeFrom(before))))
	}
	return errors.Join(errs...)
}

// abandonedAfter is for how long a Machine must be the only thing that is left of a machine before Capstan removes core's
// finalizer. Core itself takes seconds.
const abandonedAfter = 10 * time.Minute

// releaseAbandoned removes core's finalizer from deleted Machines whose other objects are gone and which core leaves alone:
// a core that does not know the finalizer would never remove it. again is the time until the next Machine may be
// released, which is no event.
func (r *objects) releaseAbandoned(ctx context.Context, s *scope) (again time.Duration, err error) {
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
		if left := abandonedAfter - s.Now.Sub(r.abandoned.last(machine.UID, s.Now)); left > 0 {
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

// earlier is the shorter of two durations; 0 means never.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// onlyCoresFinalizer is true for a deleted Machine that only core's finalizer keeps. Without a limit for the deletion of the
// Node, core may need as long as it wants.
func onlyCoresFinalizer(m *clusterv1.Machine) bool {
	return !m.DeletionTimestamp.IsZero() && slices.Equal(m.Finalizers, []string{clusterv1.MachineFinalizer}) &&
		!annotations.HasWithPrefix(clusterv1.PreTerminateDeleteHookAnnotationPrefix, m.Annotations) &&
		ptr.Deref(m.Spec.Deletion.NodeDeletionTimeoutSeconds, 10) > 0
}

// partsGone is true if the CapstanConfig and the infrastructure machine do not exist. Core deletes both before it removes its
// finalizer.
func (r *objects) partsGone(ctx context.Context, machine *clusterv1.Machine) (bool, error) {
	config := &bootstrapv1.CapstanConfig{}
	key := client.ObjectKey{Namespace: machine.Namespace, Name: machine.Spec.Bootstrap.ConfigRef.Name}
	if err := r.LiveClient.Get(ctx, key, config); !apierrors.IsNotFound(err) {
		return false, err
	}
	_, err := external.GetObjectFromContractVersionedRef(ctx, r.LiveClient, machine.Spec.InfrastructureRef, machine.Namespace)
	return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
}

// bootstrapData is the step that names the bootstrap data in Machines.
type bootstrapData struct{ *objects }

// reconcile writes the name of the bootstrap data into Machines whose CapstanConfig has it ready.
func (r *bootstrapData) reconcile(ctx context.Context, s *scope) (result, error) {
	if r.StrictContract {
		return result{}, nil
	}
	for _, machine := range s.Machines {
		if machine.Spec.Bootstrap.DataSecretName != nil || !machine.DeletionTimestamp.IsZero() {
			continue
		}
		config := &bootstrapv1.CapstanConfig{}
		err := r.Client.Get(ctx, client.ObjectKey{Namespace: machine.Namespace, Name: machine.Spec.Bootstrap.ConfigRef.Name}, config)
		if client.IgnoreNotFound(err) != nil {
			return result{}, err
		}
		if err != nil || !hasData(config) {
			continue
		}
		before := machine.DeepCopy()
		machine.Spec.Bootstrap.DataSecretName = ptr.To(config.Status.DataSecretName)
		if err := client.IgnoreNotFound(r.Client.Patch(ctx, machine, client.MergeFrom(before))); err != nil {
			return result{}, err
		}
	}
	return result{}, nil
}

func hasData(object client.Object) bool {
	config, ok := object.(*bootstrapv1.CapstanConfig)
	return ok && ptr.Deref(config.Status.Initialization.DataSecretCreated, false) && config.Status.DataSecretName != ""
}

// dataCreated passes the update that reports the bootstrap data of a CapstanConfig.
func dataCreated() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc:  func(event.CreateEvent) bool { return false },
		DeleteFunc:  func(event.DeleteEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
		UpdateFunc:  func(e event.UpdateEvent) bool { return !hasData(e.ObjectOld) && hasData(e.ObjectNew) },
	}
}

package controlplane

import (
	"context"
	"errors"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// Core comes to each Machine once a second, and needs a turn for its finalizer, one for pausing, one to
// own the Machine's objects and one to see the bootstrap data. What follows does at once what those
// turns do. Only speed rests on it (ALL-15): what is left undone here, core does.

// handOver makes the Machine the owner of its CapstanConfig and its infrastructure machine.
func (r *Reconciler) handOver(ctx context.Context, machine *clusterv1.Machine, objects ...client.Object) error {
	var errs []error
	for _, object := range objects {
		before := object.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy has the type of the original.
		object.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(machine, clusterv1.GroupVersion.WithKind("Machine"))})
		errs = append(errs, client.IgnoreNotFound(r.Client.Patch(ctx, object, client.MergeFrom(before))))
	}
	return errors.Join(errs...)
}

// nameData names the bootstrap data in Machines whose CapstanConfig has it ready.
func (r *Reconciler) nameData(ctx context.Context, s *scope) error {
	for _, machine := range s.machines {
		if machine.Spec.Bootstrap.DataSecretName != nil || !machine.DeletionTimestamp.IsZero() {
			continue
		}
		config := &bootstrapv1.CapstanConfig{}
		err := r.Client.Get(ctx, client.ObjectKey{Namespace: machine.Namespace, Name: machine.Spec.Bootstrap.ConfigRef.Name}, config)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if err != nil || !hasData(config) {
			continue
		}
		before := machine.DeepCopy()
		machine.Spec.Bootstrap.DataSecretName = ptr.To(config.Status.DataSecretName)
		if err := client.IgnoreNotFound(r.Client.Patch(ctx, machine, client.MergeFrom(before))); err != nil {
			return err
		}
	}
	return nil
}

func hasData(object client.Object) bool {
	config, ok := object.(*bootstrapv1.CapstanConfig)
	return ok && ptr.Deref(config.Status.Initialization.DataSecretCreated, false) && config.Status.DataSecretName != ""
}

// dataCreated passes the moment at which a CapstanConfig's data is there.
func dataCreated() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc:  func(event.CreateEvent) bool { return false },
		DeleteFunc:  func(event.DeleteEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
		UpdateFunc:  func(e event.UpdateEvent) bool { return !hasData(e.ObjectOld) && hasData(e.ObjectNew) },
	}
}

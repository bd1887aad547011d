package controlplane

import (
	"context"
	"errors"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
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
	if !r.strictContract {
		out.Finalizers = []string{clusterv1.MachineFinalizer}
	}
	return out
}

// handOver makes the Machine the owner of its CapstanConfig and its infrastructure machine.
func (r *machines) handOver(ctx context.Context, machine *clusterv1.Machine, objects ...client.Object) error {
	if r.strictContract {
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

// bootstrapData is the step that names the bootstrap data in Machines.
type bootstrapData struct {
	*clients
	strictContract bool
}

// reconcile writes the name of the bootstrap data into Machines whose CapstanConfig has it ready.
func (r *bootstrapData) reconcile(ctx context.Context, s *scope) (result, error) {
	if r.strictContract {
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

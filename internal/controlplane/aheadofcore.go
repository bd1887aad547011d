package controlplane

import (
	"context"
	"errors"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// Cluster API's core reconciles each Machine once a second, and needs one reconcile each for its finalizer, for
// pausing, to own the objects of the Machine, and to find the bootstrap data. The functions below do the same at once.
// They only save time (ALL-15): core does all steps that are not done here, and releaseAbandoned covers versions of core without
// this finalizer. With --strict-contract, core does all steps.

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
		errs = append(errs, client.IgnoreNotFound(r.handOverObject(ctx, machine, object)))
	}
	return errors.Join(errs...)
}

// handOverObject writes the owner references of an object. Other providers write to the new object as well: after a
// conflict it reads the object again, so that no owner is lost.
func (r *machines) handOverObject(ctx context.Context, machine *clusterv1.Machine, object client.Object) error {
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		err := reconciling.Change(ctx, r.Client, object, func() {
			object.SetOwnerReferences(ownedByMachine(object.GetOwnerReferences(), machine))
		})
		if !apierrors.IsConflict(err) {
			return err
		}
		object.SetOwnerReferences(nil)
		if getErr := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(object), object); getErr != nil {
			return getErr
		}
		return err
	})
}

// ownedByMachine returns owner references with the Machine in the place of its control plane.
func ownedByMachine(refs []metav1.OwnerReference, machine *clusterv1.Machine) []metav1.OwnerReference {
	others := slices.DeleteFunc(slices.Clone(refs), func(ref metav1.OwnerReference) bool {
		return schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind).GroupKind() == controlplanev1.ControlPlaneGroupKind
	})
	return util.EnsureOwnerRef(others, *metav1.NewControllerRef(machine, clusterv1.GroupVersion.WithKind("Machine")))
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

func hasData(config *bootstrapv1.CapstanConfig) bool {
	return ptr.Deref(config.Status.Initialization.DataSecretCreated, false) && config.Status.DataSecretName != ""
}

// hasControlPlaneData is hasData for the CapstanConfigs of control plane machines: the bootstrap provider makes their data only with a role.
func hasControlPlaneData(config *bootstrapv1.CapstanConfig) bool {
	return config.Spec.Role.IsControlPlane() && hasData(config)
}

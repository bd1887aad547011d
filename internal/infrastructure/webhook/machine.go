package webhook

import (
	"context"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/reconciling"
)

// +kubebuilder:webhook:verbs=update,path=/validate-infrastructure-capstan-dev-v1beta2-capstanmachine,mutating=false,failurePolicy=fail,matchPolicy=Equivalent,groups=infrastructure.capstan.dev,resources=capstanmachines,versions=v1beta2,name=validation.capstanmachine.infrastructure.capstan.dev,sideEffects=None,admissionReviewVersions=v1

// Machine limits the changes of CapstanMachines whose machine exists: only an update in place changes its limits, and only
// within the decisions of package inplace. CEL protects the identity of the machine.
type Machine struct{}

var _ admission.Validator[*infrav1.CapstanMachine] = Machine{}

// limits are the fields of a machine that an update in place can change.
var limits = []string{"cpus", "memory", "pidsLimit", "disk.size"}

// written are the fields that the controller writes, and those that CEL protects.
var written = []string{"id", "providerID", "hostName", "hostID", "network.addresses", "network.addressesFromPools", "volumes"}

// ValidateCreate implements admission.Validator.
func (Machine) ValidateCreate(context.Context, *infrav1.CapstanMachine) (admission.Warnings, error) {
	return nil, nil
}

// ValidateUpdate implements admission.Validator.
func (Machine) ValidateUpdate(_ context.Context, before, m *infrav1.CapstanMachine) (admission.Warnings, error) {
	if !m.DeletionTimestamp.IsZero() || before.Spec.ProviderID == "" {
		return nil, nil
	}
	_, updating := m.Annotations[clusterv1.UpdateInProgressAnnotation]
	return nil, reconciling.Invalid(infrav1.GroupVersion.WithKind(infrav1.MachineKind), m.Name, refused(inplace.Machine(before.Spec, m.Spec), updating))
}

// ValidateDelete implements admission.Validator.
func (Machine) ValidateDelete(context.Context, *infrav1.CapstanMachine) (admission.Warnings, error) {
	return nil, nil
}

// refused returns an error for each change that is not allowed. Without an update, changes of fields that only matter for
// placement stay allowed, as they have no effect.
func refused(changes []inplace.Change, updating bool) field.ErrorList {
	var out field.ErrorList
	for _, change := range changes {
		path := field.NewPath("spec", strings.Split(change.Path, ".")...)
		switch {
		case slices.Contains(written, change.Path):
		case updating && change.Verdict == inplace.Replace:
			out = append(out, field.Forbidden(path, change.String()))
		case !updating && slices.Contains(limits, change.Path):
			out = append(out, field.Forbidden(path, "the machine exists: change the template of its owner, which replaces the machine or updates it in place"))
		}
	}
	return out
}

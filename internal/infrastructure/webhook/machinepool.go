package webhook

import (
	"context"

	"k8s.io/apimachinery/pkg/util/validation/field"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// +kubebuilder:webhook:verbs=create;update,path=/validate-infrastructure-capstan-dev-v1beta2-capstanmachinepooltemplate,mutating=false,failurePolicy=fail,matchPolicy=Equivalent,groups=infrastructure.capstan.dev,resources=capstanmachinepooltemplates,versions=v1beta2,name=validation.capstanmachinepooltemplate.infrastructure.capstan.dev,sideEffects=None,admissionReviewVersions=v1

func setupMachinePools(mgr ctrl.Manager) error {
	return ctrl.NewWebhookManagedBy(mgr, &infrav1.CapstanMachinePoolTemplate{}).WithValidator(MachinePoolTemplate{}).Complete()
}

// MachinePoolTemplate keeps CapstanMachinePoolTemplates as they are (MP-10, ALL-10). What a template must not
// have is in the CRD.
type MachinePoolTemplate struct{}

var _ admission.Validator[*infrav1.CapstanMachinePoolTemplate] = MachinePoolTemplate{}

// ValidateCreate implements admission.Validator.
func (MachinePoolTemplate) ValidateCreate(_ context.Context, t *infrav1.CapstanMachinePoolTemplate) (admission.Warnings, error) {
	path := field.NewPath("spec", "template")
	errs := t.Spec.Template.ObjectMeta.Validate(path.Child("metadata"))
	errs = append(errs, t.Spec.Template.Spec.MachineTemplate.ObjectMeta.Validate(path.Child("spec", "machineTemplate", "metadata"))...)
	return nil, invalid("CapstanMachinePoolTemplate", t.Name, errs...)
}

// ValidateUpdate implements admission.Validator.
func (MachinePoolTemplate) ValidateUpdate(ctx context.Context, before, t *infrav1.CapstanMachinePoolTemplate) (admission.Warnings, error) {
	return nil, immutable(ctx, "CapstanMachinePoolTemplate", t, before.Spec, t.Spec)
}

// ValidateDelete implements admission.Validator.
func (MachinePoolTemplate) ValidateDelete(context.Context, *infrav1.CapstanMachinePoolTemplate) (admission.Warnings, error) {
	return nil, nil
}

package webhook

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/conversion"
	"capstan.dev/capstan/internal/reconciling"
)

// +kubebuilder:webhook:verbs=create;update,path=/validate-infrastructure-capstan-dev-v1beta2-capstanmachinepooltemplate,mutating=false,failurePolicy=fail,matchPolicy=Equivalent,groups=infrastructure.capstan.dev,resources=capstanmachinepooltemplates,versions=v1beta2,name=validation.capstanmachinepooltemplate.infrastructure.capstan.dev,sideEffects=None,admissionReviewVersions=v1

// +kubebuilder:webhook:verbs=create;update,path=/validate-infrastructure-capstan-dev-v1beta2-capstanmachinepool,mutating=false,failurePolicy=fail,matchPolicy=Equivalent,groups=infrastructure.capstan.dev,resources=capstanmachinepools,versions=v1beta2,name=validation.capstanmachinepool.infrastructure.capstan.dev,sideEffects=None,admissionReviewVersions=v1

func setupMachinePools(mgr ctrl.Manager) error {
	return errors.Join(
		ctrl.NewWebhookManagedBy(mgr, &infrav1.CapstanMachinePool{}).WithConverter(conversion.CapstanMachinePool).
			WithDefaulter(MachinePool{}).WithValidator(MachinePool{}).Complete(),
		ctrl.NewWebhookManagedBy(mgr, &infrav1.CapstanMachinePoolTemplate{}).WithConverter(conversion.CapstanMachinePoolTemplate).
			WithValidator(MachinePoolTemplate{}).Complete(),
	)
}

// MachinePool refuses labels and annotations that no machine of a CapstanMachinePool can have: no rule of the CRD can, as
// their number has no bound.
type MachinePool struct{}

var _ admission.Validator[*infrav1.CapstanMachinePool] = MachinePool{}

// ValidateCreate implements admission.Validator.
func (MachinePool) ValidateCreate(_ context.Context, p *infrav1.CapstanMachinePool) (admission.Warnings, error) {
	return nil, reconciling.Invalid(infrav1.GroupVersion.WithKind(infrav1.MachinePoolKind), p.Name, validMetadata(p))
}

// ValidateUpdate implements admission.Validator. It accepts deleted objects and unchanged metadata.
func (MachinePool) ValidateUpdate(_ context.Context, before, p *infrav1.CapstanMachinePool) (admission.Warnings, error) {
	if !p.DeletionTimestamp.IsZero() || equality.Semantic.DeepEqual(before.Spec.MachineTemplate.ObjectMeta, p.Spec.MachineTemplate.ObjectMeta) {
		return nil, nil
	}
	return nil, reconciling.Invalid(infrav1.GroupVersion.WithKind(infrav1.MachinePoolKind), p.Name, validMetadata(p))
}

// ValidateDelete implements admission.Validator.
func (MachinePool) ValidateDelete(context.Context, *infrav1.CapstanMachinePool) (admission.Warnings, error) {
	return nil, nil
}

func validMetadata(p *infrav1.CapstanMachinePool) field.ErrorList {
	return p.Spec.MachineTemplate.ObjectMeta.Validate(field.NewPath("spec", "machineTemplate", "metadata"))
}

// MachinePoolTemplate refuses changes of CapstanMachinePoolTemplates (MP-10, ALL-10). The CRD has the rules for their fields.
type MachinePoolTemplate struct{}

var _ admission.Validator[*infrav1.CapstanMachinePoolTemplate] = MachinePoolTemplate{}

// ValidateCreate implements admission.Validator.
func (MachinePoolTemplate) ValidateCreate(_ context.Context, t *infrav1.CapstanMachinePoolTemplate) (admission.Warnings, error) {
	path := field.NewPath("spec", "template")
	errs := t.Spec.Template.ObjectMeta.Validate(path.Child("metadata"))
	errs = append(errs, t.Spec.Template.Spec.MachineTemplate.ObjectMeta.Validate(path.Child("spec", "machineTemplate", "metadata"))...)
	return nil, reconciling.Invalid(infrav1.GroupVersion.WithKind(infrav1.MachinePoolTemplateKind), t.Name, errs)
}

// ValidateUpdate implements admission.Validator.
func (MachinePoolTemplate) ValidateUpdate(ctx context.Context, before, t *infrav1.CapstanMachinePoolTemplate) (admission.Warnings, error) {
	return nil, reconciling.UnchangedTemplate(ctx, infrav1.GroupVersion.WithKind(infrav1.MachinePoolTemplateKind), t, field.NewPath("spec"), equality.Semantic.DeepEqual(before.Spec, t.Spec))
}

// ValidateDelete implements admission.Validator.
func (MachinePoolTemplate) ValidateDelete(context.Context, *infrav1.CapstanMachinePoolTemplate) (admission.Warnings, error) {
	return nil, nil
}

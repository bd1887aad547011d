package conversion

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/webhook/conversion"

	bootstrapv1beta1 "capstan.dev/capstan/api/bootstrap/v1beta1"
	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// Converters of the bootstrap provider's kinds.
var (
	CapstanConfig = conversion.NewHubSpokeConverter(&bootstrapv1.CapstanConfig{},
		conversion.NewSpokeConverter(&bootstrapv1beta1.CapstanConfig{}, configFromHub, configToHub))
	CapstanConfigTemplate = conversion.NewHubSpokeConverter(&bootstrapv1.CapstanConfigTemplate{},
		conversion.NewSpokeConverter(&bootstrapv1beta1.CapstanConfigTemplate{}, configTemplateFromHub, configTemplateToHub))
)

func configFromHub(_ context.Context, src *bootstrapv1.CapstanConfig, dst *bootstrapv1beta1.CapstanConfig) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	dst.Status = bootstrapv1beta1.CapstanConfigStatus{
		Ready:              src.Status.Initialization.DataSecretCreated,
		DataSecretName:     src.Status.DataSecretName,
		Update:             src.Status.Update,
		Conditions:         legacy(src.Status.Conditions),
		ObservedGeneration: src.Status.ObservedGeneration,
		V1Beta2:            bootstrapv1beta1.V1Beta2Status{Conditions: src.Status.Conditions},
	}
	return nil
}

func configToHub(_ context.Context, src *bootstrapv1beta1.CapstanConfig, dst *bootstrapv1.CapstanConfig) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	dst.Status = bootstrapv1.CapstanConfigStatus{
		Conditions:         src.Status.V1Beta2.Conditions,
		Initialization:     bootstrapv1.CapstanConfigInitializationStatus{DataSecretCreated: src.Status.Ready},
		DataSecretName:     src.Status.DataSecretName,
		Update:             src.Status.Update,
		ObservedGeneration: src.Status.ObservedGeneration,
	}
	return nil
}

func configTemplateFromHub(_ context.Context, src *bootstrapv1.CapstanConfigTemplate, dst *bootstrapv1beta1.CapstanConfigTemplate) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	return nil
}

func configTemplateToHub(_ context.Context, src *bootstrapv1beta1.CapstanConfigTemplate, dst *bootstrapv1.CapstanConfigTemplate) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	return nil
}

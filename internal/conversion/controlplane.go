package conversion

import (
	"context"
	"fmt"
	"math"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/webhook/conversion"

	controlplanev1beta1 "capstan.dev/capstan/api/controlplane/v1beta1"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// VersionOf returns the version of a kind for references in v1beta1. References in v1beta2 have no version.
type VersionOf func(ctx context.Context, kind schema.GroupKind) string

// CapstanControlPlane returns the converter of CapstanControlPlanes.
func CapstanControlPlane(versionOf VersionOf) func(*runtime.Scheme) (conversion.Converter, error) {
	fromHub := func(ctx context.Context, src *controlplanev1.CapstanControlPlane, dst *controlplanev1beta1.CapstanControlPlane) error {
		ref := src.Spec.MachineTemplate.Spec.InfrastructureRef
		controlPlaneFromHub(src, dst)
		if ref.IsDefined() {
			group := schema.GroupKind{Group: ref.APIGroup, Kind: ref.Kind}
			dst.Spec.MachineTemplate.InfrastructureRef = corev1.ObjectReference{
				APIVersion: group.WithVersion(versionOf(ctx, group)).GroupVersion().String(),
				Kind:       ref.Kind, Namespace: src.Namespace, Name: ref.Name,
			}
		}
		return nil
	}
	return conversion.NewHubSpokeConverter(&controlplanev1.CapstanControlPlane{},
		conversion.NewSpokeConverter(&controlplanev1beta1.CapstanControlPlane{}, fromHub, controlPlaneToHub))
}

// CapstanControlPlaneTemplate is the converter of CapstanControlPlaneTemplates.
var CapstanControlPlaneTemplate = conversion.NewHubSpokeConverter(&controlplanev1.CapstanControlPlaneTemplate{},
	conversion.NewSpokeConverter(&controlplanev1beta1.CapstanControlPlaneTemplate{}, controlPlaneTemplateFromHub, controlPlaneTemplateToHub))

// controlPlaneFromHub converts all fields except the reference to the template of the infrastructure machines.
func controlPlaneFromHub(src *controlplanev1.CapstanControlPlane, dst *controlplanev1beta1.CapstanControlPlane) {
	dst.ObjectMeta = src.ObjectMeta
	machine := src.Spec.MachineTemplate.Spec
	dst.Spec = controlplanev1beta1.CapstanControlPlaneSpec{
		Replicas: src.Spec.Replicas,
		Version:  src.Spec.Version,
		MachineTemplate: controlplanev1beta1.MachineTemplate{
			ObjectMeta:              src.Spec.MachineTemplate.ObjectMeta,
			NodeDrainTimeout:        duration(machine.Deletion.NodeDrainTimeoutSeconds),
			NodeVolumeDetachTimeout: duration(machine.Deletion.NodeVolumeDetachTimeoutSeconds),
			NodeDeletionTimeout:     duration(machine.Deletion.NodeDeletionTimeoutSeconds),
			ReadinessGates:          machine.ReadinessGates,
			MinReadySeconds:         machine.MinReadySeconds,
			Taints:                  machine.Taints,
		},
		Config:        src.Spec.Config,
		Rollout:       src.Spec.Rollout,
		Remediation:   src.Spec.Remediation,
		MachineNaming: src.Spec.MachineNaming,
		Kubeconfig:    src.Spec.Kubeconfig,
		Certificates:  src.Spec.Certificates,
		Backup:        src.Spec.Backup,
		Restore:       src.Spec.Restore,
		Manifests:     src.Spec.Manifests,
	}
	dst.Status = controlplanev1beta1.CapstanControlPlaneStatus{
		Initialized:         src.Status.Initialization.ControlPlaneInitialized,
		Ready:               src.Status.Initialization.ControlPlaneInitialized,
		Selector:            src.Status.Selector,
		Replicas:            src.Status.Replicas,
		ReadyReplicas:       src.Status.ReadyReplicas,
		UpdatedReplicas:     src.Status.UpToDateReplicas,
		UnavailableReplicas: unavailable(src.Spec.Replicas, src.Status.Replicas, src.Status.AvailableReplicas),
		Versions:            src.Status.Versions,
		LastRemediation:     src.Status.LastRemediation,
		Backups:             src.Status.Backups,
		Conditions:          legacy(src.Status.Conditions),
		ObservedGeneration:  src.Status.ObservedGeneration,
		V1Beta2: controlplanev1beta1.V1Beta2Status{
			Conditions: src.Status.Conditions, AvailableReplicas: src.Status.AvailableReplicas,
		},
	}
	if src.Status.Version != "" {
		dst.Status.Version = ptr.To(src.Status.Version)
	}
}

// controlPlaneToHub refuses a template in another namespace (CP-06), which v1beta2 cannot express. A rule of the CRD cannot compare with the
// namespace of the object.
func controlPlaneToHub(_ context.Context, src *controlplanev1beta1.CapstanControlPlane, dst *controlplanev1.CapstanControlPlane) error {
	dst.ObjectMeta = src.ObjectMeta
	machine := src.Spec.MachineTemplate
	if elsewhere := machine.InfrastructureRef.Namespace; elsewhere != "" && src.Namespace != "" && elsewhere != src.Namespace {
		return fmt.Errorf("spec.machineTemplate.infrastructureRef.namespace: expected the namespace of the control plane, %s, found %s: remove the field, or create the template in %s", src.Namespace, elsewhere, src.Namespace)
	}
	dst.Spec = controlplanev1.CapstanControlPlaneSpec{
		Replicas: src.Spec.Replicas,
		Version:  src.Spec.Version,
		MachineTemplate: controlplanev1.MachineTemplate{
			ObjectMeta: machine.ObjectMeta,
			Spec: controlplanev1.MachineTemplateSpec{
				InfrastructureRef: clusterv1.ContractVersionedObjectReference{
					APIGroup: machine.InfrastructureRef.GroupVersionKind().Group,
					Kind:     machine.InfrastructureRef.Kind,
					Name:     machine.InfrastructureRef.Name,
				},
				ReadinessGates:  machine.ReadinessGates,
				MinReadySeconds: machine.MinReadySeconds,
				Deletion: controlplanev1.MachineDeletionSpec{
					NodeDrainTimeoutSeconds:        seconds(machine.NodeDrainTimeout),
					NodeVolumeDetachTimeoutSeconds: seconds(machine.NodeVolumeDetachTimeout),
					NodeDeletionTimeoutSeconds:     seconds(machine.NodeDeletionTimeout),
				},
				Taints: machine.Taints,
			},
		},
		Config:        src.Spec.Config,
		Rollout:       src.Spec.Rollout,
		Remediation:   src.Spec.Remediation,
		MachineNaming: src.Spec.MachineNaming,
		Kubeconfig:    src.Spec.Kubeconfig,
		Certificates:  src.Spec.Certificates,
		Backup:        src.Spec.Backup,
		Restore:       src.Spec.Restore,
		Manifests:     src.Spec.Manifests,
	}
	dst.Status = controlplanev1.CapstanControlPlaneStatus{
		Conditions:         src.Status.V1Beta2.Conditions,
		Initialization:     controlplanev1.CapstanControlPlaneInitializationStatus{ControlPlaneInitialized: src.Status.Initialized},
		Selector:           src.Status.Selector,
		Replicas:           src.Status.Replicas,
		ReadyReplicas:      src.Status.ReadyReplicas,
		AvailableReplicas:  src.Status.V1Beta2.AvailableReplicas,
		UpToDateReplicas:   src.Status.UpdatedReplicas,
		Versions:           src.Status.Versions,
		Version:            ptr.Deref(src.Status.Version, ""),
		ObservedGeneration: src.Status.ObservedGeneration,
		LastRemediation:    src.Status.LastRemediation,
		Backups:            src.Status.Backups,
	}
	return nil
}

func controlPlaneTemplateFromHub(_ context.Context, src *controlplanev1.CapstanControlPlaneTemplate, dst *controlplanev1beta1.CapstanControlPlaneTemplate) error {
	dst.ObjectMeta = src.ObjectMeta
	dst.Spec.Template.ObjectMeta = src.Spec.Template.ObjectMeta
	spec := src.Spec.Template.Spec
	machine := spec.MachineTemplate.Spec
	dst.Spec.Template.Spec = controlplanev1beta1.CapstanControlPlaneTemplateResourceSpec{
		MachineTemplate: controlplanev1beta1.TemplateMachineTemplate{
			ObjectMeta:              spec.MachineTemplate.ObjectMeta,
			NodeDrainTimeout:        duration(machine.Deletion.NodeDrainTimeoutSeconds),
			NodeVolumeDetachTimeout: duration(machine.Deletion.NodeVolumeDetachTimeoutSeconds),
			NodeDeletionTimeout:     duration(machine.Deletion.NodeDeletionTimeoutSeconds),
			ReadinessGates:          machine.ReadinessGates,
			MinReadySeconds:         machine.MinReadySeconds,
			Taints:                  machine.Taints,
		},
		Config:        spec.Config,
		Rollout:       spec.Rollout,
		Remediation:   spec.Remediation,
		MachineNaming: spec.MachineNaming,
		Kubeconfig:    spec.Kubeconfig,
		Backup:        spec.Backup,
		Manifests:     spec.Manifests,
	}
	return nil
}

func controlPlaneTemplateToHub(_ context.Context, src *controlplanev1beta1.CapstanControlPlaneTemplate, dst *controlplanev1.CapstanControlPlaneTemplate) error {
	dst.ObjectMeta = src.ObjectMeta
	dst.Spec.Template.ObjectMeta = src.Spec.Template.ObjectMeta
	spec := src.Spec.Template.Spec
	machine := spec.MachineTemplate
	dst.Spec.Template.Spec = controlplanev1.CapstanControlPlaneTemplateResourceSpec{
		MachineTemplate: controlplanev1.TemplateMachineTemplate{
			ObjectMeta: machine.ObjectMeta,
			Spec: controlplanev1.TemplateMachineTemplateSpec{
				ReadinessGates:  machine.ReadinessGates,
				MinReadySeconds: machine.MinReadySeconds,
				Deletion: controlplanev1.MachineDeletionSpec{
					NodeDrainTimeoutSeconds:        seconds(machine.NodeDrainTimeout),
					NodeVolumeDetachTimeoutSeconds: seconds(machine.NodeVolumeDetachTimeout),
					NodeDeletionTimeoutSeconds:     seconds(machine.NodeDeletionTimeout),
				},
				Taints: machine.Taints,
			},
		},
		Config:        spec.Config,
		Rollout:       spec.Rollout,
		Remediation:   spec.Remediation,
		MachineNaming: spec.MachineNaming,
		Kubeconfig:    spec.Kubeconfig,
		Backup:        spec.Backup,
		Manifests:     spec.Manifests,
	}
	return nil
}

// unavailable returns the number of Machines that are missing or not available (CP-03); nil before the first reconciliation.
func unavailable(wanted, replicas, available *int32) *int32 {
	if replicas == nil {
		return nil
	}
	return ptr.To(max(max(ptr.Deref(wanted, 1), *replicas)-ptr.Deref(available, 0), 0))
}

func duration(seconds *int32) *metav1.Duration {
	if seconds == nil {
		return nil
	}
	return &metav1.Duration{Duration: time.Duration(*seconds) * time.Second}
}

// seconds rounds away from 0, which means no limit. A negative value stays negative, so that the CRD refuses it: the
// defaulting webhook converts an object before the CRD's rules are checked.
func seconds(d *metav1.Duration) *int32 {
	if d == nil {
		return nil
	}
	whole := math.Ceil(math.Abs(d.Seconds()))
	return ptr.To(int32(math.Copysign(min(whole, math.MaxInt32), d.Seconds())))
}

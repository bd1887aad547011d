package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// CapstanControlPlaneTemplateSpec is the desired state of a CapstanControlPlaneTemplate.
type CapstanControlPlaneTemplateSpec struct {
	// template describes the CapstanControlPlanes that are created from it.
	// +required
	Template CapstanControlPlaneTemplateResource `json:"template,omitempty,omitzero"`
}

// CapstanControlPlaneTemplateResource describes the CapstanControlPlanes that are created from a template.
// +kubebuilder:validation:MinProperties=1
type CapstanControlPlaneTemplateResource struct {
	// metadata contains the labels and annotations of the CapstanControlPlanes.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the CapstanControlPlanes.
	// +optional
	Spec CapstanControlPlaneTemplateResourceSpec `json:"spec,omitempty,omitzero"`
}

// CapstanControlPlaneTemplateResourceSpec is the spec of a CapstanControlPlane without the fields that a Cluster's
// topology sets: replicas, version and infrastructureRef.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.role)",message="config.role is set by the control plane provider for each machine"
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.node) || !has(self.config.node.name)",message="config.node.name cannot be set: each machine needs its own name"
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.restore)",message="config.restore is set by the control plane provider"
// +kubebuilder:validation:XValidation:rule="!has(self.backup) || !(has(self.config) && has(self.config.cluster) && has(self.config.cluster.etcd) && has(self.config.cluster.etcd.external))",message="backup is not possible with an external etcd: use the backup of that etcd"
// +kubebuilder:validation:XValidation:rule="!has(self.rollout) || !has(self.rollout.before) || !has(self.rollout.before.certificatesExpiryDays) || self.rollout.before.certificatesExpiryDays < (has(self.config) && has(self.config.cluster) && has(self.config.cluster.certificateValidityDays) ? self.config.cluster.certificateValidityDays : 365)",message="rollout.before.certificatesExpiryDays must be less than config.cluster.certificateValidityDays (default 365): otherwise a new machine would be replaced at once"
type CapstanControlPlaneTemplateResourceSpec struct {
	// machineTemplate describes the Machines.
	// +optional
	MachineTemplate TemplateMachineTemplate `json:"machineTemplate,omitempty,omitzero"`

	// config contains the bootstrap configuration of the machines and the settings of the cluster.
	// +optional
	Config bootstrapv1.CapstanConfigSpec `json:"config,omitempty,omitzero"`

	// rollout configures when and how machines are replaced.
	// +optional
	Rollout controlplanev1.RolloutSpec `json:"rollout,omitempty,omitzero"`

	// remediation configures the replacement of unhealthy machines.
	// +optional
	Remediation controlplanev1.RemediationSpec `json:"remediation,omitempty,omitzero"`

	// machineNaming configures the names of Machines.
	// +optional
	MachineNaming controlplanev1.MachineNamingSpec `json:"machineNaming,omitempty,omitzero"`

	// kubeconfig configures the client certificate of the kubeconfig Secret.
	// +optional
	Kubeconfig controlplanev1.KubeconfigSpec `json:"kubeconfig,omitempty,omitzero"`

	// backup configures backups of etcd and their store. Each cluster has its own folder in the store.
	// +optional
	Backup controlplanev1.BackupSpec `json:"backup,omitempty,omitzero"`

	// manifests are objects that are applied to the cluster once, in their order, as soon as its API server answers. A failed
	// manifest is tried again, and the condition ManifestsApplied names the reason. Later changes of an applied manifest have no
	// effect.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=20
	Manifests []controlplanev1.Manifest `json:"manifests,omitempty"`
}

// TemplateMachineTemplate describes the Machines of a control plane that is created from a template.
// +kubebuilder:validation:MinProperties=1
type TemplateMachineTemplate struct {
	// metadata contains the labels and annotations of the Machines and, by the rules of Cluster API, of their
	// Nodes. A change is applied in place.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// nodeDrainTimeout is the maximum time for draining a Node. Fractions of seconds are rounded up.
	// 0 means no limit. A change is applied in place.
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s') && duration(self) <= duration('2147483647s')",message="must be from 0s to 2147483647s, for example 10m"
	NodeDrainTimeout *metav1.Duration `json:"nodeDrainTimeout,omitempty"`

	// nodeVolumeDetachTimeout is the maximum time for detaching volumes. Fractions of seconds are rounded up. 0 means no limit.
	// A change is applied in place.
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s') && duration(self) <= duration('2147483647s')",message="must be from 0s to 2147483647s, for example 10m"
	NodeVolumeDetachTimeout *metav1.Duration `json:"nodeVolumeDetachTimeout,omitempty"`

	// nodeDeletionTimeout is the maximum time for deleting the Node. Fractions of seconds are rounded
	// up. 0 means no limit. Default: the default of Machines, 10 seconds. A change is applied in place.
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s') && duration(self) <= duration('2147483647s')",message="must be from 0s to 2147483647s, for example 10m"
	NodeDeletionTimeout *metav1.Duration `json:"nodeDeletionTimeout,omitempty"`

	// readinessGates are additional conditions that a Machine needs to be Ready. A change is applied in place.
	// +optional
	// +listType=map
	// +listMapKey=conditionType
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	ReadinessGates []clusterv1.MachineReadinessGate `json:"readinessGates,omitempty"`

	// minReadySeconds is the time in seconds that a Machine must be Ready before it is Available. Default: 0.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinReadySeconds *int32 `json:"minReadySeconds,omitempty"`

	// taints are Node taints that Cluster API manages. They require its feature gate MachineTaintPropagation.
	// +optional
	// +listType=map
	// +listMapKey=key
	// +listMapKey=effect
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Taints []clusterv1.MachineTaint `json:"taints,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstancontrolplanetemplates,shortName=capcpt,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:deprecatedversion:warning="controlplane.capstan.dev/v1beta1 CapstanControlPlaneTemplate is deprecated: use v1beta2. Cluster API v1.16 (April 2027) no longer reads the v1beta1 contract"
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanControlPlaneTemplate is a template of CapstanControlPlanes for ClusterClasses.
//
// The version is deprecated: use v1beta2.
type CapstanControlPlaneTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It is immutable.
	// +required
	Spec CapstanControlPlaneTemplateSpec `json:"spec,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanControlPlaneTemplateList is a list of CapstanControlPlaneTemplates.
//
// The version is deprecated: use v1beta2.
type CapstanControlPlaneTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanControlPlaneTemplates.
	Items []CapstanControlPlaneTemplate `json:"items"`
}

func init() {
	objectTypes = append(objectTypes, &CapstanControlPlaneTemplate{}, &CapstanControlPlaneTemplateList{})
}

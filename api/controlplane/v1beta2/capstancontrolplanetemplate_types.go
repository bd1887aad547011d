package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// CapstanControlPlaneTemplateSpec is the desired state of a CapstanControlPlaneTemplate.
type CapstanControlPlaneTemplateSpec struct {
	// template is what CapstanControlPlanes are made from.
	// +required
	Template CapstanControlPlaneTemplateResource `json:"template,omitempty,omitzero"`
}

// CapstanControlPlaneTemplateResource is what CapstanControlPlanes are made from.
// +kubebuilder:validation:MinProperties=1
type CapstanControlPlaneTemplateResource struct {
	// metadata is the labels and annotations of the CapstanControlPlanes.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the CapstanControlPlanes.
	// +optional
	Spec CapstanControlPlaneTemplateResourceSpec `json:"spec,omitempty,omitzero"`
}

// CapstanControlPlaneTemplateResourceSpec is the spec of a CapstanControlPlane but for what a
// Cluster's topology sets itself: replicas, version and infrastructureRef.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.role)",message="config.role is set by the control plane provider for each machine"
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.node) || !has(self.config.node.name)",message="config.node.name cannot be set: machines need names of their own"
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.restore)",message="config.restore is set by the control plane provider"
// +kubebuilder:validation:XValidation:rule="!has(self.backup) || !(has(self.config) && has(self.config.cluster) && has(self.config.cluster.etcd) && has(self.config.cluster.etcd.external))",message="backup is for the etcd of the machines: an external etcd is backed up by who runs it"
// +kubebuilder:validation:XValidation:rule="!has(self.rollout) || !has(self.rollout.before) || !has(self.rollout.before.certificatesExpiryDays) || self.rollout.before.certificatesExpiryDays < (has(self.config) && has(self.config.cluster) && has(self.config.cluster.certificateValidityDays) ? self.config.cluster.certificateValidityDays : 365)",message="rollout.before.certificatesExpiryDays must be less than config.cluster.certificateValidityDays (365 when not set): a new machine would have to be replaced at once"
type CapstanControlPlaneTemplateResourceSpec struct {
	// machineTemplate is what the Machines are made from.
	// +optional
	MachineTemplate TemplateMachineTemplate `json:"machineTemplate,omitempty,omitzero"`

	// config is the bootstrap configuration of the machines, and the settings of the cluster.
	// +optional
	Config bootstrapv1.CapstanConfigSpec `json:"config,omitempty,omitzero"`

	// rollout says when and how machines are replaced.
	// +optional
	Rollout RolloutSpec `json:"rollout,omitempty,omitzero"`

	// remediation says how unhealthy machines are replaced.
	// +optional
	Remediation RemediationSpec `json:"remediation,omitempty,omitzero"`

	// machineNaming is how Machines are named.
	// +optional
	MachineNaming MachineNamingSpec `json:"machineNaming,omitempty,omitzero"`

	// kubeconfig configures the client certificate of the kubeconfig secret.
	// +optional
	Kubeconfig KubeconfigSpec `json:"kubeconfig,omitempty,omitzero"`

	// backup says when etcd is backed up, and where the backups go. Each cluster has a folder of its own in the store.
	// +optional
	Backup BackupSpec `json:"backup,omitempty,omitzero"`
}

// TemplateMachineTemplate is what the Machines of a control plane made from a template are made from.
// +kubebuilder:validation:MinProperties=1
type TemplateMachineTemplate struct {
	// metadata is the labels and annotations of the Machines.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the Machines.
	// +optional
	Spec TemplateMachineTemplateSpec `json:"spec,omitempty,omitzero"`
}

// TemplateMachineTemplateSpec is the spec of the Machines but for the infrastructureRef.
// +kubebuilder:validation:MinProperties=1
type TemplateMachineTemplateSpec struct {
	// readinessGates are conditions that a Machine must have to be Ready.
	// +optional
	// +listType=map
	// +listMapKey=conditionType
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	ReadinessGates []clusterv1.MachineReadinessGate `json:"readinessGates,omitempty"`

	// minReadySeconds is how long a Machine must be Ready to be Available. 0 when not set: at once.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinReadySeconds *int32 `json:"minReadySeconds,omitempty"`

	// deletion says how Machines are deleted.
	// +optional
	Deletion MachineDeletionSpec `json:"deletion,omitempty,omitzero"`

	// taints are node taints that Cluster API manages, with its feature gate MachineTaintPropagation.
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
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta2"
// +kubebuilder:storageversion
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanControlPlaneTemplate is a template of CapstanControlPlanes, for ClusterClasses (CP-12).
type CapstanControlPlaneTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It cannot be changed.
	// +required
	Spec CapstanControlPlaneTemplateSpec `json:"spec,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanControlPlaneTemplateList is a list of CapstanControlPlaneTemplates.
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

package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
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
	Rollout RolloutSpec `json:"rollout,omitempty,omitzero"`

	// remediation configures the replacement of unhealthy machines.
	// +optional
	Remediation RemediationSpec `json:"remediation,omitempty,omitzero"`

	// machineNaming configures the names of Machines.
	// +optional
	MachineNaming MachineNamingSpec `json:"machineNaming,omitempty,omitzero"`

	// kubeconfig configures the client certificate of the kubeconfig Secret.
	// +optional
	Kubeconfig KubeconfigSpec `json:"kubeconfig,omitempty,omitzero"`

	// backup configures backups of etcd and their store. Each cluster has its own folder in the store.
	// +optional
	Backup BackupSpec `json:"backup,omitempty,omitzero"`

	// manifests are objects that are applied to the cluster once, in their order, as soon as its API server answers. A failed
	// manifest is tried again, and the condition ManifestsApplied names the reason. Later changes of an applied manifest have no
	// effect.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=20
	Manifests []Manifest `json:"manifests,omitempty"`
}

// TemplateMachineTemplate describes the Machines of a control plane that is created from a template.
// +kubebuilder:validation:MinProperties=1
type TemplateMachineTemplate struct {
	// metadata contains the labels and annotations of the Machines.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the Machines.
	// +optional
	Spec TemplateMachineTemplateSpec `json:"spec,omitempty,omitzero"`
}

// TemplateMachineTemplateSpec is the spec of the Machines without the infrastructureRef.
// +kubebuilder:validation:MinProperties=1
type TemplateMachineTemplateSpec struct {
	// readinessGates are additional conditions that a Machine needs to be Ready.
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

	// deletion configures timeouts for the deletion of Machines.
	// +optional
	Deletion MachineDeletionSpec `json:"deletion,omitempty,omitzero"`

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
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta1=v1beta1","cluster.x-k8s.io/v1beta2=v1beta2"}
// +kubebuilder:storageversion
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanControlPlaneTemplate is a template of CapstanControlPlanes for ClusterClasses.
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

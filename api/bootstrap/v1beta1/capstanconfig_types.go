package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// CapstanConfigStatus is the observed state of a CapstanConfig. It can be rebuilt from the spec, the Machine and the
// Secret.
// +kubebuilder:validation:MinProperties=1
type CapstanConfigStatus struct {
	// ready is true once the Secret with the bootstrap data exists. Cluster API reads it.
	// +optional
	Ready *bool `json:"ready,omitempty"`

	// dataSecretName is the name of the Secret with the bootstrap data. For a Machine it equals the name of the
	// CapstanConfig. For a MachinePool it has a suffix that changes with the spec and the version.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	DataSecretName string `json:"dataSecretName,omitempty"`

	// update is the data of the last update in place.
	// +optional
	Update bootstrapv1.ConfigUpdateStatus `json:"update,omitempty,omitzero"`

	// failureReason and failureMessage describe a failure that only deletion ends. Capstan never sets them for
	// this kind: an invalid spec can be changed, and the controller tries again. See the conditions.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	FailureReason *string `json:"failureReason,omitempty"`

	// failureMessage is the message for failureReason.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=10240
	FailureMessage *string `json:"failureMessage,omitempty"`

	// conditions are Cluster API's v1beta1 conditions with a severity, derived from v1beta2.conditions.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=33
	Conditions clusterv1beta1.Conditions `json:"conditions,omitempty"`

	// observedGeneration is the latest generation of this object that the controller processed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// v1beta2 contains the parts of the v1beta2 status that the v1beta1 contract does not have.
	// +optional
	V1Beta2 V1Beta2Status `json:"v1beta2,omitempty,omitzero"`
}

// V1Beta2Status contains the parts of the v1beta2 status of a CapstanConfig that the v1beta1
// contract does not have.
// +kubebuilder:validation:MinProperties=1
type V1Beta2Status struct {
	// conditions are the conditions of v1beta2.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanconfigs,shortName=capc,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:deprecatedversion:warning="bootstrap.capstan.dev/v1beta1 CapstanConfig is deprecated: use v1beta2. Cluster API v1.16 (April 2027) no longer reads the v1beta1 contract"
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Role",type="string",JSONPath=".spec.role",description="Role of the machine",priority=10
// +kubebuilder:printcolumn:name="Data secret",type="string",JSONPath=".status.dataSecretName",description="Secret with the bootstrap data"
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The bootstrap data exists"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Reason"
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanConfig is the bootstrap configuration of a machine or a machine pool.
//
// The version is deprecated: use v1beta2.
type CapstanConfig struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the bootstrap configuration.
	// +optional
	Spec bootstrapv1.CapstanConfigSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the bootstrap configuration.
	// +optional
	Status CapstanConfigStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanConfigList is a list of CapstanConfigs.
//
// The version is deprecated: use v1beta2.
type CapstanConfigList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanConfigs.
	Items []CapstanConfig `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanConfig{}, &CapstanConfigList{}) }

package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanmachinetemplates,shortName=capmt,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:deprecatedversion:warning="infrastructure.capstan.dev/v1beta1 CapstanMachineTemplate is deprecated: use v1beta2. Cluster API v1.16 (April 2027) no longer reads the v1beta1 contract"
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="CPU",type="string",JSONPath=".status.capacity.cpu",description="Processors of a machine"
// +kubebuilder:printcolumn:name="Memory",type="string",JSONPath=".status.capacity.memory",description="Memory of a machine"
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanMachineTemplate is a template of CapstanMachines.
//
// The version is deprecated: use v1beta2.
type CapstanMachineTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It is immutable.
	// +required
	Spec infrav1.CapstanMachineTemplateSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the template.
	// +optional
	Status infrav1.CapstanMachineTemplateStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanMachineTemplateList is a list of CapstanMachineTemplates.
//
// The version is deprecated: use v1beta2.
type CapstanMachineTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanMachineTemplates.
	Items []CapstanMachineTemplate `json:"items"`
}

func init() {
	objectTypes = append(objectTypes, &CapstanMachineTemplate{}, &CapstanMachineTemplateList{})
}

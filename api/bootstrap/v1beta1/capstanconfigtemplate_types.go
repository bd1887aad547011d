package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanconfigtemplates,shortName=capct,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:deprecatedversion:warning="bootstrap.capstan.dev/v1beta1 CapstanConfigTemplate is deprecated: use v1beta2. Cluster API v1.16 (April 2027) no longer reads the v1beta1 contract"
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanConfigTemplate is a template of CapstanConfigs for MachineDeployments and ClusterClasses.
//
// The version is deprecated: use v1beta2.
type CapstanConfigTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It is immutable.
	// +required
	Spec bootstrapv1.CapstanConfigTemplateSpec `json:"spec,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanConfigTemplateList is a list of CapstanConfigTemplates.
//
// The version is deprecated: use v1beta2.
type CapstanConfigTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanConfigTemplates.
	Items []CapstanConfigTemplate `json:"items"`
}

func init() {
	objectTypes = append(objectTypes, &CapstanConfigTemplate{}, &CapstanConfigTemplateList{})
}

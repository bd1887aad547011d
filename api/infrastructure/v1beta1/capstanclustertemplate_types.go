package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanclustertemplates,shortName=capclt,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:deprecatedversion:warning="infrastructure.capstan.dev/v1beta1 CapstanClusterTemplate is deprecated: use v1beta2. Cluster API v1.16 (April 2027) no longer reads the v1beta1 contract"
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanClusterTemplate is a template of CapstanClusters for ClusterClasses.
//
// The version is deprecated: use v1beta2.
type CapstanClusterTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It is immutable.
	// +required
	Spec infrav1.CapstanClusterTemplateSpec `json:"spec,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanClusterTemplateList is a list of CapstanClusterTemplates.
//
// The version is deprecated: use v1beta2.
type CapstanClusterTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanClusterTemplates.
	Items []CapstanClusterTemplate `json:"items"`
}

func init() {
	objectTypes = append(objectTypes, &CapstanClusterTemplate{}, &CapstanClusterTemplateList{})
}

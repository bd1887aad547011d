package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// CapstanClusterTemplateSpec is the desired state of a CapstanClusterTemplate.
type CapstanClusterTemplateSpec struct {
	// template describes the CapstanClusters that are created from it.
	// +required
	Template CapstanClusterTemplateResource `json:"template,omitempty,omitzero"`
}

// CapstanClusterTemplateResource describes the CapstanClusters that are created from a template.
type CapstanClusterTemplateResource struct {
	// metadata contains the labels and annotations of the CapstanClusters.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the CapstanClusters.
	// +optional
	Spec CapstanClusterSpec `json:"spec,omitempty,omitzero"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanclustertemplates,shortName=capclt,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta1=v1beta1","cluster.x-k8s.io/v1beta2=v1beta2"}
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanClusterTemplate is a template of CapstanClusters for ClusterClasses.
type CapstanClusterTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It is immutable.
	// +required
	Spec CapstanClusterTemplateSpec `json:"spec,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanClusterTemplateList is a list of CapstanClusterTemplates.
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

package v1beta2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// CapstanMachineTemplateSpec is the desired state of a CapstanMachineTemplate.
type CapstanMachineTemplateSpec struct {
	// template is what CapstanMachines are made from.
	// +required
	Template CapstanMachineTemplateResource `json:"template,omitempty,omitzero"`
}

// CapstanMachineTemplateResource is what CapstanMachines are made from.
type CapstanMachineTemplateResource struct {
	// metadata is the labels and annotations of the CapstanMachines.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the CapstanMachines.
	// +optional
	Spec CapstanMachineSpec `json:"spec,omitempty,omitzero"`
}

// CapstanMachineTemplateStatus is what a machine made from the template will have, for autoscalers
// that scale from zero (IM-07).
// +kubebuilder:validation:MinProperties=1
type CapstanMachineTemplateStatus struct {
	// capacity is the resources of a machine made from the template.
	// +optional
	Capacity corev1.ResourceList `json:"capacity,omitempty"`

	// nodeInfo is the architecture and operating system of a machine made from the template.
	// +optional
	NodeInfo NodeInfo `json:"nodeInfo,omitempty,omitzero"`
}

// NodeInfo is the architecture and operating system of machines.
// +kubebuilder:validation:MinProperties=1
type NodeInfo struct {
	// architecture of the machines' processors, as Go names it: amd64, arm64.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Architecture string `json:"architecture,omitempty"`

	// operatingSystem of the machines: linux.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	OperatingSystem string `json:"operatingSystem,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanmachinetemplates,shortName=capmt,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta2"
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="CPU",type="string",JSONPath=".status.capacity.cpu",description="Processors of a machine"
// +kubebuilder:printcolumn:name="Memory",type="string",JSONPath=".status.capacity.memory",description="Memory of a machine"
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanMachineTemplate is a template of CapstanMachines (IM-07).
type CapstanMachineTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It cannot be changed.
	// +required
	Spec CapstanMachineTemplateSpec `json:"spec,omitempty,omitzero"`
	// status is what a machine made from the template will have.
	// +optional
	Status CapstanMachineTemplateStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanMachineTemplateList is a list of CapstanMachineTemplates.
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

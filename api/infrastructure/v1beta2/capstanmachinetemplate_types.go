package v1beta2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// CapstanMachineTemplateSpec is the desired state of a CapstanMachineTemplate.
type CapstanMachineTemplateSpec struct {
	// template describes the CapstanMachines that are created from it.
	// +required
	Template CapstanMachineTemplateResource `json:"template,omitempty,omitzero"`
}

// CapstanMachineTemplateResource describes the CapstanMachines that are created from a template.
type CapstanMachineTemplateResource struct {
	// metadata contains the labels and annotations of the CapstanMachines.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the CapstanMachines.
	// +optional
	Spec CapstanMachineSpec `json:"spec,omitempty,omitzero"`
}

// CapstanMachineTemplateStatus describes a machine that is created from the template, for autoscalers that scale
// from zero.
// +kubebuilder:validation:MinProperties=1
type CapstanMachineTemplateStatus struct {
	// capacity contains the resources of a machine: cpu, memory, ephemeral-storage, and its CDI devices by kind.
	// +optional
	Capacity corev1.ResourceList `json:"capacity,omitempty"`

	// nodeInfo contains the architecture and operating system of a machine.
	// +optional
	NodeInfo NodeInfo `json:"nodeInfo,omitempty,omitzero"`
}

// NodeInfo contains the architecture and operating system of machines.
// +kubebuilder:validation:MinProperties=1
type NodeInfo struct {
	// architecture is the processor architecture, for example amd64 or arm64.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Architecture string `json:"architecture,omitempty"`

	// operatingSystem is the operating system: linux.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	OperatingSystem string `json:"operatingSystem,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanmachinetemplates,shortName=capmt,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta1=v1beta1","cluster.x-k8s.io/v1beta2=v1beta2"}
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="CPU",type="string",JSONPath=".status.capacity.cpu",description="Processors of a machine"
// +kubebuilder:printcolumn:name="Memory",type="string",JSONPath=".status.capacity.memory",description="Memory of a machine"
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanMachineTemplate is a template of CapstanMachines.
type CapstanMachineTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It is immutable.
	// +required
	Spec CapstanMachineTemplateSpec `json:"spec,omitempty,omitzero"`
	// status describes a machine that is created from the template.
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

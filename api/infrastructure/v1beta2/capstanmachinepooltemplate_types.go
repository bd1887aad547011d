package v1beta2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// CapstanMachinePoolTemplateSpec is the desired state of a CapstanMachinePoolTemplate.
type CapstanMachinePoolTemplateSpec struct {
	// template describes the CapstanMachinePools that are created from it.
	// +required
	Template CapstanMachinePoolTemplateResource `json:"template,omitempty,omitzero"`
}

// CapstanMachinePoolTemplateResource describes the CapstanMachinePools that are created from a template.
type CapstanMachinePoolTemplateResource struct {
	// metadata contains the labels and annotations of the CapstanMachinePools.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the CapstanMachinePools.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!has(self.id) && !has(self.providerID) && !has(self.providerIDList) && !has(self.replicas)",message="id, providerID, providerIDList and replicas apply to one pool and cannot be set in a template"
	Spec CapstanMachinePoolSpec `json:"spec,omitempty,omitzero"`
}

// CapstanMachinePoolTemplateStatus describes a machine of a pool that is created from the template, for
// autoscalers that scale from zero.
// +kubebuilder:validation:MinProperties=1
type CapstanMachinePoolTemplateStatus struct {
	// capacity contains the resources of one machine.
	// +optional
	Capacity corev1.ResourceList `json:"capacity,omitempty"`

	// nodeInfo contains the architecture and operating system of the machines.
	// +optional
	NodeInfo NodeInfo `json:"nodeInfo,omitempty,omitzero"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanmachinepooltemplates,shortName=capmpt,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta1=v1beta1","cluster.x-k8s.io/v1beta2=v1beta2"}
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="CPU",type="string",JSONPath=".status.capacity.cpu",description="Processors of a machine"
// +kubebuilder:printcolumn:name="Memory",type="string",JSONPath=".status.capacity.memory",description="Memory of a machine"
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanMachinePoolTemplate is a template of CapstanMachinePools for ClusterClasses.
type CapstanMachinePoolTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It is immutable.
	// +required
	Spec CapstanMachinePoolTemplateSpec `json:"spec,omitempty,omitzero"`
	// status describes a machine of a pool that is created from the template.
	// +optional
	Status CapstanMachinePoolTemplateStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanMachinePoolTemplateList is a list of CapstanMachinePoolTemplates.
type CapstanMachinePoolTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanMachinePoolTemplates.
	Items []CapstanMachinePoolTemplate `json:"items"`
}

func init() {
	objectTypes = append(objectTypes, &CapstanMachinePoolTemplate{}, &CapstanMachinePoolTemplateList{})
}

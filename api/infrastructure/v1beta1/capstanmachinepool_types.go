package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// CapstanMachinePoolStatus is the observed state of a CapstanMachinePool. It can be rebuilt from the spec and the pool's
// CapstanMachines.
// +kubebuilder:validation:MinProperties=1
type CapstanMachinePoolStatus struct {
	// ready is true once all initial replicas of the pool have run. Cluster API reads it. It never becomes false again.
	// +optional
	Ready *bool `json:"ready,omitempty"`

	// failureReason and failureMessage describe a failure that only deletion ends. Capstan never sets them for
	// this kind: the pool replaces failed machines, and its spec can be changed. See the conditions.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	FailureReason *string `json:"failureReason,omitempty"`

	// failureMessage is the message for failureReason.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=10240
	FailureMessage *string `json:"failureMessage,omitempty"`

	// replicas is the number of the pool's machines: the length of spec.providerIDList.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Replicas *int32 `json:"replicas,omitempty"`

	// readyReplicas is the number of machines whose Machines have the condition Ready and are not being deleted.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ReadyReplicas *int32 `json:"readyReplicas,omitempty"`

	// availableReplicas is the number of available machines: those of readyReplicas whose Machines have been ready for the
	// MachinePool's minReadySeconds.
	// +optional
	// +kubebuilder:validation:Minimum=0
	AvailableReplicas *int32 `json:"availableReplicas,omitempty"`

	// upToDateReplicas is the number of machines that match the pool's spec, version and bootstrap data.
	// +optional
	// +kubebuilder:validation:Minimum=0
	UpToDateReplicas *int32 `json:"upToDateReplicas,omitempty"`

	// selector selects the pool's Machines and CapstanMachines for the scale subresource.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Selector string `json:"selector,omitempty"`

	// infrastructureMachineKind is the kind of the infrastructure objects of the pool's Machines.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	InfrastructureMachineKind string `json:"infrastructureMachineKind,omitempty"`

	// instances are the machines of the pool, sorted by name. At most 1000 are listed.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1000
	Instances []infrav1.CapstanMachinePoolInstanceStatus `json:"instances,omitempty"`

	// capacity contains the resources of one machine of the pool, for autoscalers that scale from zero.
	// +optional
	Capacity corev1.ResourceList `json:"capacity,omitempty"`

	// nodeInfo contains the architecture and operating system of the pool's machines.
	// +optional
	NodeInfo infrav1.NodeInfo `json:"nodeInfo,omitempty,omitzero"`

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
	V1Beta2 CapstanMachinePoolV1Beta2Status `json:"v1beta2,omitempty,omitzero"`
}

// CapstanMachinePoolV1Beta2Status contains the parts of the v1beta2 status of a CapstanMachinePool that the v1beta1
// contract does not have.
// +kubebuilder:validation:MinProperties=1
type CapstanMachinePoolV1Beta2Status struct {
	// conditions are the conditions of v1beta2.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization contains the fields that Cluster API reads in v1beta2 during the first provisioning.
	// +optional
	Initialization infrav1.CapstanMachinePoolInitializationStatus `json:"initialization,omitempty,omitzero"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanmachinepools,shortName=capmp,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:deprecatedversion:warning="infrastructure.capstan.dev/v1beta1 CapstanMachinePool is deprecated: use v1beta2. Cluster API v1.16 (April 2027) no longer reads the v1beta1 contract"
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="MachinePool",type="string",JSONPath=".metadata.ownerReferences[?(@.kind==\"MachinePool\")].name",description="Owning MachinePool",priority=10
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The desired number of machines is available, and the spec is valid"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Reason"
// +kubebuilder:printcolumn:name="Replicas",type="integer",JSONPath=".status.replicas",description="Machines"
// +kubebuilder:printcolumn:name="Available",type="integer",JSONPath=".status.availableReplicas",description="Available machines"
// +kubebuilder:printcolumn:name="Up-to-date",type="integer",JSONPath=".status.upToDateReplicas",description="Up-to-date machines"
// +kubebuilder:printcolumn:name="ProviderID",type="string",JSONPath=".spec.providerID",description="Provider ID of the pool",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.spec) || !has(oldSelf.spec.id) || has(self.spec)",message="spec cannot be removed: it identifies the pool on its hosts"

// CapstanMachinePool is a set of equal machines. Each machine is a CapstanMachine with its own Machine. A
// MachinePool references it.
//
// The version is deprecated: use v1beta2.
type CapstanMachinePool struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the pool.
	// +optional
	Spec infrav1.CapstanMachinePoolSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the pool.
	// +optional
	Status CapstanMachinePoolStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanMachinePoolList is a list of CapstanMachinePools.
//
// The version is deprecated: use v1beta2.
type CapstanMachinePoolList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanMachinePools.
	Items []CapstanMachinePool `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanMachinePool{}, &CapstanMachinePoolList{}) }

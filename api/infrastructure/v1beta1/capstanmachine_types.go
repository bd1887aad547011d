package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// CapstanMachineStatus is the observed state of a CapstanMachine. It can be rebuilt from the spec and the host.
// +kubebuilder:validation:MinProperties=1
type CapstanMachineStatus struct {
	// ready is true once the machine runs. Cluster API reads it.
	// +optional
	Ready *bool `json:"ready,omitempty"`

	// failureReason is the reason of a condition that describes a failure of the machine for ever: MachineLost (its host
	// no longer has it or its disk) or BootstrapFailed (its bootstrap data failed). The machine must be replaced.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	FailureReason *string `json:"failureReason,omitempty"`

	// failureMessage is the message for failureReason.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=10240
	FailureMessage *string `json:"failureMessage,omitempty"`

	// addresses are the machine's addresses, of the types Hostname and InternalIP.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Addresses []clusterv1.MachineAddress `json:"addresses,omitempty"`

	// failureDomain is the failure domain of the machine's host.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	FailureDomain string `json:"failureDomain,omitempty"`

	// restarts counts the restarts of the machine's PID 1 since the machine was created.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Restarts *int32 `json:"restarts,omitempty"`

	// update is the last update of the machine in place, as its host reports it.
	// +optional
	Update infrav1.MachineUpdateStatus `json:"update,omitempty,omitzero"`

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

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanmachines,shortName=capm,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:deprecatedversion:warning="infrastructure.capstan.dev/v1beta1 CapstanMachine is deprecated: use v1beta2. Cluster API v1.16 (April 2027) no longer reads the v1beta1 contract"
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Machine",type="string",JSONPath=".metadata.ownerReferences[?(@.kind==\"Machine\")].name",description="Owning Machine",priority=10
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The machine runs and its services are healthy"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Reason"
// +kubebuilder:printcolumn:name="Updating",type="string",JSONPath=`.status.conditions[?(@.type=="Updating")].status`,description="An update in place runs",priority=10
// +kubebuilder:printcolumn:name="Host",type="string",JSONPath=".spec.hostName",description="Host"
// +kubebuilder:printcolumn:name="Address",type="string",JSONPath=".spec.network.addresses[0].address",description="First address"
// +kubebuilder:printcolumn:name="ProviderID",type="string",JSONPath=".spec.providerID",description="Provider ID"
// +kubebuilder:printcolumn:name="Restarts",type="integer",JSONPath=".status.restarts",description="Restarts of the machine",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.spec) || !has(oldSelf.spec.id) || has(self.spec)",message="spec cannot be removed: it identifies the machine on its hosts"

// CapstanMachine is a machine on a CapstanHost: a container with its own namespaces, address, limits and init
// process.
//
// The version is deprecated: use v1beta2.
type CapstanMachine struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the machine.
	// +optional
	Spec infrav1.CapstanMachineSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the machine.
	// +optional
	Status CapstanMachineStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanMachineList is a list of CapstanMachines.
//
// The version is deprecated: use v1beta2.
type CapstanMachineList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanMachines.
	Items []CapstanMachine `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanMachine{}, &CapstanMachineList{}) }

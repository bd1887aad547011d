package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// CapstanClusterStatus is the observed state of a CapstanCluster. It can be rebuilt from the spec and the hosts.
// +kubebuilder:validation:MinProperties=1
type CapstanClusterStatus struct {
	// ready is true once the network and the control plane endpoint exist. Cluster API reads it.
	// +optional
	Ready *bool `json:"ready,omitempty"`

	// failureReason and failureMessage describe a failure that only deletion ends. Capstan never sets them for
	// this kind: a host can return, and networks and load balancers can be changed. See the conditions.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	FailureReason *string `json:"failureReason,omitempty"`

	// failureMessage is the message for failureReason.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=10240
	FailureMessage *string `json:"failureMessage,omitempty"`

	// failureDomains are the failure domains of the hosts that the cluster can use, by name. At most 100 are listed.
	// +optional
	// +kubebuilder:validation:MaxProperties=100
	FailureDomains clusterv1beta1.FailureDomains `json:"failureDomains,omitempty"`

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

// V1Beta2Status contains the parts of the v1beta2 status of a CapstanCluster or a CapstanMachine that the v1beta1
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
// +kubebuilder:resource:path=capstanclusters,shortName=capcl,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:deprecatedversion:warning="infrastructure.capstan.dev/v1beta1 CapstanCluster is deprecated: use v1beta2. Cluster API v1.16 (April 2027) no longer reads the v1beta1 contract"
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The cluster's infrastructure is ready"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Reason"
// +kubebuilder:printcolumn:name="Provisioned",type="boolean",JSONPath=".status.ready",description="The first provisioning is complete"
// +kubebuilder:printcolumn:name="Endpoint",type="string",JSONPath=".spec.controlPlaneEndpoint.host",description="API server endpoint"
// +kubebuilder:printcolumn:name="Port",type="integer",JSONPath=".spec.controlPlaneEndpoint.port",description="API server port"
// +kubebuilder:printcolumn:name="Network",type="string",JSONPath=".spec.network.machineCIDR",description="Network of the machines",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.spec) || !has(oldSelf.spec.id) || has(self.spec)",message="spec cannot be removed: it identifies the cluster on its hosts"

// CapstanCluster is the infrastructure of a Cluster: its network on the hosts, and the load balancer in front of
// its API servers.
//
// The version is deprecated: use v1beta2.
type CapstanCluster struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the cluster's infrastructure.
	// +optional
	Spec infrav1.CapstanClusterSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the cluster's infrastructure.
	// +optional
	Status CapstanClusterStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanClusterList is a list of CapstanClusters.
//
// The version is deprecated: use v1beta2.
type CapstanClusterList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanClusters.
	Items []CapstanCluster `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanCluster{}, &CapstanClusterList{}) }

package v1beta2

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

const (
	// MachineFinalizer lets the reconciler remove the machine from its host before the object goes
	// (IM-09).
	MachineFinalizer = "infrastructure.capstan.dev/capstanmachine"

	// ProviderIDPrefix starts the providerID of every machine; the machine's id follows.
	ProviderIDPrefix = "capstan://"

	// DefaultMachineImage is the host's own /usr as the machine's root file system.
	DefaultMachineImage = "host"
)

// CapstanMachineSpec is the desired state of a CapstanMachine.
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(self.id) && self.id == oldSelf.id)",message="id is written once by the controller and cannot be changed"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.providerID) || (has(self.providerID) && self.providerID == oldSelf.providerID)",message="providerID cannot be changed once it is set"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.hostName) || (has(self.hostName) && self.hostName == oldSelf.hostName)",message="hostName cannot be changed once it is set: a machine cannot move to another host"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.hostID) || (has(self.hostID) && self.hostID == oldSelf.hostID)",message="hostID is written once by the controller and cannot be changed"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.providerID) || !has(oldSelf.network) || !has(oldSelf.network.addresses) || (has(self.network) && has(self.network.addresses) && self.network.addresses == oldSelf.network.addresses)",message="network.addresses cannot be changed once the machine exists: it keeps its addresses for life"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(oldSelf.network) && has(oldSelf.network.addressesFromPools) ? has(self.network) && has(self.network.addressesFromPools) && self.network.addressesFromPools == oldSelf.network.addressesFromPools : !has(self.network) || !has(self.network.addressesFromPools))",message="network.addressesFromPools cannot be changed once the machine has its id: its addresses were claimed from these pools"
type CapstanMachineSpec struct {
	// id is the identity of this machine on its host. The controller writes it before the first
	// side effect and never changes it: a host refuses a known name that comes with another id.
	// +optional
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=36
	// +kubebuilder:validation:Pattern=`^[a-z0-9-]+$`
	ID string `json:"id,omitempty"`

	// providerID is capstan:// and the id; the Node has the same (IM-01).
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	ProviderID string `json:"providerID,omitempty"`

	// hostName is the CapstanHost that the machine runs on. The controller places the machine
	// when it is not set: by failure domain, then by free capacity.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	HostName string `json:"hostName,omitempty"`

	// hostID is the identity of the host behind hostName, as capstand made it. The controller writes it
	// when it places the machine. A CapstanHost of that name may be another host after a move to another
	// management cluster: then nothing is done to the machine (CTL-13).
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	HostID string `json:"hostID,omitempty"`

	// hostSelector limits the hosts on which the machine may be placed.
	// +optional
	HostSelector *metav1.LabelSelector `json:"hostSelector,omitempty"`

	// image is the machine's root file system, a name that the host knows. `host`, the host's own
	// /usr, when not set.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Image string `json:"image,omitempty"`

	// cpus is the number of processors of the machine; its Node reports as many. All of the host's
	// when not set. Machines may have more processors together than the host.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	CPUs int32 `json:"cpus,omitempty"`

	// memory is the memory limit of the machine; its Node reports as much. 2Gi when not set, 512Mi
	// at least. A host takes no more machines than its memory holds.
	// +optional
	// +kubebuilder:validation:XValidation:rule="quantity(string(self)).compareTo(quantity('512Mi')) >= 0",message="memory must be 512Mi at least"
	Memory *resource.Quantity `json:"memory,omitempty"`

	// network is how the machine is attached to its cluster's network.
	// +optional
	Network MachineNetworkSpec `json:"network,omitempty,omitzero"`
}

// MachineNetworkSpec is how a machine is attached to its cluster's network.
// +kubebuilder:validation:MinProperties=1
type MachineNetworkSpec struct {
	// addressesFromPools are the IPAM pools that give the machine its addresses, one address from
	// each (IPAM-07): one pool whose addresses lie in the cluster's machineCIDR, and for a dual stack
	// machine a second one with those of its machineIPv6CIDR (IPAM-08). The controller takes addresses
	// of these networks when there are no pools.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:XValidation:rule="size(self) < 2 || self[0] != self[1]",message="the two pools must differ: a dual stack machine takes one IPv4 and one IPv6 pool"
	AddressesFromPools []IPPoolReference `json:"addressesFromPools,omitempty"`

	// addresses are the addresses of the machine's interface, with their prefix lengths. Written by
	// the controller before the machine is made, so that a machine keeps its address for life.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	Addresses []InterfaceAddress `json:"addresses,omitempty"`
}

// IPPoolReference names an IPAM pool of any provider, in the namespace of the object that names it, or
// cluster-scoped.
type IPPoolReference struct {
	// apiGroup of the pool, for example ipam.capstan.dev.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	APIGroup string `json:"apiGroup,omitempty"`

	// kind of the pool, for example CapstanIPPool.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Kind string `json:"kind,omitempty"`

	// name of the pool.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
}

// InterfaceAddress is an address of a machine's interface.
type InterfaceAddress struct {
	// address is an IP address.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="address must be an IP address, for example 10.200.8.2"
	Address string `json:"address,omitempty"`

	// prefix is the length of the network prefix.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=128
	Prefix int32 `json:"prefix,omitempty"`

	// gateway is the router of the network.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="gateway must be an IP address, for example 10.200.8.1"
	Gateway string `json:"gateway,omitempty"`
}

// CapstanMachineStatus is the observed state of a CapstanMachine. All of it can be rebuilt from the
// spec and the host (ALL-12).
// +kubebuilder:validation:MinProperties=1
type CapstanMachineStatus struct {
	// conditions are the observations of the machine's current state: Ready, HostAssigned,
	// AddressesAssigned, MachineRunning, BootstrapSucceeded, ServicesHealthy, Deleting, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization holds the observations that orchestrate the first provisioning.
	// +optional
	Initialization CapstanMachineInitializationStatus `json:"initialization,omitempty,omitzero"`

	// addresses of the machine: Hostname and InternalIP (IM-03).
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Addresses []clusterv1.MachineAddress `json:"addresses,omitempty"`

	// failureDomain is where the machine is (IM-02).
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	FailureDomain string `json:"failureDomain,omitempty"`

	// restarts is how often the machine's PID 1 was started again since it was made.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Restarts *int32 `json:"restarts,omitempty"`

	// observedGeneration is the latest generation that the controller has seen.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// CapstanMachineInitializationStatus holds the observations that orchestrate the first provisioning.
// +kubebuilder:validation:MinProperties=1
type CapstanMachineInitializationStatus struct {
	// provisioned is true when the machine runs (IM-04).
	// +optional
	Provisioned *bool `json:"provisioned,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanmachines,shortName=capm,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta2"
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Machine",type="string",JSONPath=".metadata.ownerReferences[?(@.kind==\"Machine\")].name",description="Machine that owns this one",priority=10
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The machine runs and its services are healthy"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Why"
// +kubebuilder:printcolumn:name="Host",type="string",JSONPath=".spec.hostName",description="Host"
// +kubebuilder:printcolumn:name="Address",type="string",JSONPath=".spec.network.addresses[0].address",description="First address"
// +kubebuilder:printcolumn:name="ProviderID",type="string",JSONPath=".spec.providerID",description="Provider ID"
// +kubebuilder:printcolumn:name="Restarts",type="integer",JSONPath=".status.restarts",description="Restarts of the machine",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanMachine is a machine on a CapstanHost: namespaces, an address, limits and an init process.
type CapstanMachine struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the machine.
	// +optional
	Spec CapstanMachineSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the machine.
	// +optional
	Status CapstanMachineStatus `json:"status,omitempty,omitzero"`
}

// GetConditions returns the conditions.
func (m *CapstanMachine) GetConditions() []metav1.Condition { return m.Status.Conditions }

// SetConditions sets the conditions.
func (m *CapstanMachine) SetConditions(conditions []metav1.Condition) {
	m.Status.Conditions = conditions
}

// +kubebuilder:object:root=true

// CapstanMachineList is a list of CapstanMachines.
type CapstanMachineList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanMachines.
	Items []CapstanMachine `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanMachine{}, &CapstanMachineList{}) }

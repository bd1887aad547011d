package v1beta2

import (
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

const (
	// ClusterFinalizer lets the reconciler remove a cluster's networks and load balancer before the
	// object goes (IC-08, IC-12).
	ClusterFinalizer = "infrastructure.capstan.dev/capstancluster"
)

// LoadBalancerMode says who provides the control plane endpoint.
// +kubebuilder:validation:Enum=Managed;External
type LoadBalancerMode string

const (
	// LoadBalancerManaged makes a host run a load balancer for the cluster's API servers.
	LoadBalancerManaged LoadBalancerMode = "Managed"

	// LoadBalancerExternal leaves the endpoint to others: the cluster waits until the endpoint is
	// set on the Cluster or on this object (IC-14).
	LoadBalancerExternal LoadBalancerMode = "External"
)

// CapstanClusterSpec is the desired state of a CapstanCluster.
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(self.id) && self.id == oldSelf.id)",message="id is written once by the controller and cannot be changed"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.controlPlaneEndpoint) || !has(oldSelf.controlPlaneEndpoint.host) || (has(self.controlPlaneEndpoint) && has(self.controlPlaneEndpoint.host) && self.controlPlaneEndpoint.host == oldSelf.controlPlaneEndpoint.host)",message="the host of controlPlaneEndpoint cannot be changed once it is set: certificates and kubeconfigs carry it"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.controlPlaneEndpoint) || !has(oldSelf.controlPlaneEndpoint.port) || (has(self.controlPlaneEndpoint) && has(self.controlPlaneEndpoint.port) && self.controlPlaneEndpoint.port == oldSelf.controlPlaneEndpoint.port)",message="the port of controlPlaneEndpoint cannot be changed once it is set: certificates and kubeconfigs carry it"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.loadBalancer) || !has(oldSelf.loadBalancer.address) || has(self.loadBalancer)",message="loadBalancer cannot be removed once the load balancer has its address from a pool: certificates and kubeconfigs carry it"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.controlPlaneEndpoint) || !has(oldSelf.controlPlaneEndpoint.host) || (has(oldSelf.loadBalancer) && has(oldSelf.loadBalancer.addressFromPool)) == (has(self.loadBalancer) && has(self.loadBalancer.addressFromPool))",message="addressFromPool must be there from the start: the cluster has its endpoint already"
type CapstanClusterSpec struct {
	// id is the identity of this cluster on its hosts. The controller writes it before the first
	// side effect and never changes it: hosts refuse a known name that comes with another id, so
	// that a cluster made again under an old name never adopts what is left of the old one.
	// +optional
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=36
	// +kubebuilder:validation:Pattern=`^[a-z0-9-]+$`
	ID string `json:"id,omitempty"`

	// controlPlaneEndpoint is the address on which the cluster's API server is reached. The
	// controller sets it from the load balancer; a value given by the user is kept (IC-01, IC-10).
	// +optional
	ControlPlaneEndpoint clusterv1.APIEndpoint `json:"controlPlaneEndpoint,omitempty,omitzero"`

	// loadBalancer configures the load balancer in front of the API servers.
	// +optional
	LoadBalancer LoadBalancerSpec `json:"loadBalancer,omitempty,omitzero"`

	// loadBalancerHosts are the hosts on which the load balancer and its network were made: that of
	// loadBalancer.hostName and, after a move, those that are not rid of it yet. Written by the controller
	// before it makes anything on a host; the cluster's deletion waits for all of them (IC-12).
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	LoadBalancerHosts []LoadBalancerHost `json:"loadBalancerHosts,omitempty"`

	// network configures the network that the cluster's machines share.
	// +optional
	Network ClusterNetworkSpec `json:"network,omitempty,omitzero"`

	// hostSelector limits the hosts on which the cluster's machines are placed.
	// All hosts that admit the namespace when empty.
	// +optional
	HostSelector *metav1.LabelSelector `json:"hostSelector,omitempty"`
}

// LoadBalancerSpec configures the load balancer in front of a cluster's API servers.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.addressFromPool) || !has(self.bindAddress)",message="addressFromPool and bindAddress exclude each other: one is an address of the cluster's network, the other one of the host"
// +kubebuilder:validation:XValidation:rule="!has(self.addressFromPool) || !has(self.mode) || self.mode != 'External'",message="addressFromPool is for mode Managed: with mode External there is no load balancer that could have the address"
// +kubebuilder:validation:XValidation:rule="!has(self.address) || has(self.addressFromPool)",message="address is written by the controller from addressFromPool: name a pool, or use bindAddress"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.address) || (has(self.address) && self.address == oldSelf.address && has(self.addressFromPool) && self.addressFromPool == oldSelf.addressFromPool)",message="address and addressFromPool cannot be changed once the load balancer has its address: certificates and kubeconfigs carry it"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.hostID) || !has(self.hostID) || self.hostID != oldSelf.hostID || (has(self.hostName) && self.hostName == oldSelf.hostName)",message="hostID says which host hostName is: remove it when you change hostName"
type LoadBalancerSpec struct {
	// mode says who provides the endpoint: Managed (the default) or External.
	// +optional
	Mode LoadBalancerMode `json:"mode,omitempty"`

	// bindAddress is an address of the host on which the load balancer listens as well, so that the
	// API server is reached from outside of the box; it becomes the endpoint's host when no
	// endpoint was given. Only the gateway address of the cluster's network when empty.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="bindAddress must be an IP address, for example 192.0.2.10"
	BindAddress string `json:"bindAddress,omitempty"`

	// addressFromPool is the IPAM pool that gives the load balancer an address of its own within the
	// cluster's machineCIDR; it becomes the endpoint's host when no endpoint was given (IPAM-07). The
	// load balancer still listens on the network's gateway as well.
	// +optional
	AddressFromPool *IPPoolReference `json:"addressFromPool,omitempty"`

	// address is what addressFromPool gave. Written by the controller before the load balancer is made,
	// so that a cluster keeps its endpoint for life.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="address must be an IP address, for example 10.200.8.2"
	Address string `json:"address,omitempty"`

	// port is the TCP port on which the load balancer listens. 6443 when not set.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`

	// hostName is the CapstanHost that runs the load balancer. The controller chooses one when
	// it is not set.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	HostName string `json:"hostName,omitempty"`

	// hostID is the identity of the host behind hostName, as capstand made it. Written by the controller. A
	// CapstanHost of that name may be another host after a move to another management cluster: then
	// nothing is made there (CTL-13).
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	HostID string `json:"hostID,omitempty"`
}

// LoadBalancerHost is a host on which a cluster's load balancer was made.
type LoadBalancerHost struct {
	// name is that of the CapstanHost.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// id is the identity of the host, as capstand made it; empty if that is too old to have one.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	ID string `json:"id,omitempty"`
}

// ClusterNetworkSpec configures the network that a cluster's machines share.
// +kubebuilder:validation:MinProperties=1
type ClusterNetworkSpec struct {
	// machineCIDR is the IPv4 network of the machines. The controller takes a free one from its pool
	// when it is not set; its first address is the gateway.
	// +optional
	// +kubebuilder:validation:MinLength=9
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self) == cidr(self).masked()",message="machineCIDR must be a network without host bits, for example 10.200.8.0/21"
	MachineCIDR string `json:"machineCIDR,omitempty"`

	// machineIPv6CIDR is a second, IPv6 network of the machines, which makes them dual stack (IPAM-08):
	// each has an address of both networks, IPv4 first, or, when it names pools, one for each pool. Its
	// first address is the gateway; packets that leave the host bear the host's address, as with IPv4. The
	// control plane endpoint stays IPv4. Machines have IPv4 addresses only when it is not set.
	// +optional
	// +kubebuilder:validation:MinLength=4
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self) == cidr(self).masked() && cidr(self).ip().family() == 6",message="machineIPv6CIDR must be an IPv6 network without host bits, for example fd00:10:200:8::/64"
	MachineIPv6CIDR string `json:"machineIPv6CIDR,omitempty"`
}

// String names the machines' networks, for messages.
func (n ClusterNetworkSpec) String() string {
	return strings.TrimSpace(n.MachineCIDR + " " + n.MachineIPv6CIDR)
}

// CapstanClusterStatus is the observed state of a CapstanCluster. All of it can be rebuilt from the
// spec and the hosts (ALL-12).
// +kubebuilder:validation:MinProperties=1
type CapstanClusterStatus struct {
	// conditions are the observations of the cluster's current state: Ready, HostsAvailable,
	// NetworkReady, LoadBalancerReady, Deleting, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization holds the observations that orchestrate the first provisioning.
	// +optional
	Initialization CapstanClusterInitializationStatus `json:"initialization,omitempty,omitzero"`

	// failureDomains are those of the hosts that the cluster can use (IC-04).
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	FailureDomains []clusterv1.FailureDomain `json:"failureDomains,omitempty"`

	// observedGeneration is the latest generation that the controller has seen.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// CapstanClusterInitializationStatus holds the observations that orchestrate the first provisioning.
// +kubebuilder:validation:MinProperties=1
type CapstanClusterInitializationStatus struct {
	// provisioned is true when the network and the endpoint are there (IC-02).
	// +optional
	Provisioned *bool `json:"provisioned,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanclusters,shortName=capcl,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta2"
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The cluster's infrastructure is ready"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Why"
// +kubebuilder:printcolumn:name="Provisioned",type="boolean",JSONPath=".status.initialization.provisioned",description="The first provisioning is complete"
// +kubebuilder:printcolumn:name="Endpoint",type="string",JSONPath=".spec.controlPlaneEndpoint.host",description="API server endpoint"
// +kubebuilder:printcolumn:name="Port",type="integer",JSONPath=".spec.controlPlaneEndpoint.port",description="API server port"
// +kubebuilder:printcolumn:name="Network",type="string",JSONPath=".spec.network.machineCIDR",description="The machines' network",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanCluster is the infrastructure of a Cluster: its network on the hosts and the load balancer
// in front of its API servers.
type CapstanCluster struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the cluster's infrastructure.
	// +optional
	Spec CapstanClusterSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the cluster's infrastructure.
	// +optional
	Status CapstanClusterStatus `json:"status,omitempty,omitzero"`
}

// GetConditions returns the conditions.
func (c *CapstanCluster) GetConditions() []metav1.Condition { return c.Status.Conditions }

// SetConditions sets the conditions.
func (c *CapstanCluster) SetConditions(conditions []metav1.Condition) {
	c.Status.Conditions = conditions
}

// +kubebuilder:object:root=true

// CapstanClusterList is a list of CapstanClusters.
type CapstanClusterList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanClusters.
	Items []CapstanCluster `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanCluster{}, &CapstanClusterList{}) }

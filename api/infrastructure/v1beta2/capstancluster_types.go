package v1beta2

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

const (
	// ClusterFinalizer keeps a CapstanCluster until its networks and load balancer are removed from all hosts.
	ClusterFinalizer = "infrastructure.capstan.dev/capstancluster"
)

// LoadBalancerMode selects the provider of the control plane endpoint.
// +kubebuilder:validation:Enum=Managed;External
type LoadBalancerMode string

const (
	// LoadBalancerManaged runs a load balancer for the cluster's API servers on a host.
	LoadBalancerManaged LoadBalancerMode = "Managed"

	// LoadBalancerExternal uses an endpoint from outside Capstan. The cluster waits until the endpoint is set on
	// the Cluster or on this object.
	LoadBalancerExternal LoadBalancerMode = "External"
)

// CapstanClusterSpec is the desired state of a CapstanCluster.
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(self.id) && self.id == oldSelf.id)",message="id is written once by the controller and cannot be changed"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.controlPlaneEndpoint) || !has(oldSelf.controlPlaneEndpoint.host) || (has(self.controlPlaneEndpoint) && has(self.controlPlaneEndpoint.host) && self.controlPlaneEndpoint.host == oldSelf.controlPlaneEndpoint.host)",message="the host of controlPlaneEndpoint cannot be changed once it is set: certificates and kubeconfigs contain it"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.controlPlaneEndpoint) || !has(oldSelf.controlPlaneEndpoint.port) || (has(self.controlPlaneEndpoint) && has(self.controlPlaneEndpoint.port) && self.controlPlaneEndpoint.port == oldSelf.controlPlaneEndpoint.port)",message="the port of controlPlaneEndpoint cannot be changed once it is set: certificates and kubeconfigs contain it"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.loadBalancer) || !has(oldSelf.loadBalancer.address) || has(self.loadBalancer)",message="loadBalancer cannot be removed once the load balancer has its address from a pool: certificates and kubeconfigs contain it"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.controlPlaneEndpoint) || !has(oldSelf.controlPlaneEndpoint.host) || (has(oldSelf.loadBalancer) && has(oldSelf.loadBalancer.addressFromPool)) == (has(self.loadBalancer) && has(self.loadBalancer.addressFromPool))",message="addressFromPool cannot be added to a cluster that has an endpoint: set it when you create the cluster"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.loadBalancerHosts) || (has(oldSelf.network) && has(oldSelf.network.overlay)) == (has(self.network) && has(self.network.overlay))",message="network.overlay cannot be added or removed once the network exists on a host (see loadBalancerHosts)"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.loadBalancerHosts) || (has(oldSelf.network) && has(oldSelf.network.mtu) ? oldSelf.network.mtu : 0) == (has(self.network) && has(self.network.mtu) ? self.network.mtu : 0)",message="network.mtu cannot be changed once the network exists on a host (see loadBalancerHosts): the machines have it"
// +kubebuilder:validation:XValidation:rule="(has(self.network) && has(self.network.lan)) == (has(oldSelf.network) && has(oldSelf.network.lan))",message="network.lan cannot be added or removed: the machines have addresses of their network; create another cluster"
// +kubebuilder:validation:XValidation:rule="!has(self.network) || !has(self.network.lan) || !has(self.loadBalancer) || !has(self.loadBalancer.bindAddress)",message="network.lan cannot be set together with loadBalancer.bindAddress: the load balancer listens at a virtual address of the LAN, from spec.virtualAddresses of the hosts"
// +kubebuilder:validation:XValidation:rule="!(has(self.network) && has(self.network.lan)) && !(has(oldSelf.controlPlaneEndpoint) && has(oldSelf.controlPlaneEndpoint.host)) || (has(self.loadBalancer) && has(self.loadBalancer.mode) && self.loadBalancer.mode == 'External') == (has(oldSelf.loadBalancer) && has(oldSelf.loadBalancer.mode) && oldSelf.loadBalancer.mode == 'External')",message="loadBalancer.mode cannot be changed to or from External once controlPlaneEndpoint is set, or in a LAN: clients use the endpoint that the cluster was created with"
// +kubebuilder:validation:XValidation:rule="!has(self.network) || !has(self.network.lan) || !has(self.services)",message="network.lan cannot be set together with services: the machines are reachable in the LAN"
type CapstanClusterSpec struct {
	// id identifies this cluster on its hosts. The controller sets it before it creates anything and never changes
	// it. A host refuses a known name with another id, so a new cluster under an old name never adopts the remains
	// of the old one.
	// +optional
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=36
	// +kubebuilder:validation:Pattern=`^[a-z0-9-]+$`
	ID string `json:"id,omitempty"`

	// controlPlaneEndpoint is the address of the cluster's API server. The controller sets it from the load
	// balancer. A value that you set is kept. With network.overlay it is one of the virtualAddresses of the load
	// balancer's host. If it has none, it is the tunnelAddress of this host and a port of the manager's flag
	// --endpoint-port-range. Host and port cannot be changed after they are set.
	// +optional
	ControlPlaneEndpoint clusterv1.APIEndpoint `json:"controlPlaneEndpoint,omitempty,omitzero"`

	// loadBalancer configures the load balancer in front of the API servers.
	// +optional
	LoadBalancer LoadBalancerSpec `json:"loadBalancer,omitempty,omitzero"`

	// loadBalancerHosts lists the hosts on which the load balancer and its network were created: the host of
	// loadBalancer.hostName, all hosts with machines if the cluster has network.overlay, and previous hosts that
	// still have them. The controller writes this list before it creates anything on a host. Deletion of the
	// cluster waits for all of them.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1000
	LoadBalancerHosts []LoadBalancerHost `json:"loadBalancerHosts,omitempty"`

	// network configures the network of the cluster's machines.
	// +optional
	Network ClusterNetworkSpec `json:"network,omitempty,omitzero"`

	// hostSelector limits the hosts for the cluster's machines by label. If empty, the cluster can use all hosts
	// that admit its namespace.
	// +optional
	// +kubebuilder:validation:XValidation:rule="(!has(self.matchLabels) || self.matchLabels.size() <= 64) && (!has(self.matchExpressions) || (self.matchExpressions.size() <= 16 && self.matchExpressions.all(e, !has(e.values) || e.values.size() <= 64)))",message="hostSelector may have 64 labels, and 16 expressions with 64 values each"
	HostSelector *metav1.LabelSelector `json:"hostSelector,omitempty"`

	// services makes Services of the cluster reachable from outside of the hosts. If empty, no Service is.
	// +optional
	Services ClusterServicesSpec `json:"services,omitempty,omitzero"`
}

// ClusterServicesSpec makes Services of a cluster reachable from outside of the hosts.
// +kubebuilder:validation:MinProperties=1
type ClusterServicesSpec struct {
	// loadBalancer publishes the Services of type LoadBalancer whose loadBalancerClass is capstan.dev/host, capstan.dev/host-ports or
	// empty, and those of type NodePort if nodePorts is true. If not set, Capstan leaves these Services alone.
	// +optional
	LoadBalancer *ServiceLoadBalancerSpec `json:"loadBalancer,omitempty"`
}

// ServiceLoadBalancerSpec publishes Services of type LoadBalancer, with an address for each family that the Service has and
// that has a pool. At most 64 addresses with together 256 ports are published.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.addressesFromPool) || (has(self.addressesFromPool) && self.addressesFromPool == oldSelf.addressesFromPool)",message="addressesFromPool cannot be changed while Services have addresses from it: remove loadBalancer, which ends the publication, and set it again"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.ipv6AddressesFromPool) || (has(self.ipv6AddressesFromPool) && self.ipv6AddressesFromPool == oldSelf.ipv6AddressesFromPool)",message="ipv6AddressesFromPool cannot be changed while Services have addresses from it: remove loadBalancer, which ends the publication, and set it again"
type ServiceLoadBalancerSpec struct {
	// addressesFromPool names the IPAM pool of the IPv4 addresses. Each Service with the family IPv4 gets an address of its
	// own. A host must allow the addresses: see spec.services of CapstanHost. If empty, Services have no IPv4 address.
	// +optional
	AddressesFromPool IPPoolReference `json:"addressesFromPool,omitempty,omitzero"`

	// ipv6AddressesFromPool names the IPAM pool of the IPv6 addresses. Each Service with the family IPv6 gets an address of
	// its own. The machines of the cluster must have IPv6 addresses. If empty, Services have no IPv6 address.
	// +optional
	IPv6AddressesFromPool IPPoolReference `json:"ipv6AddressesFromPool,omitempty,omitzero"`

	// hostPorts publishes the Services whose loadBalancerClass is capstan.dev/host-ports, at the own addresses of the hosts that have
	// machines of the cluster. A host must authorise each port: see spec.services.hostPorts of CapstanHost. Default: false.
	// +optional
	HostPorts *bool `json:"hostPorts,omitempty"`

	// nodePorts publishes the Services of type NodePort, at their node ports of the own addresses of the hosts that have machines of the
	// cluster. A host must authorise each node port: see spec.services.hostPorts of CapstanHost. Default: false.
	// +optional
	NodePorts *bool `json:"nodePorts,omitempty"`
}

// LoadBalancerSpec configures the load balancer in front of a cluster's API servers.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.addressFromPool) || !has(self.bindAddress)",message="addressFromPool and bindAddress cannot be set together: the first is an address of a pool, the second an address of the host"
// +kubebuilder:validation:XValidation:rule="!has(self.addressFromPool) || !has(self.mode) || self.mode != 'External'",message="addressFromPool requires mode Managed: mode External has no load balancer"
// +kubebuilder:validation:XValidation:rule="!has(self.address) || has(self.addressFromPool)",message="address is set by the controller from addressFromPool: set addressFromPool or bindAddress instead"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.address) || (has(self.address) && self.address == oldSelf.address && has(self.addressFromPool) && self.addressFromPool == oldSelf.addressFromPool)",message="address and addressFromPool cannot be changed once the load balancer has its address: certificates and kubeconfigs contain it"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.hostID) || !has(self.hostID) || self.hostID != oldSelf.hostID || (has(self.hostName) && self.hostName == oldSelf.hostName)",message="hostID identifies the host of hostName: remove hostID when you change hostName"
type LoadBalancerSpec struct {
	// mode selects the provider of the control plane endpoint: Managed (default) or External.
	// +optional
	Mode LoadBalancerMode `json:"mode,omitempty"`

	// bindAddress is an additional IP address of the host on which the load balancer listens, so that clients
	// outside the box reach the API server. It becomes the endpoint's host if no endpoint was set. If empty, the
	// load balancer listens only on the gateway address of the cluster's network.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="bindAddress must be an IP address, for example 192.0.2.10"
	// +kubebuilder:validation:XValidation:rule="!isIP(self) || ip(self).isGlobalUnicast()",message="bindAddress must be a unicast address of the host, for example 192.0.2.10: no loopback, link-local or unspecified address"
	BindAddress string `json:"bindAddress,omitempty"`

	// addressFromPool names an IPAM pool. The load balancer gets an address from it, which becomes the endpoint's host
	// if no endpoint was set. An address outside of machineCIDR, or in a LAN, must be one of spec.virtualAddresses of the
	// load balancer's host, and the cluster must span hosts or be in the LAN: it is then the virtual address of the endpoint, and moves to
	// another host when its host fails. The load balancer still listens on the network's gateway address, except in a LAN.
	// +optional
	AddressFromPool *IPPoolReference `json:"addressFromPool,omitempty"`

	// address is the address that addressFromPool provided. The controller sets it before it creates the load
	// balancer, so that the endpoint never changes.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="address must be an IP address, for example 10.200.8.2"
	Address string `json:"address,omitempty"`

	// port is the TCP port of the load balancer. Default: 6443.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`

	// hostName is the name of the CapstanHost that runs the load balancer. If empty, the controller chooses a
	// host.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	HostName string `json:"hostName,omitempty"`

	// hostID is the id of the host of hostName, as capstand generated it. The controller sets it. After a move to
	// another management cluster, a CapstanHost of this name can be another host. Capstan then creates nothing on
	// it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	HostID string `json:"hostID,omitempty"`
}

// LoadBalancerHost is a host on which a cluster's load balancer was created.
type LoadBalancerHost struct {
	// name is the name of the CapstanHost.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// id is the id of the host, as capstand generated it. Empty for a capstand of a version without ids.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	ID string `json:"id,omitempty"`
}

// ClusterNetworkSpec configures the network of a cluster's machines.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.lan) || (!has(self.overlay) && !has(self.mtu))",message="lan cannot be set together with overlay or mtu: the hosts exchange the packets through the LAN, and the machines have the MTU of its bridge"
// +kubebuilder:validation:XValidation:rule="!has(self.mtu) || !has(self.overlay) || self.mtu == self.overlay.mtu",message="mtu and overlay.mtu must be equal: set only mtu, and the controller sets overlay"
// +kubebuilder:validation:XValidation:rule="!has(self.machineIPv6CIDR) || !has(self.machineCIDR) || !isCIDR(self.machineCIDR) || cidr(self.machineCIDR).ip().family() == 4",message="machineCIDR must be IPv4 if machineIPv6CIDR is set: for machines with IPv6 only, set machineCIDR to the IPv6 network and leave machineIPv6CIDR out"
type ClusterNetworkSpec struct {
	// machineCIDR is the network of the machines, for example 10.200.8.0/21. Its first address is the gateway. An
	// IPv6 network, for example fd00:10:200:8::/64, makes a cluster with IPv6 only: machines and the control plane
	// endpoint have IPv6 addresses, and the networks of pods and Services must be IPv6 too. If empty, the
	// controller chooses a free IPv4 network from its own range (manager flag --machine-network-pool).
	// +optional
	// +kubebuilder:validation:MinLength=9
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self) == cidr(self).masked()",message="machineCIDR must be a network without host bits, for example 10.200.8.0/21"
	MachineCIDR string `json:"machineCIDR,omitempty"`

	// machineIPv6CIDR is an IPv6 network in addition to an IPv4 machineCIDR. It makes the machines dual stack: each
	// machine has an IPv4 address first and an IPv6 address second, or one address from each of its pools. The first
	// address of the network is the gateway. Traffic that leaves the host has the host's address, as with IPv4. The
	// control plane endpoint remains IPv4. In a LAN it is ipv6CIDR of the LAN's entry in spec.lanNetworks of CapstanHosts, and the
	// gateways are those of the pools. If empty, machines have addresses of machineCIDR only.
	// +optional
	// +kubebuilder:validation:MinLength=4
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self) == cidr(self).masked() && cidr(self).ip().family() == 6",message="machineIPv6CIDR must be an IPv6 network without host bits, for example fd00:10:200:8::/64"
	MachineIPv6CIDR string `json:"machineIPv6CIDR,omitempty"`

	// mtu is the largest IP packet of the machines of a cluster across hosts, in bytes. The links between the hosts must carry packets
	// that are 50 bytes larger, or 70 if the tunnelAddresses are IPv6; with encrypted overlays 130 or 150. Set it when you create the
	// cluster, if the links carry packets of another size than 1500 bytes. Default: 1500, or the smallest link with a tunnelAddress, minus these bytes.
	// +optional
	// +kubebuilder:validation:Minimum=1280
	// +kubebuilder:validation:Maximum=9000
	MTU int32 `json:"mtu,omitempty"`

	// overlay connects the cluster's network across hosts. The controller sets it before it creates anything if the
	// host of the load balancer has a tunnelAddress, and never changes it after machines may boot. If empty,
	// the network stays on one box.
	// +optional
	Overlay NetworkOverlay `json:"overlay,omitempty,omitzero"`

	// lan attaches the machines to a network of the user, instead of a network of the cluster. Each machine gets its addresses, and the
	// gateways of the LAN, from spec.network.addressesFromPools of its CapstanMachine. Its endpoint is one of spec.virtualAddresses of
	// the hosts in the LAN, or external with loadBalancer.mode External. Set it when you create the cluster.
	// +optional
	LAN ClusterLAN `json:"lan,omitempty,omitzero"`
}

// NetworkOverlay connects the parts of a cluster's network on its hosts: with VXLAN between their tunnelAddresses.
// +kubebuilder:validation:XValidation:rule="self.mtu == oldSelf.mtu",message="mtu is written once by the controller and cannot be changed: the machines have it"
type NetworkOverlay struct {
	// vni is the VXLAN network identifier. Each cluster has its own. Of two clusters with the same one, only the one whose
	// machines may boot, or else the older one, is served.
	// +required
	// +kubebuilder:validation:Minimum=4096
	// +kubebuilder:validation:Maximum=16777215
	VNI int32 `json:"vni,omitempty"`

	// mtu is the largest IP packet of the machines, in bytes: that of network.mtu, or 1450, or 1430 if the tunnelAddress is an IPv6 address.
	// All hosts must be able to exchange packets that are 50 bytes larger, or 70 with IPv6. With encrypted overlays it is 1370
	// or 1350, and the packets between the hosts are 130 or 150 bytes larger.
	// +required
	// +kubebuilder:validation:Minimum=1280
	// +kubebuilder:validation:Maximum=9000
	MTU int32 `json:"mtu,omitempty"`
}

// String returns the machine networks for messages.
func (n ClusterNetworkSpec) String() string {
	return strings.TrimSpace(n.MachineCIDR + " " + n.MachineIPv6CIDR)
}

// CapstanClusterStatus is the observed state of a CapstanCluster. It can be rebuilt from the spec and the hosts.
// +kubebuilder:validation:MinProperties=1
type CapstanClusterStatus struct {
	// conditions describe the current state: Ready, HostsAvailable, NetworkReady, LoadBalancerReady, BootAllowed,
	// ServicesPublished, Deleting, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization contains the fields that Cluster API reads during the first provisioning.
	// +optional
	Initialization CapstanClusterInitializationStatus `json:"initialization,omitempty,omitzero"`

	// failureDomains are the failure domains of the hosts that the cluster can use. At most 100 are listed.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	FailureDomains []clusterv1.FailureDomain `json:"failureDomains,omitempty"`

	// observedGeneration is the latest generation of this object that the controller processed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// CapstanClusterInitializationStatus contains the fields that Cluster API reads during the first provisioning.
// +kubebuilder:validation:MinProperties=1
type CapstanClusterInitializationStatus struct {
	// provisioned is true when the network and the control plane endpoint exist. With a CapstanControlPlane, it follows by default when
	// the first API server answers, at most a minute after the condition BootAllowed.
	// +optional
	Provisioned *bool `json:"provisioned,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanclusters,shortName=capcl,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta1=v1beta1","cluster.x-k8s.io/v1beta2=v1beta2"}
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The cluster's infrastructure is ready"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Reason"
// +kubebuilder:printcolumn:name="Provisioned",type="boolean",JSONPath=".status.initialization.provisioned",description="The first provisioning is complete"
// +kubebuilder:printcolumn:name="Endpoint",type="string",JSONPath=".spec.controlPlaneEndpoint.host",description="API server endpoint"
// +kubebuilder:printcolumn:name="Port",type="integer",JSONPath=".spec.controlPlaneEndpoint.port",description="API server port"
// +kubebuilder:printcolumn:name="Network",type="string",JSONPath=".spec.network.machineCIDR",description="Network of the machines",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.spec) || !has(oldSelf.spec.id) || has(self.spec)",message="spec cannot be removed: it identifies the cluster on its hosts"

// CapstanCluster is the infrastructure of a Cluster: its network on the hosts, and the load balancer in front of
// its API servers.
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

// AllowsBoot reports whether machines of the cluster may run: the condition BootAllowed is true, or the cluster was provisioned before
// there was this condition. From then on, the network, the endpoint and the VXLAN identifier stay.
func (c *CapstanCluster) AllowsBoot() bool {
	return meta.IsStatusConditionTrue(c.Status.Conditions, BootAllowedCondition) || ptr.Deref(c.Status.Initialization.Provisioned, false)
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

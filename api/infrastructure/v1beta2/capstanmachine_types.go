package v1beta2

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

const (
	// MachineFinalizer keeps a CapstanMachine until its machine is removed from the host.
	MachineFinalizer = "infrastructure.capstan.dev/capstanmachine"

	// ProviderIDPrefix is the prefix of every machine's providerID. The machine's id follows.
	ProviderIDPrefix = "capstan://"

	// DefaultMachineImage uses the host's own /usr as root file system.
	DefaultMachineImage = "host"
)

// CapstanMachineSpec is the desired state of a CapstanMachine.
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(self.id) && self.id == oldSelf.id)",message="id is written once by the controller and cannot be changed"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.providerID) || (has(self.providerID) && self.providerID == oldSelf.providerID)",message="providerID cannot be changed once it is set"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || !has(oldSelf.hostName) || (has(self.hostName) && self.hostName == oldSelf.hostName)",message="hostName cannot be changed once the machine has its id: a machine cannot move to another host"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.hostID) || (has(self.hostID) && self.hostID == oldSelf.hostID)",message="hostID is written once by the controller and cannot be changed"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.providerID) || !has(oldSelf.network) || !has(oldSelf.network.addresses) || (has(self.network) && has(self.network.addresses) && self.network.addresses == oldSelf.network.addresses)",message="network.addresses cannot be changed once the machine exists: it keeps its addresses for life"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(oldSelf.network) && has(oldSelf.network.addressesFromPools) ? has(self.network) && has(self.network.addressesFromPools) && self.network.addressesFromPools == oldSelf.network.addressesFromPools : !has(self.network) || !has(self.network.addressesFromPools))",message="network.addressesFromPools cannot be changed once the machine has its id: its addresses were claimed from these pools"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(oldSelf.disk) && has(oldSelf.disk.size) ? has(self.disk) && has(self.disk.size) && (!string(self.disk.size).matches('^[0-9]{1,19}([.][0-9]{1,9})?([kMGTPE]i?)?$') || quantity(string(self.disk.size)).compareTo(quantity(string(oldSelf.disk.size))) >= 0) : !has(self.disk) || !has(self.disk.size))",message="disk cannot shrink once the machine has its id: replace the machine"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(oldSelf.volumes) ? has(self.volumes) && self.volumes == oldSelf.volumes : !has(self.volumes))",message="volumes cannot be changed once the machine has its id: replace the machine"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(oldSelf.hostMounts) ? has(self.hostMounts) && self.hostMounts == oldSelf.hostMounts : !has(self.hostMounts))",message="hostMounts cannot be changed once the machine has its id: replace the machine"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(oldSelf.devices) ? has(self.devices) && self.devices == oldSelf.devices : !has(self.devices))",message="devices cannot be changed once the machine has its id: replace the machine"
type CapstanMachineSpec struct {
	// id identifies this machine on its host. The controller sets it before it creates anything and never changes
	// it. A host refuses a known name with another id.
	// +optional
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=36
	// +kubebuilder:validation:Pattern=`^[a-z0-9-]+$`
	ID string `json:"id,omitempty"`

	// providerID is capstan:// followed by the id. The Node has the same providerID.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	ProviderID string `json:"providerID,omitempty"`

	// hostName is the name of the CapstanHost that runs the machine. If empty, the controller chooses a host by
	// failure domain, selectors, taints, the other machines of the cluster, and free processors, memory and disk. It
	// cannot be changed once the machine is placed.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	HostName string `json:"hostName,omitempty"`

	// hostID is the id of the host of hostName, as capstand generated it. The controller sets it during placement.
	// After a move to another management cluster, a CapstanHost of this name can be another host. Capstan then
	// leaves the machine unchanged.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	HostID string `json:"hostID,omitempty"`

	// hostSelector limits the hosts for the machine by label.
	// +optional
	// +kubebuilder:validation:XValidation:rule="(!has(self.matchLabels) || self.matchLabels.size() <= 64) && (!has(self.matchExpressions) || (self.matchExpressions.size() <= 16 && self.matchExpressions.all(e, !has(e.values) || e.values.size() <= 64)))",message="hostSelector may have 64 labels, and 16 expressions with 64 values each"
	HostSelector *metav1.LabelSelector `json:"hostSelector,omitempty"`

	// hostTolerations are the taints of hosts that do not keep the machine off. A toleration gives no access to a host: see
	// spec.allowedNamespaces of the CapstanHost.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	HostTolerations []HostToleration `json:"hostTolerations,omitempty"`

	// image is the name of the machine's root file system on the host, as in status.images of the CapstanHosts. Default: `host`,
	// the host's own /usr. A change replaces the machine.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$`
	Image string `json:"image,omitempty"`

	// cpus is the number of processors of the machine, which its Node reports. Default: all processors of the
	// host. The sum of all machines may exceed the processors of the host.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	CPUs int32 `json:"cpus,omitempty"`

	// memory is the memory limit of the machine, which its Node reports. Default: 2Gi. Minimum: 512Mi. A host
	// accepts machines only up to its memory. Exponents are refused: 1e-2147483647 takes minutes and gigabytes to parse.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!string(self).matches('^[0-9]{1,19}([.][0-9]{1,9})?([kMGTPE]i?)?$') || quantity(string(self)).compareTo(quantity('512Mi')) >= 0",message="memory must be at least 512Mi"
	// +kubebuilder:validation:XValidation:rule="string(self).matches('^[0-9]{1,19}([.][0-9]{1,9})?([kMGTPE]i?)?$')",message="memory must be a number without exponent, with a suffix such as Mi or Gi"
	Memory *resource.Quantity `json:"memory,omitempty"`

	// pidsLimit is the most processes and threads that the machine can have, its pods included. Its kubelet gives each pod a
	// quarter of it at most, and all pods together three quarters. 16384 when not set. A machine that reaches the limit cannot
	// start processes; other machines and the host can.
	// +optional
	// +kubebuilder:validation:Minimum=1024
	// +kubebuilder:validation:Maximum=1048576
	PidsLimit int64 `json:"pidsLimit,omitempty"`

	// disk configures the machine's disk. Once the machine has its id, an update in place can enlarge a disk with a size;
	// nothing can shrink it.
	// +optional
	Disk MachineDiskSpec `json:"disk,omitempty,omitzero"`

	// hostMounts are folders and files of the host in the machine. The machine is placed on a host whose spec.allowedMounts allow all
	// of them for its namespace. Root in the machine is root on the host, so a mount shares files and does not protect them. The list
	// cannot be changed once the machine has its id.
	// +optional
	// +listType=map
	// +listMapKey=path
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:XValidation:rule="self.all(a, !self.exists(b, a.path.startsWith(b.path + '/')))",message="no path of hostMounts can be below another one"
	HostMounts []HostMount `json:"hostMounts,omitempty"`

	// devices are devices of the host in the machine. The machine is placed on a host whose spec.allowedDevices allow all of them for
	// its namespace, and which has enough free CDI devices. The list cannot be changed once the machine has its id.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:XValidation:rule="self.all(d, !d.name.startsWith('/') || !has(d.count))",message="a device node has no count: only CDI devices have one"
	Devices []MachineDevice `json:"devices,omitempty"`

	// network configures the machine's attachment to the network of its cluster.
	// +optional
	Network MachineNetworkSpec `json:"network,omitempty,omitzero"`

	// volumes outlive the machine. The controller gives the machine free CapstanVolumes of its predecessors, or creates new ones,
	// and places it on their host. Once the machine has its id, the list cannot be changed.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:XValidation:rule="self.all(a, self.all(b, a.name == b.name || !(b.path + '/').startsWith(a.path + '/')))",message="the path of a volume must not be that of another volume, or in it"
	Volumes []MachineVolume `json:"volumes,omitempty"`
}

// HostTolerationOperator compares a toleration with a taint.
// +kubebuilder:validation:Enum=Exists;Equal
type HostTolerationOperator string

const (
	// HostTolerationExists tolerates each value of the key.
	HostTolerationExists HostTolerationOperator = "Exists"
	// HostTolerationEqual tolerates the value of the toleration.
	HostTolerationEqual HostTolerationOperator = "Equal"
)

// HostToleration matches taints of hosts, as the toleration of a pod matches taints of Nodes.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="has(self.key) || (has(self.operator) && self.operator == 'Exists')",message="operator must be Exists if key is empty, which tolerates all taints"
// +kubebuilder:validation:XValidation:rule="!has(self.value) || !has(self.operator) || self.operator == 'Equal'",message="value must be empty if operator is Exists"
type HostToleration struct {
	// key is the key of the taints. If empty, the toleration matches all keys.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	Key string `json:"key,omitempty"`

	// operator is Exists, which matches all values, or Equal. Default: Equal.
	// +optional
	Operator HostTolerationOperator `json:"operator,omitempty"`

	// value is the value of the taints, for the operator Equal.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Value string `json:"value,omitempty"`

	// effect is the effect of the taints. If empty, the toleration matches all effects.
	// +optional
	Effect HostTaintEffect `json:"effect,omitempty"`
}

// MachineDiskSpec configures the disk of a machine.
// +kubebuilder:validation:MinProperties=1
type MachineDiskSpec struct {
	// size is the size of the machine's disk. The disk has everything that the machine writes: the data of etcd, container
	// images, the files of pods, and logs. The Node reports the size, less the needs of the file system itself, as its
	// ephemeral-storage. Default: 20Gi. Minimum: 2Gi. Maximum: 64Ti. A disk occupies only its written part on the host:
	// the sum of all machines may exceed the disk of the host, a single machine may not.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!string(self).matches('^[0-9]{1,19}([.][0-9]{1,9})?([kMGTPE]i?)?$') || (quantity(string(self)).compareTo(quantity('2Gi')) >= 0 && quantity(string(self)).compareTo(quantity('64Ti')) <= 0)",message="disk.size must be at least 2Gi and at most 64Ti"
	// +kubebuilder:validation:XValidation:rule="string(self).matches('^[0-9]{1,19}([.][0-9]{1,9})?([kMGTPE]i?)?$')",message="disk.size must be a number without exponent, with a suffix such as Gi"
	Size *resource.Quantity `json:"size,omitempty"`
}

// MachineNetworkSpec configures a machine's attachment to the network of its cluster.
// +kubebuilder:validation:MinProperties=1
type MachineNetworkSpec struct {
	// addressesFromPools names the IPAM pools that provide the machine's addresses, one address from each pool.
	// The first pool must contain addresses of the cluster's machineCIDR. A dual-stack machine has a second pool
	// with addresses of the machineIPv6CIDR. If empty, the controller chooses addresses of these networks.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:XValidation:rule="size(self) < 2 || self[0] != self[1]",message="the two pools must differ: a dual-stack machine needs one IPv4 pool and one IPv6 pool"
	AddressesFromPools []IPPoolReference `json:"addressesFromPools,omitempty"`

	// addresses are the addresses of the machine's interface with their prefix lengths. The controller sets them
	// before it creates the machine, so that they never change.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	Addresses []InterfaceAddress `json:"addresses,omitempty"`
}

// IPPoolReference names an IPAM pool of any provider. The pool is cluster-scoped or in the namespace of the object
// that contains the reference.
type IPPoolReference struct {
	// apiGroup is the API group of the pool, for example ipam.capstan.dev.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	APIGroup string `json:"apiGroup,omitempty"`

	// kind is the kind of the pool, for example CapstanIPPool.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Kind string `json:"kind,omitempty"`

	// name is the name of the pool.
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

	// prefix is the length of the network prefix in bits.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=128
	Prefix int32 `json:"prefix,omitempty"`

	// gateway is the address of the network's router.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="gateway must be an IP address, for example 10.200.8.1"
	Gateway string `json:"gateway,omitempty"`
}

// CapstanMachineStatus is the observed state of a CapstanMachine. It can be rebuilt from the spec and the host.
// +kubebuilder:validation:MinProperties=1
type CapstanMachineStatus struct {
	// conditions describe the current state: Ready, HostAssigned, AddressesAssigned, MachineRunning,
	// BootstrapSucceeded, ServicesHealthy, CertificatesExpiring, Updating, Deleting, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization contains the fields that Cluster API reads during the first provisioning.
	// +optional
	Initialization CapstanMachineInitializationStatus `json:"initialization,omitempty,omitzero"`

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
	Update MachineUpdateStatus `json:"update,omitempty,omitzero"`

	// observedGeneration is the latest generation of this object that the controller processed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// UpdatePhase is the progress or the result of an update in place.
// +kubebuilder:validation:Enum=Pending;Running;Succeeded;Failed;RolledBack
type UpdatePhase string

const (
	// UpdatePending is an update that the host has recorded and not begun.
	UpdatePending UpdatePhase = "Pending"
	// UpdateRunning is an update that the host or the machine carries out.
	UpdateRunning UpdatePhase = "Running"
	// UpdateSucceeded is an update after which the machine is healthy with the desired state.
	UpdateSucceeded UpdatePhase = "Succeeded"
	// UpdateFailed is an update that ended and could not be undone completely.
	UpdateFailed UpdatePhase = "Failed"
	// UpdateRolledBack is an update that was undone: the machine has its previous state.
	UpdateRolledBack UpdatePhase = "RolledBack"
)

// MachineUpdateStatus is the state of an update of a machine in place.
// +kubebuilder:validation:MinProperties=1
type MachineUpdateStatus struct {
	// id identifies the update. It depends on everything that the update sets.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	ID string `json:"id,omitempty"`

	// phase is the progress or the result.
	// +optional
	Phase UpdatePhase `json:"phase,omitempty"`

	// step is the step that runs, or the step that failed.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	Step string `json:"step,omitempty"`

	// message describes the progress, or the cause of a failure.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`

	// startTime is the time at which the host recorded the update.
	// +optional
	StartTime metav1.Time `json:"startTime,omitempty,omitzero"`

	// completionTime is the time at which the update ended.
	// +optional
	CompletionTime metav1.Time `json:"completionTime,omitempty,omitzero"`

	// kubernetesVersion is the Kubernetes version that the update sets.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`

	// configUpdateID is status.update.id of the CapstanConfig that the update applies.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	ConfigUpdateID string `json:"configUpdateID,omitempty"`

	// observedGeneration is the generation of the CapstanMachine whose spec the update sets.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// CapstanMachineInitializationStatus contains the fields that Cluster API reads during the first provisioning.
// +kubebuilder:validation:MinProperties=1
type CapstanMachineInitializationStatus struct {
	// provisioned is true when the machine runs.
	// +optional
	Provisioned *bool `json:"provisioned,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanmachines,shortName=capm,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta1=v1beta1","cluster.x-k8s.io/v1beta2=v1beta2"}
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

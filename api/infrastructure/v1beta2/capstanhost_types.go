package v1beta2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// HostCredentialsLabel marks Secrets with credentials of hosts. The controller sets it when the host becomes the
// owner of the Secret.
const HostCredentialsLabel = "infrastructure.capstan.dev/host-credentials"

// MaxUnknownMachines is how many machines status.unknownMachines lists.
const MaxUnknownMachines = 100

// CapstanHostSpec is the desired state of a CapstanHost.
// +kubebuilder:validation:XValidation:rule="self.address.startsWith('unix:') || has(self.credentialsRef)",message="credentialsRef is required for an address of the form host:port: capstand serves TCP with mutual TLS only"
type CapstanHostSpec struct {
	// address is the address of the host's capstand: unix:///path for a socket on the same box, or host:port for
	// TCP with mutual TLS.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self.matches('^(unix:///.+|[^/:]+:[0-9]{1,5}|\\\\[[0-9a-fA-F:]+\\\\]:[0-9]{1,5})$')",message="address must be unix:///path/to/socket or host:port"
	Address string `json:"address,omitempty"`

	// credentialsRef names the Secret with the keys ca.crt, tls.crt and tls.key for mutual TLS. Required for an
	// address of the form host:port. The host becomes an owner of the Secret, so that clusterctl moves both.
	// +optional
	CredentialsRef SecretReference `json:"credentialsRef,omitempty,omitzero"`

	// allowedNamespaces selects the namespaces whose clusters may use the host. If not set, all namespaces may use
	// it. If it selects nothing, no namespace may use it.
	// +optional
	AllowedNamespaces *AllowedNamespaces `json:"allowedNamespaces,omitempty"`

	// failureDomain is the name of the unit that fails together with the host, for example a rack or a power
	// circuit. Default: the name of the host.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	FailureDomain string `json:"failureDomain,omitempty"`

	// controlPlane allows control plane machines on the host. Default: true.
	// +optional
	ControlPlane *bool `json:"controlPlane,omitempty"`

	// unschedulable prevents new machines on the host. Existing machines continue. Default: false.
	// +optional
	Unschedulable *bool `json:"unschedulable,omitempty"`
}

// SecretReference names a Secret.
type SecretReference struct {
	// name is the name of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// namespace is the namespace of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
}

// AllowedNamespaces selects namespaces by name or by label. A namespace is allowed if either selects it.
// +kubebuilder:validation:MinProperties=1
type AllowedNamespaces struct {
	// names lists allowed namespaces.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	Names []string `json:"names,omitempty"`

	// selector selects allowed namespaces by label.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// CapstanHostStatus is the observed state of a CapstanHost.
// +kubebuilder:validation:MinProperties=1
type CapstanHostStatus struct {
	// conditions describe the current state: Ready, Connected, Deleting, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// capacity is the cpu and memory of the host that machines can use, and as ephemeral-storage the size of the file system
	// that has their disks.
	// +optional
	Capacity corev1.ResourceList `json:"capacity,omitempty"`

	// allocatable is the part of the capacity that is not used. The ephemeral-storage is what the sizes of all disks leave. It
	// is 0 if they exceed the capacity: disks occupy only what was written to them, so the host still accepts machines.
	// +optional
	Allocatable corev1.ResourceList `json:"allocatable,omitempty"`

	// diskBackend is how the host limits the disks of machines. Image: each disk is an ext4 file system in a sparse file, on a
	// loop device. None: the host cannot limit disks, and each machine can fill the disk of the host; `capstan doctor` on the
	// host has the cause.
	// +optional
	DiskBackend DiskBackend `json:"diskBackend,omitempty"`

	// machines is the number of machines on the host, including machines of other management clusters.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Machines *int32 `json:"machines,omitempty"`

	// versions lists the Kubernetes versions that the host can run.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=64
	Versions []string `json:"versions,omitempty"`

	// nodeInfo contains the architecture and operating system of the host.
	// +optional
	NodeInfo NodeInfo `json:"nodeInfo,omitempty,omitzero"`

	// boxID identifies the Linux box of the host. All hosts on one box have the same boxID. All machines of a
	// cluster are placed on hosts of one box, because the cluster's network does not leave it. A host without a
	// boxID is treated as a host of any box.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	BoxID string `json:"boxID,omitempty"`

	// unknownMachines are machines on the host that belong to this management cluster and have no
	// CapstanMachine, as after the restore of an old etcd; the first 100 by id. They run on, and their addresses are not
	// given to others. Capstan does not remove them: see the annotation infrastructure.capstan.dev/prune.
	// +optional
	// +listType=map
	// +listMapKey=id
	// +kubebuilder:validation:MaxItems=100
	UnknownMachines []UnknownMachine `json:"unknownMachines,omitempty"`

	// observedGeneration is the latest generation of this object that the controller processed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// DiskBackend is how a host limits the disks of machines.
// +kubebuilder:validation:Enum=Image;None
type DiskBackend string

// Backends of a host for the disks of its machines.
const (
	// DiskBackendImage: each disk is an ext4 file system in a sparse file, on a loop device.
	DiskBackendImage DiskBackend = "Image"
	// DiskBackendNone: the disks of machines have no limit.
	DiskBackendNone DiskBackend = "None"
)

// UnknownMachine is a machine without a CapstanMachine.
type UnknownMachine struct {
	// id of the machine on its host.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ID string `json:"id,omitempty"`

	// namespace of the CapstanMachine that it was made for.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`

	// name of the CapstanMachine that it was made for.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// cluster is the name of its Cluster.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Cluster string `json:"cluster,omitempty"`

	// addresses of the machine.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=39
	Addresses []string `json:"addresses,omitempty"`

	// since is when the controller first saw that the machine has no CapstanMachine.
	// +required
	Since metav1.Time `json:"since,omitempty,omitzero"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanhosts,shortName=caph,scope=Cluster,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta2"
// +kubebuilder:subresource:status
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io/move-hierarchy="
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The host is connected and accepts machines"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Reason"
// +kubebuilder:printcolumn:name="Domain",type="string",JSONPath=".spec.failureDomain",description="Failure domain"
// +kubebuilder:printcolumn:name="Machines",type="integer",JSONPath=".status.machines",description="Machines on the host"
// +kubebuilder:printcolumn:name="Memory",type="string",JSONPath=".status.capacity.memory",description="Memory for machines"
// +kubebuilder:printcolumn:name="Free",type="string",JSONPath=".status.allocatable.memory",description="Free memory"
// +kubebuilder:printcolumn:name="Disk",type="string",JSONPath=".status.capacity.ephemeral-storage",description="Size of the file system for machines' disks",priority=10
// +kubebuilder:printcolumn:name="Versions",type="string",JSONPath=".status.versions",description="Kubernetes versions",priority=10
// +kubebuilder:printcolumn:name="Address",type="string",JSONPath=".spec.address",description="capstand's address",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanHost is a Linux host whose capstand runs machines. It is cluster-scoped, because namespaces share hosts.
type CapstanHost struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the host.
	// +required
	Spec CapstanHostSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the host.
	// +optional
	Status CapstanHostStatus `json:"status,omitempty,omitzero"`
}

// GetConditions returns the conditions.
func (h *CapstanHost) GetConditions() []metav1.Condition { return h.Status.Conditions }

// SetConditions sets the conditions.
func (h *CapstanHost) SetConditions(conditions []metav1.Condition) { h.Status.Conditions = conditions }

// +kubebuilder:object:root=true

// CapstanHostList is a list of CapstanHosts.
type CapstanHostList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanHosts.
	Items []CapstanHost `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanHost{}, &CapstanHostList{}) }

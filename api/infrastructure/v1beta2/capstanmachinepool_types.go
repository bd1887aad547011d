package v1beta2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

const (
	// MachinePoolFinalizer keeps a CapstanMachinePool until its machines are gone.
	MachinePoolFinalizer = "infrastructure.capstan.dev/capstanmachinepool"

	// MachinePoolLabel on a CapstanMachine has the name of the CapstanMachinePool that made it, as
	// Cluster API's format.MustFormatValue shortens it.
	MachinePoolLabel = "infrastructure.capstan.dev/machine-pool"

	// PoolProviderIDPrefix starts the providerID of every pool; the pool's id follows.
	PoolProviderIDPrefix = "capstan-pool://"

	// MachineKind is what status.infrastructureMachineKind of every pool says (MP-02).
	MachineKind = "CapstanMachine"

	// MaxPoolInstances is how many instances status.instances lists, the first ones by name: an
	// object of the API server cannot hold many thousands of them. spec.providerIDList has all.
	MaxPoolInstances = 1000
)

// What a pool's CapstanMachine is made with. The pool's controller writes these annotations once, when it
// creates the CapstanMachine, so that a machine that starts late is what it was planned to be
// even if the pool has changed by then. Core gives the Machine of a pool no version, no
// bootstrap data and no failure domain.
const (
	// MachineVersionAnnotation is the Kubernetes version of the machine.
	MachineVersionAnnotation = "infrastructure.capstan.dev/version"
	// MachineBootstrapSecretAnnotation is the name of the Secret with its bootstrap data.
	MachineBootstrapSecretAnnotation = "infrastructure.capstan.dev/bootstrap-data-secret"
	// MachineFailureDomainAnnotation is the failure domain in which it is placed; any when absent.
	MachineFailureDomainAnnotation = "infrastructure.capstan.dev/failure-domain"
	// MachineSpecHashAnnotation is a hash of the pool's machine spec, the version and the name of the
	// bootstrap Secret. A machine with another hash than the pool's is outdated.
	MachineSpecHashAnnotation = "infrastructure.capstan.dev/machine-spec-hash"
	// MachineTemplateMetadataAnnotation names the labels and annotations that the machine has from the
	// pool's template, so that what is removed there is removed from the machine.
	MachineTemplateMetadataAnnotation = "infrastructure.capstan.dev/template-metadata"
)

// DeletePolicy says which machines of a pool are deleted first.
// +kubebuilder:validation:Enum=Oldest;Newest;Random
type DeletePolicy string

const (
	// OldestDeletePolicy deletes the machine that was created first.
	OldestDeletePolicy DeletePolicy = "Oldest"
	// NewestDeletePolicy deletes the machine that was created last.
	NewestDeletePolicy DeletePolicy = "Newest"
	// RandomDeletePolicy deletes any machine.
	RandomDeletePolicy DeletePolicy = "Random"
)

// CapstanMachinePoolSpec is the desired state of a CapstanMachinePool.
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(self.id) && self.id == oldSelf.id)",message="id is written once by the controller and cannot be changed"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.providerID) || (has(self.providerID) && self.providerID == oldSelf.providerID)",message="providerID cannot be changed once it is set"
type CapstanMachinePoolSpec struct {
	// id is the identity of this pool. The controller writes it before it makes the first machine and
	// never changes it.
	// +optional
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=36
	// +kubebuilder:validation:Pattern=`^[a-z0-9-]+$`
	ID string `json:"id,omitempty"`

	// providerID is capstan-pool:// and the id (MP-03). Written by the controller.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	ProviderID string `json:"providerID,omitempty"`

	// providerIDList are the providerIDs of the pool's machines, sorted; each is there from the moment
	// when its machine has it until the machine is gone, so that core deletes no Node before it
	// was drained (MP-04). Written by the controller.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=10000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=512
	ProviderIDList []string `json:"providerIDList,omitempty"`

	// replicas is the number of machines while the MachinePool carries the annotation
	// cluster.x-k8s.io/replicas-managed-by; whoever manages the replicas sets it, for example
	// through the scale subresource, and the controller copies it to the MachinePool. Without the
	// annotation it means nothing: the MachinePool's spec.replicas counts.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	Replicas *int32 `json:"replicas,omitempty"`

	// machineTemplate is what the pool's CapstanMachines are made from. A change of its spec replaces
	// the machines by a rolling update; its metadata reaches them in place.
	// +optional
	MachineTemplate CapstanMachinePoolMachineTemplate `json:"machineTemplate,omitempty,omitzero"`

	// rollingUpdate limits how machines are replaced.
	// +optional
	RollingUpdate MachinePoolRollingUpdate `json:"rollingUpdate,omitempty,omitzero"`

	// deletePolicy says which machine goes first when the pool shrinks or is updated. Oldest when not
	// set. Before it counts: machines with the annotation cluster.x-k8s.io/delete-machine,
	// failed ones, outdated ones, and those whose Node is not ready.
	// +optional
	DeletePolicy DeletePolicy `json:"deletePolicy,omitempty"`
}

// CapstanMachinePoolMachineTemplate is what the CapstanMachines of a pool are made from.
// +kubebuilder:validation:MinProperties=1
type CapstanMachinePoolMachineTemplate struct {
	// metadata is the labels and annotations of the CapstanMachines.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the CapstanMachines.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!has(self.id) && !has(self.providerID) && !has(self.hostName) && !has(self.hostID)",message="id, providerID, hostName and hostID belong to one machine and cannot be set for a pool"
	// +kubebuilder:validation:XValidation:rule="!has(self.network) || !has(self.network.addresses)",message="network.addresses belong to one machine and cannot be set for a pool: use network.addressesFromPools"
	Spec CapstanMachineSpec `json:"spec,omitempty,omitzero"`
}

// MachinePoolRollingUpdate limits how the machines of a pool are replaced.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.maxSurge) || !(string(self.maxSurge) in ['0', '0%']) || (has(self.maxUnavailable) && !(string(self.maxUnavailable) in ['0', '0%']))",message="maxSurge and maxUnavailable cannot both be 0 (maxUnavailable is 0 when not set): no machine could ever be replaced"
type MachinePoolRollingUpdate struct {
	// maxSurge is how many machines the pool may have above its replicas while machines are replaced:
	// a number, or a percentage of the replicas, rounded up. Machines that are being deleted
	// count until they are gone. 1 when not set.
	// +optional
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? self >= 0 && self <= 10000 : string(self).matches('^([0-9]|[1-9][0-9]|100)%$')",message="must be a number from 0 to 10000, or a percentage from 0% to 100%"
	MaxSurge *intstr.IntOrString `json:"maxSurge,omitempty"`

	// maxUnavailable is how many machines may be missing or not available while machines are
	// replaced: a number, or a percentage of the replicas, rounded down. 0 when not set. If both
	// come to 0, it counts as 1.
	// +optional
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? self >= 0 && self <= 10000 : string(self).matches('^([0-9]|[1-9][0-9]|100)%$')",message="must be a number from 0 to 10000, or a percentage from 0% to 100%"
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
}

// CapstanMachinePoolStatus is the observed state of a CapstanMachinePool. All of it can be rebuilt from
// the spec and the pool's CapstanMachines (ALL-12).
// +kubebuilder:validation:MinProperties=1
type CapstanMachinePoolStatus struct {
	// conditions are the observations of the pool's current state: Ready, ScalingUp, ScalingDown,
	// RollingOut, Deleting, Paused (MP-06, MP-07).
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization holds the observations that orchestrate the first provisioning.
	// +optional
	Initialization CapstanMachinePoolInitializationStatus `json:"initialization,omitempty,omitzero"`

	// ready is true once the pool was provisioned, as initialization.provisioned; this is the
	// one that core reads (MP-05). It does not become false again: core would then stop to follow
	// providerIDList. The Ready condition tells how the pool is now.
	// +optional
	Ready *bool `json:"ready,omitempty"`

	// replicas is the number of machines that the pool has: the length of spec.providerIDList (MP-08).
	// +optional
	// +kubebuilder:validation:Minimum=0
	Replicas *int32 `json:"replicas,omitempty"`

	// readyReplicas is the number of machines that are available: their Nodes have been ready for the
	// MachinePool's minReadySeconds.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ReadyReplicas *int32 `json:"readyReplicas,omitempty"`

	// upToDateReplicas is the number of machines that are as the pool's spec, version and
	// bootstrap data say.
	// +optional
	// +kubebuilder:validation:Minimum=0
	UpToDateReplicas *int32 `json:"upToDateReplicas,omitempty"`

	// selector selects the pool's Machines and CapstanMachines, for the scale subresource.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Selector string `json:"selector,omitempty"`

	// infrastructureMachineKind is the kind of the objects behind the pool's Machines (MP-02).
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	InfrastructureMachineKind string `json:"infrastructureMachineKind,omitempty"`

	// instances are the machines of the pool (MP-01), sorted by name; the first 1000, if there are more.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1000
	Instances []CapstanMachinePoolInstanceStatus `json:"instances,omitempty"`

	// capacity is the resources of one machine of the pool, for autoscalers that scale from zero.
	// +optional
	Capacity corev1.ResourceList `json:"capacity,omitempty"`

	// nodeInfo is the architecture and operating system of the pool's machines.
	// +optional
	NodeInfo NodeInfo `json:"nodeInfo,omitempty,omitzero"`

	// observedGeneration is the latest generation that the controller has seen.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// CapstanMachinePoolInitializationStatus holds the observations that orchestrate the first provisioning.
// +kubebuilder:validation:MinProperties=1
type CapstanMachinePoolInitializationStatus struct {
	// provisioned is true once all replicas that the pool was made with have run (MP-05).
	// +optional
	Provisioned *bool `json:"provisioned,omitempty"`
}

// CapstanMachinePoolInstanceStatus is what is known of one machine of a pool (MP-01).
type CapstanMachinePoolInstanceStatus struct {
	// addresses of the machine.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Addresses []clusterv1.MachineAddress `json:"addresses,omitempty"`

	// instanceName is the name of the CapstanMachine.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	InstanceName string `json:"instanceName,omitempty"`

	// providerID of the machine.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	ProviderID string `json:"providerID,omitempty"`

	// version is the machine's Kubernetes version.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Version string `json:"version,omitempty"`

	// ready is true while the machine is available.
	// +required
	Ready *bool `json:"ready,omitempty"`
}

// Conditions of a CapstanMachinePool: Ready, ScalingUp, ScalingDown, RollingOut, Deleting and Paused, as
// Cluster API names them.
const (
	// PoolReadyReason: all machines are there, available and up to date.
	PoolReadyReason = "Ready"
	// PoolNotReadyReason: machines are missing, outdated or not available; the message counts them.
	PoolNotReadyReason = "NotReady"

	// PoolInvalidReplicasReason: the number of replicas is negative or above 10000. Nothing is
	// changed until it is mended (MP-09).
	PoolInvalidReplicasReason = "InvalidReplicas"
	// PoolInvalidFailureDomainReason: the MachinePool names a failure domain that the Cluster does not
	// have. Nothing is changed until it is mended (MP-09).
	PoolInvalidFailureDomainReason = "InvalidFailureDomain"
	// PoolInvalidVersionReason: the MachinePool has no version, or one that cannot be read. Nothing is
	// changed until it is mended (MP-09).
	PoolInvalidVersionReason = "InvalidVersion"
	// PoolVersionNotAvailableReason: no host that the pool may use can run the version. Nothing is
	// changed until one can (MP-09).
	PoolVersionNotAvailableReason = "VersionNotAvailable"
	// PoolChangeFailedReason: machines could not be created, changed or deleted; the message says why. It is tried again.
	PoolChangeFailedReason = "ChangeFailed"
	// PoolInvalidRollingUpdateReason: maxSurge or maxUnavailable cannot be used (MP-09).
	PoolInvalidRollingUpdateReason = "InvalidRollingUpdate"

	// WaitingForMachinePoolReason: no MachinePool owns the CapstanMachinePool yet.
	WaitingForMachinePoolReason = "WaitingForMachinePool"
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanmachinepools,shortName=capmp,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta2"
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="MachinePool",type="string",JSONPath=".metadata.ownerReferences[?(@.kind==\"MachinePool\")].name",description="MachinePool that owns this one",priority=10
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="All machines are there, available and up to date"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Why"
// +kubebuilder:printcolumn:name="Replicas",type="integer",JSONPath=".status.replicas",description="Machines"
// +kubebuilder:printcolumn:name="Available",type="integer",JSONPath=".status.readyReplicas",description="Machines that are available"
// +kubebuilder:printcolumn:name="UpToDate",type="integer",JSONPath=".status.upToDateReplicas",description="Machines that are up to date"
// +kubebuilder:printcolumn:name="ProviderID",type="string",JSONPath=".spec.providerID",description="Provider ID of the pool",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanMachinePool is a number of equal machines, each of them a CapstanMachine with a Machine of its
// own (MP-02). It is referenced by a MachinePool.
type CapstanMachinePool struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the pool.
	// +optional
	Spec CapstanMachinePoolSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the pool.
	// +optional
	Status CapstanMachinePoolStatus `json:"status,omitempty,omitzero"`
}

// GetConditions returns the conditions.
func (p *CapstanMachinePool) GetConditions() []metav1.Condition { return p.Status.Conditions }

// SetConditions sets the conditions.
func (p *CapstanMachinePool) SetConditions(conditions []metav1.Condition) {
	p.Status.Conditions = conditions
}

// +kubebuilder:object:root=true

// CapstanMachinePoolList is a list of CapstanMachinePools.
type CapstanMachinePoolList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanMachinePools.
	Items []CapstanMachinePool `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanMachinePool{}, &CapstanMachinePoolList{}) }

package v1beta2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

const (
	// MachinePoolFinalizer keeps a CapstanMachinePool until its machines are removed.
	MachinePoolFinalizer = "infrastructure.capstan.dev/capstanmachinepool"

	// MachinePoolLabel on a CapstanMachine contains the name of its CapstanMachinePool, shortened with Cluster
	// API's format.MustFormatValue.
	MachinePoolLabel = "infrastructure.capstan.dev/machine-pool"

	// PoolProvisionedAnnotation on a CapstanMachinePool records status.initialization.provisioned. It survives a move or a
	// restore, which lose the status.
	PoolProvisionedAnnotation = "infrastructure.capstan.dev/provisioned"

	// PoolReplicasCopiedAnnotation on a CapstanMachinePool states that the controller copied spec.replicas from the MachinePool, when
	// that got the annotation cluster.x-k8s.io/replicas-managed-by. The controller removes both when the MachinePool has lost it.
	PoolReplicasCopiedAnnotation = "infrastructure.capstan.dev/replicas-copied"

	// PoolProviderIDPrefix is the prefix of every pool's providerID. The pool's id follows.
	PoolProviderIDPrefix = "capstan-pool://"

	// MaxPoolInstances is the maximum number of entries in status.instances, because the size of an object in the
	// API server is limited. The first instances by name are listed. spec.providerIDList contains all of them.
	MaxPoolInstances = 1000
)

// Annotations that describe a pool's CapstanMachine. The pool's controller writes the plan of a machine when it creates the
// CapstanMachine, so that a machine that starts late matches its plan even if the pool has changed: the version, the Secret, the
// failure domain and the hash. Cluster API core gives the Machine of a pool no version, no bootstrap data and no failure domain. An
// update in place writes the version, the Secret and the hash of the new plan. The annotations have no effect on other CapstanMachines.
const (
	// MachineVersionAnnotation is the Kubernetes version of the machine.
	MachineVersionAnnotation = "infrastructure.capstan.dev/version"
	// MachineBootstrapSecretAnnotation is the name of the Secret with the machine's bootstrap data.
	MachineBootstrapSecretAnnotation = "infrastructure.capstan.dev/bootstrap-data-secret"
	// MachineFailureDomainAnnotation is the failure domain for the placement of the machine. If absent, every
	// failure domain is possible.
	MachineFailureDomainAnnotation = "infrastructure.capstan.dev/failure-domain"
	// MachineSpecHashAnnotation is a hash of the pool's machine spec, the version and the name of the bootstrap
	// Secret. A machine is outdated if its hash differs from the pool's hash.
	MachineSpecHashAnnotation = "infrastructure.capstan.dev/machine-spec-hash"
	// MachineDrainAnnotation is on a CapstanMachine of a pool whose Node is drained for an update in place. The Node is made
	// schedulable again before the annotation is removed.
	MachineDrainAnnotation = "infrastructure.capstan.dev/drained-for-update"
	// MachineConfigAnnotation contains digests of the parts of the CapstanConfig that an update in place cannot change.
	// Updates in place write it again.
	MachineConfigAnnotation = "infrastructure.capstan.dev/config-digests"
	// MachineTemplateMetadataAnnotation lists the labels and annotations that the machine received from the pool's
	// template. The controller removes them from the machine when they are removed from the template.
	MachineTemplateMetadataAnnotation = "infrastructure.capstan.dev/template-metadata"
)

// DeletePolicy selects the machines of a pool that are deleted first.
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

// InPlacePolicy selects between updates of existing machines and their replacement.
// +kubebuilder:validation:Enum=Never;Prefer;Only
type InPlacePolicy string

const (
	// InPlaceNever replaces outdated machines.
	InPlaceNever InPlacePolicy = "Never"
	// InPlacePrefer updates an outdated machine in place if every change can be made in place. Otherwise it replaces the
	// machine.
	InPlacePrefer InPlacePolicy = "Prefer"
	// InPlaceOnly updates outdated machines in place. A change that needs another machine stops the rollout.
	InPlaceOnly InPlacePolicy = "Only"
)

// CapstanMachinePoolSpec is the desired state of a CapstanMachinePool.
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.id) || (has(self.id) && self.id == oldSelf.id)",message="id is written once by the controller and cannot be changed"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.providerID) || (has(self.providerID) && self.providerID == oldSelf.providerID)",message="providerID cannot be changed once it is set"
type CapstanMachinePoolSpec struct {
	// id identifies this pool. The controller sets it before it creates the first machine and never changes it.
	// +optional
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=36
	// +kubebuilder:validation:Pattern=`^[a-z0-9-]+$`
	ID string `json:"id,omitempty"`

	// providerID is capstan-pool:// followed by the id. The controller sets it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	ProviderID string `json:"providerID,omitempty"`

	// providerIDList contains the sorted providerIDs of the pool's machines. A providerID is listed from the
	// moment when its machine receives it until the machine is removed, so that core deletes no Node before it is
	// drained. The controller sets it. Maximum: 10000.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=10000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=512
	ProviderIDList []string `json:"providerIDList,omitempty"`

	// replicas is the number of machines while the MachinePool has the annotation
	// cluster.x-k8s.io/replicas-managed-by. The external autoscaler sets it, for example through the scale
	// subresource, and the controller copies it to the MachinePool. Without the annotation this field is ignored
	// and the MachinePool's spec.replicas applies.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	Replicas *int32 `json:"replicas,omitempty"`

	// machineTemplate describes the pool's CapstanMachines. A change of its spec replaces the machines with a
	// rolling update, or updates them in place as rollingUpdate.inPlace selects. A change of its metadata is applied
	// in place.
	// +optional
	MachineTemplate CapstanMachinePoolMachineTemplate `json:"machineTemplate,omitempty,omitzero"`

	// rollingUpdate limits the replacement of machines and selects updates in place.
	// +optional
	RollingUpdate MachinePoolRollingUpdate `json:"rollingUpdate,omitempty,omitzero"`

	// deletePolicy selects the machines that are deleted first when the pool shrinks or is updated. Default:
	// Oldest. The following machines precede this policy: machines whose Machine has the annotation
	// cluster.x-k8s.io/delete-machine, failed machines, outdated machines, and machines whose Node is not ready.
	// +optional
	DeletePolicy DeletePolicy `json:"deletePolicy,omitempty"`
}

// CapstanMachinePoolMachineTemplate describes the CapstanMachines of a pool.
// +kubebuilder:validation:MinProperties=1
type CapstanMachinePoolMachineTemplate struct {
	// metadata contains the labels and annotations of the CapstanMachines.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the CapstanMachines.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!has(self.id) && !has(self.providerID) && !has(self.hostName) && !has(self.hostID)",message="id, providerID, hostName and hostID identify one machine and cannot be set for a pool"
	// +kubebuilder:validation:XValidation:rule="!has(self.network) || !has(self.network.addresses)",message="network.addresses apply to one machine and cannot be set for a pool: use network.addressesFromPools"
	Spec CapstanMachineSpec `json:"spec,omitempty,omitzero"`
}

// MachinePoolRollingUpdate limits the replacement of a pool's machines and selects updates in place.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.maxSurge) || !(string(self.maxSurge) in ['0', '0%']) || (has(self.maxUnavailable) && !(string(self.maxUnavailable) in ['0', '0%']))",message="maxSurge and maxUnavailable cannot both be 0 (the default of maxUnavailable is 0): no machine could be replaced"
type MachinePoolRollingUpdate struct {
	// maxSurge is the number of machines above the pool's replicas during a replacement: a number, or a percentage
	// of the replicas, rounded up. Machines that are being deleted count until they are removed. Default: 1.
	// +optional
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? self >= 0 && self <= 10000 : string(self).matches('^([0-9]|[1-9][0-9]|100)%$')",message="must be a number from 0 to 10000, or a percentage from 0% to 100%"
	MaxSurge *intstr.IntOrString `json:"maxSurge,omitempty"`

	// maxUnavailable is the number of machines that may be missing or not available during a replacement: a
	// number, or a percentage of the replicas, rounded down. Default: 0. If maxSurge and maxUnavailable are both
	// rounded to 0, maxUnavailable is 1.
	// +optional
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? self >= 0 && self <= 10000 : string(self).matches('^([0-9]|[1-9][0-9]|100)%$')",message="must be a number from 0 to 10000, or a percentage from 0% to 100%"
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`

	// inPlace selects between updates in place and replacement. Never (default) replaces outdated machines. Prefer
	// updates a machine in place if every change can be made in place, and replaces it otherwise. Only never
	// replaces an outdated machine: a change that needs another machine stops the rollout, and the condition
	// Updating names the field. maxUnavailable machines are updated at once, and at least one.
	// +optional
	InPlace InPlacePolicy `json:"inPlace,omitempty"`

	// drainBeforeUpdate drains the Node and waits for the detachment of its volumes before an update in place. The
	// timeouts in spec.template.spec.deletion of the MachinePool apply. Default: false, pods keep running during the
	// update.
	// +optional
	DrainBeforeUpdate *bool `json:"drainBeforeUpdate,omitempty"`
}

// CapstanMachinePoolStatus is the observed state of a CapstanMachinePool. It can be rebuilt from the spec and the
// pool's CapstanMachines.
// +kubebuilder:validation:MinProperties=1
type CapstanMachinePoolStatus struct {
	// conditions describe the current state: Ready, ScalingUp, ScalingDown, RollingOut, Updating, Deleting, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization contains the fields that Cluster API reads during the first provisioning.
	// +optional
	Initialization CapstanMachinePoolInitializationStatus `json:"initialization,omitempty,omitzero"`

	// ready is true once the pool was provisioned, as initialization.provisioned is. Cluster API core reads this
	// field. It never becomes false again, because core would then stop to follow providerIDList. The condition
	// Ready describes the current state.
	// +optional
	Ready *bool `json:"ready,omitempty"`

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
	Instances []CapstanMachinePoolInstanceStatus `json:"instances,omitempty"`

	// capacity contains the resources of one machine of the pool, for autoscalers that scale from zero.
	// +optional
	Capacity corev1.ResourceList `json:"capacity,omitempty"`

	// nodeInfo contains the architecture and operating system of the pool's machines.
	// +optional
	NodeInfo NodeInfo `json:"nodeInfo,omitempty,omitzero"`

	// observedGeneration is the latest generation of this object that the controller processed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// CapstanMachinePoolInitializationStatus contains the fields that Cluster API reads during the first provisioning.
// +kubebuilder:validation:MinProperties=1
type CapstanMachinePoolInitializationStatus struct {
	// provisioned is true once all initial replicas of the pool have run.
	// +optional
	Provisioned *bool `json:"provisioned,omitempty"`
}

// CapstanMachinePoolInstanceStatus describes one machine of a pool.
type CapstanMachinePoolInstanceStatus struct {
	// addresses are the addresses of the machine.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Addresses []clusterv1.MachineAddress `json:"addresses,omitempty"`

	// instanceName is the name of the CapstanMachine.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	InstanceName string `json:"instanceName,omitempty"`

	// providerID is the providerID of the machine.
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

// Conditions of a CapstanMachinePool: Ready, ScalingUp, ScalingDown, RollingOut, Updating, Deleting and Paused, as
// Cluster API names them.
const (
	// PoolReadyReason: the desired number of machines is available, and the spec is valid.
	PoolReadyReason = "Ready"
	// PoolNotReadyReason: machines are missing or not available. The message contains their numbers.
	PoolNotReadyReason = "NotReady"

	// PoolInvalidReplicasReason: the number of replicas is negative or above 10000. The pool changes nothing until
	// it is corrected.
	PoolInvalidReplicasReason = "InvalidReplicas"
	// PoolInvalidFailureDomainReason: the MachinePool names failure domains, and the Cluster has none of them. The
	// pool creates and replaces nothing until it is corrected.
	PoolInvalidFailureDomainReason = "InvalidFailureDomain"
	// PoolInvalidVersionReason: the MachinePool has no valid version. The pool creates and replaces nothing until
	// it is corrected.
	PoolInvalidVersionReason = "InvalidVersion"
	// PoolVersionNotAvailableReason: no host that the pool may use can run the version. The pool creates and
	// replaces nothing until a host can.
	PoolVersionNotAvailableReason = "VersionNotAvailable"
	// PoolWaitingForControlPlaneReason: a control plane machine has an older minor version than the pool. The pool
	// creates and replaces nothing until the control plane is upgraded.
	PoolWaitingForControlPlaneReason = "WaitingForControlPlane"
	// PoolChangeFailedReason: machines could not be created, changed or deleted. The message contains the cause.
	// The controller retries.
	PoolChangeFailedReason = "ChangeFailed"
	// PoolInvalidRollingUpdateReason: maxSurge or maxUnavailable is invalid.
	PoolInvalidRollingUpdateReason = "InvalidRollingUpdate"
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanmachinepools,shortName=capmp,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta1=v1beta1","cluster.x-k8s.io/v1beta2=v1beta2"}
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

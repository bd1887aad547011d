package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

const (
	// ControlPlaneFinalizer lets the reconciler remove the control plane machines, after the
	// workers, before the object goes.
	ControlPlaneFinalizer = "capstancontrolplane.controlplane.capstan.dev"

	// DefaultKubeconfigValidityDays is how long the kubeconfig's client certificate is valid.
	DefaultKubeconfigValidityDays = 365

	// PreTerminateHookAnnotation is on every Machine from the beginning: before the machine goes its etcd
	// member leaves, whoever deletes the Machine.
	PreTerminateHookAnnotation = clusterv1.PreTerminateDeleteHookAnnotationPrefix + "/capstan-etcd"

	// InitializedAnnotation is on a control plane whose API server has answered once. It says so also after a
	// move or a restore of the management cluster, which lose the status: from then on there is data to lose.
	InitializedAnnotation = "controlplane.capstan.dev/initialized"

	// RemediationInProgressAnnotation is on a control plane while an unhealthy Machine goes, until another
	// one is made; RemediationForAnnotation is on that one. They hold the history that retries are limited by.
	RemediationInProgressAnnotation = "controlplane.capstan.dev/remediation-in-progress"
	RemediationForAnnotation        = "controlplane.capstan.dev/remediation-for"

	// DefaultMinHealthyPeriodSeconds is after how long a failure counts as a new one.
	DefaultMinHealthyPeriodSeconds = 3600

	// DefaultMachineNamingTemplate of Machines, infrastructure machines and CapstanConfigs.
	DefaultMachineNamingTemplate = "{{ .capstanControlPlane.name }}-{{ .random }}"
)

// Conditions of a CapstanControlPlane and their reasons (CP-10). Available, MachinesReady,
// MachinesUpToDate, RollingOut, ScalingUp, ScalingDown, Remediating, Deleting and Paused are those
// of Cluster API.
const (
	// AvailableCondition: the API server answers, certificates are there, enough machines work.
	AvailableCondition = clusterv1.AvailableCondition
	// InitializedCondition: the API server has answered through the endpoint (CP-09).
	InitializedCondition = "Initialized"
	// CertificatesAvailableCondition: every certificate authority and the encryption key are there.
	CertificatesAvailableCondition = "CertificatesAvailable"
	// KubeconfigAvailableCondition: the kubeconfig secret is there and valid.
	KubeconfigAvailableCondition = "KubeconfigAvailable"
	// KubeconfigRefusedReason: the kubeconfig secret is not the control plane's own, and contains a field that managers
	// do not accept. The message names the field.
	KubeconfigRefusedReason = "KubeconfigRefused"
	// EtcdClusterHealthyCondition: every voting member of etcd works. Its reason is QuorumLost when there is no
	// majority.
	EtcdClusterHealthyCondition = "EtcdClusterHealthy"
	// ControlPlaneComponentsHealthyCondition: the API server of every Machine works.
	ControlPlaneComponentsHealthyCondition = "ControlPlaneComponentsHealthy"

	// MachineEtcdMemberHealthyCondition of a Machine: its member of etcd has a vote and works. A readiness
	// gate, when etcd is not external.
	MachineEtcdMemberHealthyCondition = "EtcdMemberHealthy"
	// MachineAPIServerHealthyCondition of a Machine: its API server works. A readiness gate.
	MachineAPIServerHealthyCondition = "APIServerHealthy"

	// HealthyReason, NotHealthyReason and HealthUnknownReason are the reasons of conditions about health.
	HealthyReason       = "Healthy"
	NotHealthyReason    = "NotHealthy"
	HealthUnknownReason = "HealthUnknown"
	// QuorumLostReason: no majority of etcd's voting members works. The cluster takes no writes.
	QuorumLostReason = "QuorumLost"

	// Reasons of a Machine's OwnerRemediated condition: RemediationDeferredReason when it has to wait,
	// CannotBeRemediatedReason when it would cost the majority or was tried too often, and
	// RemediationMachineDeletingReason once the Machine goes. The message says more.
	RemediationDeferredReason        = "RemediationDeferred"
	CannotBeRemediatedReason         = "CannotBeRemediated"
	RemediationMachineDeletingReason = "MachineDeleting"

	// InvalidConfigurationReason: the spec, or what the Cluster says, cannot work; a change by the
	// user is needed.
	InvalidConfigurationReason = "InvalidConfiguration"
	// WaitingForEndpointReason: neither the Cluster nor its infrastructure have an endpoint yet (CP-02).
	WaitingForEndpointReason = "WaitingForControlPlaneEndpoint"
	// WaitingForAPIServerReason: the API server does not answer through the endpoint yet.
	WaitingForAPIServerReason = "WaitingForAPIServer"
	// WaitingForConnectionReason: Cluster API has no connection to the workload cluster.
	WaitingForConnectionReason = "ConnectionDown"
	// WaitingForWorkersReason: worker machines must go first.
	WaitingForWorkersReason = "WaitingForWorkersDeletion"
	// CannotChangeMachinesReason of MachinesUpToDate: what the spec says of them cannot be brought to the Machines.
	CannotChangeMachinesReason = "CannotChangeMachines"
	// WaitingForMachinesReason: control plane machines are being deleted.
	WaitingForMachinesReason = "WaitingForMachineDeletion"
)

// RolloutStrategyType is how machines are replaced.
// +kubebuilder:validation:Enum=RollingUpdate
type RolloutStrategyType string

// RollingUpdateStrategyType replaces machines one after the other.
const RollingUpdateStrategyType RolloutStrategyType = "RollingUpdate"

// CapstanControlPlaneSpec is the desired state of a CapstanControlPlane.
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.role)",message="config.role is set by the control plane provider for each machine"
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.node) || !has(self.config.node.name)",message="config.node.name cannot be set: machines need names of their own"
// +kubebuilder:validation:XValidation:rule="!has(self.replicas) || self.replicas >= 3 || !has(self.rollout) || !has(self.rollout.strategy) || !has(self.rollout.strategy.rollingUpdate) || !has(self.rollout.strategy.rollingUpdate.maxSurge) || string(self.rollout.strategy.rollingUpdate.maxSurge) != '0'",message="maxSurge 0 needs three replicas at least: with fewer the control plane would be gone for a while"
// +kubebuilder:validation:XValidation:rule="!has(self.replicas) || self.replicas % 2 == 1 || (has(self.config) && has(self.config.cluster) && has(self.config.cluster.etcd) && has(self.config.cluster.etcd.external))",message="replicas must be odd: an even number of etcd members tolerates no more failures than one less; only with an external etcd any number is good"
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.restore)",message="config.restore is set by the control plane provider: use restore"
// +kubebuilder:validation:XValidation:rule="!(has(self.backup) || has(self.restore)) || !(has(self.config) && has(self.config.cluster) && has(self.config.cluster.etcd) && has(self.config.cluster.etcd.external))",message="backup and restore are for the etcd of the machines: an external etcd is backed up by who runs it"
// +kubebuilder:validation:XValidation:rule="!has(self.restore) || has(self.restore.store) || has(self.backup)",message="restore needs a store: set restore.store, or backup"
// +kubebuilder:validation:XValidation:rule="!has(self.rollout) || !has(self.rollout.before) || !has(self.rollout.before.certificatesExpiryDays) || self.rollout.before.certificatesExpiryDays < (has(self.config) && has(self.config.cluster) && has(self.config.cluster.certificateValidityDays) ? self.config.cluster.certificateValidityDays : 365)",message="rollout.before.certificatesExpiryDays must be less than config.cluster.certificateValidityDays (365 when not set): a new machine would have to be replaced at once"
type CapstanControlPlaneSpec struct {
	// replicas is the number of control plane machines. 1 when not set; an odd number, unless etcd
	// is external (CP-03).
	// +optional
	// +kubebuilder:validation:Minimum=1
	Replicas *int32 `json:"replicas,omitempty"`

	// version of Kubernetes, for example v1.36.3. The leading v is added when it is missing (CP-05).
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Version string `json:"version,omitempty"`

	// machineTemplate is what the Machines are made from (CP-06).
	// +required
	MachineTemplate MachineTemplate `json:"machineTemplate,omitempty,omitzero"`

	// config is the bootstrap configuration of the machines, and the settings of the cluster.
	// +optional
	Config bootstrapv1.CapstanConfigSpec `json:"config,omitempty,omitzero"`

	// rollout says when and how machines are replaced.
	// +optional
	Rollout RolloutSpec `json:"rollout,omitempty,omitzero"`

	// remediation says how unhealthy machines are replaced.
	// +optional
	Remediation RemediationSpec `json:"remediation,omitempty,omitzero"`

	// machineNaming is how Machines are named; infrastructure machines and CapstanConfigs have the
	// names of their Machines.
	// +optional
	MachineNaming MachineNamingSpec `json:"machineNaming,omitempty,omitzero"`

	// kubeconfig configures the client certificate of the kubeconfig secret (CP-14).
	// +optional
	Kubeconfig KubeconfigSpec `json:"kubeconfig,omitempty,omitzero"`

	// certificates says when the certificate authority of the cluster is replaced.
	// +optional
	Certificates CertificatesSpec `json:"certificates,omitempty,omitzero"`

	// backup says when etcd is backed up, and where the backups go.
	// +optional
	Backup BackupSpec `json:"backup,omitempty,omitzero"`

	// restore names a backup that the cluster begins with again: everything that was written after it is gone. All control
	// plane machines are replaced. On a new control plane, the cluster begins with the backup.
	// +optional
	Restore RestoreSpec `json:"restore,omitempty,omitzero"`
}

// MachineTemplate is what the Machines of a control plane are made from.
type MachineTemplate struct {
	// metadata is the labels and annotations of the Machines, and through them of the Nodes. A change
	// reaches the Machines in place (CP-07).
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the Machines.
	// +required
	Spec MachineTemplateSpec `json:"spec,omitempty,omitzero"`
}

// MachineTemplateSpec is the spec of the Machines of a control plane.
type MachineTemplateSpec struct {
	// infrastructureRef is the template of the infrastructure machines. A change replaces the machines.
	// +required
	InfrastructureRef clusterv1.ContractVersionedObjectReference `json:"infrastructureRef,omitempty,omitzero"`

	// readinessGates are conditions that a Machine must have to be Ready. A change reaches the
	// Machines in place.
	// +optional
	// +listType=map
	// +listMapKey=conditionType
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	ReadinessGates []clusterv1.MachineReadinessGate `json:"readinessGates,omitempty"`

	// minReadySeconds is how long a Machine must be Ready to be Available. A Machine goes when those that
	// are up to date are. 0 when not set: at once. A change reaches the Machines in place (CP-18).
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinReadySeconds *int32 `json:"minReadySeconds,omitempty"`

	// deletion says how Machines are deleted. A change reaches the Machines in place.
	// +optional
	Deletion MachineDeletionSpec `json:"deletion,omitempty,omitzero"`

	// taints are node taints that Cluster API manages. A change reaches the Machines in place. Cluster API's core refuses
	// them unless its feature gate MachineTaintPropagation is on (alpha, and off by default).
	// +optional
	// +listType=map
	// +listMapKey=key
	// +listMapKey=effect
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Taints []clusterv1.MachineTaint `json:"taints,omitempty"`
}

// MachineDeletionSpec says how Machines are deleted.
// +kubebuilder:validation:MinProperties=1
type MachineDeletionSpec struct {
	// nodeDrainTimeoutSeconds is how long a node may take to be drained. 0: no limit.
	// +optional
	// +kubebuilder:validation:Minimum=0
	NodeDrainTimeoutSeconds *int32 `json:"nodeDrainTimeoutSeconds,omitempty"`

	// nodeVolumeDetachTimeoutSeconds is how long volumes may take to be detached. 0: no limit.
	// +optional
	// +kubebuilder:validation:Minimum=0
	NodeVolumeDetachTimeoutSeconds *int32 `json:"nodeVolumeDetachTimeoutSeconds,omitempty"`

	// nodeDeletionTimeoutSeconds is how long the deletion of the Node is tried. 0: no limit. The
	// default of Machines (10 seconds) when not set.
	// +optional
	// +kubebuilder:validation:Minimum=0
	NodeDeletionTimeoutSeconds *int32 `json:"nodeDeletionTimeoutSeconds,omitempty"`
}

// RolloutSpec says when and how machines are replaced.
// +kubebuilder:validation:MinProperties=1
type RolloutSpec struct {
	// before replaces machines ahead of time.
	// +optional
	Before RolloutBeforeSpec `json:"before,omitempty,omitzero"`

	// after replaces machines that are older than this time, once it has come, even if nothing else
	// has changed (CP-20).
	// +optional
	After metav1.Time `json:"after,omitempty,omitzero"`

	// strategy is how machines are replaced.
	// +optional
	Strategy RolloutStrategy `json:"strategy,omitempty,omitzero"`
}

// RolloutBeforeSpec replaces machines ahead of time.
// +kubebuilder:validation:MinProperties=1
type RolloutBeforeSpec struct {
	// certificatesExpiryDays replaces a machine when its certificates expire within so many days. Less than
	// config.cluster.certificateValidityDays. A machine that was made within these days is not replaced: the certificates
	// of another one would end with the same certificate authority.
	// +optional
	// +kubebuilder:validation:Minimum=7
	CertificatesExpiryDays int32 `json:"certificatesExpiryDays,omitempty"`
}

// RolloutStrategy is how machines are replaced.
// +kubebuilder:validation:MinProperties=1
type RolloutStrategy struct {
	// type of the strategy. Only RollingUpdate, which is the default.
	// +required
	Type RolloutStrategyType `json:"type,omitempty"`

	// rollingUpdate configures the type RollingUpdate.
	// +optional
	RollingUpdate RollingUpdate `json:"rollingUpdate,omitempty,omitzero"`
}

// RollingUpdate configures the replacement of one machine after the other.
// +kubebuilder:validation:MinProperties=1
type RollingUpdate struct {
	// maxSurge is how many machines there may be above replicas: 1 (the default) or 0. 0 needs three
	// replicas at least.
	// +optional
	// +kubebuilder:validation:XValidation:rule="string(self) in ['0', '1']",message="maxSurge must be 0 or 1"
	MaxSurge *intstr.IntOrString `json:"maxSurge,omitempty"`
}

// RemediationSpec says how unhealthy machines are replaced.
// +kubebuilder:validation:MinProperties=1
type RemediationSpec struct {
	// maxRetry is how often the replacement of a replacement that fails in its turn is tried. No
	// limit when not set.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxRetry *int32 `json:"maxRetry,omitempty"`

	// retryPeriodSeconds is how long to wait before a replacement is replaced. At once when not set.
	// +optional
	// +kubebuilder:validation:Minimum=0
	RetryPeriodSeconds *int32 `json:"retryPeriodSeconds,omitempty"`

	// minHealthyPeriodSeconds is after how long a failure counts as a new one, unrelated to the
	// last. 3600 when not set.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinHealthyPeriodSeconds *int32 `json:"minHealthyPeriodSeconds,omitempty"`
}

// MachineNamingSpec is how Machines are named.
// +kubebuilder:validation:MinProperties=1
type MachineNamingSpec struct {
	// template of the names. It may use .cluster.name, .capstanControlPlane.name, and must use
	// .random, five letters and digits. `{{ .capstanControlPlane.name }}-{{ .random }}` when not
	// set. Names longer than 63 characters are cut to 58 and get five random ones.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.contains('.random')",message="template must contain {{ .random }}, so that names are unique"
	Template string `json:"template,omitempty"`
}

// KubeconfigSpec configures the client certificate of the kubeconfig secret.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="(has(self.renewBeforeDays) ? self.renewBeforeDays : (has(self.validityDays) ? self.validityDays / 2 : 182)) < (has(self.validityDays) ? self.validityDays : 365)",message="renewBeforeDays must be less than validityDays (365 when not set)"
type KubeconfigSpec struct {
	// validityDays is how long the certificate is valid. 365 when not set.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3650
	ValidityDays int32 `json:"validityDays,omitempty"`

	// renewBeforeDays is how long before its end the certificate is renewed. Half of validityDays
	// when not set.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3649
	RenewBeforeDays int32 `json:"renewBeforeDays,omitempty"`
}

// CapstanControlPlaneStatus is the observed state of a CapstanControlPlane. All of it can be rebuilt
// from the spec, the Machines and the workload cluster (ALL-12).
// +kubebuilder:validation:MinProperties=1
type CapstanControlPlaneStatus struct {
	// conditions are the observations of the current state: Available, Initialized,
	// CertificatesAvailable, KubeconfigAvailable, EtcdClusterHealthy, ControlPlaneComponentsHealthy,
	// MachinesReady, MachinesUpToDate, RollingOut, ScalingUp, ScalingDown, Remediating, Deleting,
	// Paused, CertificateAuthorityRotating, BackupSucceeded, Restored.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization holds the observations that orchestrate the first provisioning.
	// +optional
	Initialization CapstanControlPlaneInitializationStatus `json:"initialization,omitempty,omitzero"`

	// selector of the Machines, in string form, for the scale subresource (CP-04).
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4096
	Selector string `json:"selector,omitempty"`

	// replicas is the number of Machines.
	// +optional
	Replicas *int32 `json:"replicas,omitempty"`

	// readyReplicas is the number of Machines whose Ready condition is true.
	// +optional
	ReadyReplicas *int32 `json:"readyReplicas,omitempty"`

	// availableReplicas is the number of Machines whose Available condition is true.
	// +optional
	AvailableReplicas *int32 `json:"availableReplicas,omitempty"`

	// upToDateReplicas is the number of Machines whose UpToDate condition is true.
	// +optional
	UpToDateReplicas *int32 `json:"upToDateReplicas,omitempty"`

	// versions of Kubernetes on the Machines, from old to new, with the number of Machines of each (CP-05).
	// +optional
	// +listType=map
	// +listMapKey=version
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	Versions []clusterv1.StatusVersion `json:"versions,omitempty"`

	// version is the lowest version of Kubernetes on the Machines.
	//
	// Deprecated: use versions.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Version string `json:"version,omitempty"`

	// observedGeneration is the latest generation that the controller has seen.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// lastRemediation is the last replacement of an unhealthy machine.
	// +optional
	LastRemediation LastRemediationStatus `json:"lastRemediation,omitempty,omitzero"`

	// backups that are in the store, the newest first.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=100
	Backups []BackupStatus `json:"backups,omitempty"`
}

// CapstanControlPlaneInitializationStatus holds the observations that orchestrate the first provisioning.
// +kubebuilder:validation:MinProperties=1
type CapstanControlPlaneInitializationStatus struct {
	// controlPlaneInitialized is true once the API server has answered through the endpoint. It is
	// never unset (CP-09).
	// +optional
	ControlPlaneInitialized *bool `json:"controlPlaneInitialized,omitempty"`
}

// LastRemediationStatus is the last replacement of an unhealthy machine.
type LastRemediationStatus struct {
	// machine that was replaced.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Machine string `json:"machine,omitempty"`

	// time of the replacement.
	// +required
	Time metav1.Time `json:"time,omitempty,omitzero"`

	// retryCount is how often the replacement was tried again.
	// +required
	// +kubebuilder:validation:Minimum=0
	RetryCount *int32 `json:"retryCount,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstancontrolplanes,shortName=capcp,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta2"
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Available",type="string",JSONPath=`.status.conditions[?(@.type=="Available")].status`,description="The control plane works"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Available")].reason`,description="Why",priority=10
// +kubebuilder:printcolumn:name="Initialized",type=boolean,JSONPath=".status.initialization.controlPlaneInitialized",description="The API server has answered"
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=".spec.replicas",description="Machines wanted"
// +kubebuilder:printcolumn:name="Current",type=integer,JSONPath=".status.replicas",description="Machines there"
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=".status.readyReplicas",description="Machines ready"
// +kubebuilder:printcolumn:name="Up-to-date",type=integer,JSONPath=".status.upToDateReplicas",description="Machines up to date"
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"
// +kubebuilder:printcolumn:name="Version",type=string,JSONPath=".spec.version",description="Kubernetes version"

// CapstanControlPlane is the control plane of a cluster: Machines on which kube-apiserver,
// kube-controller-manager, kube-scheduler and etcd run as supervised processes (CP-01).
type CapstanControlPlane struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the control plane.
	// +required
	Spec CapstanControlPlaneSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the control plane.
	// +optional
	Status CapstanControlPlaneStatus `json:"status,omitempty,omitzero"`
}

// GetConditions returns the conditions.
func (c *CapstanControlPlane) GetConditions() []metav1.Condition { return c.Status.Conditions }

// SetConditions sets the conditions.
func (c *CapstanControlPlane) SetConditions(conditions []metav1.Condition) {
	c.Status.Conditions = conditions
}

// +kubebuilder:object:root=true

// CapstanControlPlaneList is a list of CapstanControlPlanes.
type CapstanControlPlaneList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanControlPlanes.
	Items []CapstanControlPlane `json:"items"`
}

func init() {
	objectTypes = append(objectTypes, &CapstanControlPlane{}, &CapstanControlPlaneList{})
}

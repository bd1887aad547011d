package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

const (
	// ControlPlaneFinalizer keeps a CapstanControlPlane until its Machines are removed. They are deleted after the
	// workers.
	ControlPlaneFinalizer = "controlplane.capstan.dev/capstancontrolplane"

	// DefaultKubeconfigValidityDays is the default validity of the kubeconfig's client certificate in days.
	DefaultKubeconfigValidityDays = 365

	// PreTerminateHookAnnotation is on every control plane Machine from its creation. Before the machine is
	// removed, its etcd member leaves, whichever client deletes the Machine.
	PreTerminateHookAnnotation = clusterv1.PreTerminateDeleteHookAnnotationPrefix + "/capstan-etcd"

	// InitializedAnnotation marks a control plane whose API server has answered once. It survives a move or a
	// restore of the management cluster, which lose the status. From then on the cluster has data.
	InitializedAnnotation = "controlplane.capstan.dev/initialized"

	// RemediationInProgressAnnotation is on a control plane from the deletion of an unhealthy Machine until its
	// replacement is created. It contains the history that limits retries.
	RemediationInProgressAnnotation = "controlplane.capstan.dev/remediation-in-progress"
	// RemediationForAnnotation is on the replacement of an unhealthy Machine. It contains the same history.
	RemediationForAnnotation = "controlplane.capstan.dev/remediation-for"

	// UpdateFromAnnotation is on a Machine during an update in place. It contains the Kubernetes version before the
	// update. It is the record of the update: any manager continues it.
	UpdateFromAnnotation = "controlplane.capstan.dev/update-from"
	// UpdateSucceededAnnotation is on a Machine whose update in place has succeeded, until the annotations of the update are removed.
	UpdateSucceededAnnotation = "controlplane.capstan.dev/update-succeeded"
	// UpdateHeldAnnotation is on a Machine whose update in place waits, for example for memory of its host, while the other Machines have no
	// quorum without it. The infrastructure provider does not begin an update with this annotation.
	UpdateHeldAnnotation = "controlplane.capstan.dev/update-held"
	// UpdateEncryptionAnnotation is on a Machine during an update in place that changes the encryption of etcd. Until its success, the
	// API server of the Machine may not read the data of others.
	UpdateEncryptionAnnotation = "controlplane.capstan.dev/update-encryption"

	// DefaultMinHealthyPeriodSeconds is the default period in seconds after which a failure is unrelated to the
	// previous one.
	DefaultMinHealthyPeriodSeconds = 3600

	// DefaultMachineNamingTemplate is the default name template of Machines, infrastructure machines and
	// CapstanConfigs.
	DefaultMachineNamingTemplate = "{{ .capstanControlPlane.name }}-{{ .random }}"
)

// Conditions of a CapstanControlPlane and their reasons. Available, MachinesReady, MachinesUpToDate, RollingOut,
// ScalingUp, ScalingDown, Remediating, Deleting and Paused are conditions of Cluster API. CertificatesExpiring is also one of hosts, and
// stands in the group infrastructure.capstan.dev.
const (
	// AvailableCondition: the API server answers, certificates exist, and enough machines work.
	AvailableCondition = clusterv1.AvailableCondition
	// InvalidConfigurationReason: the spec or the Cluster is invalid. The user has to change it.
	InvalidConfigurationReason = "InvalidConfiguration"

	// InitializedCondition: the API server has answered through the endpoint.
	InitializedCondition = "Initialized"
	// InitializedReason: the API server has answered.
	InitializedReason = "Initialized"
	// NotInitializedReason: no Machine exists yet. The message contains the cause.
	NotInitializedReason = "NotInitialized"
	// WaitingForAPIServerReason: the API server does not answer through the endpoint yet.
	WaitingForAPIServerReason = "WaitingForAPIServer"

	// CertificatesAvailableCondition: every certificate authority and the encryption key exist.
	CertificatesAvailableCondition = "CertificatesAvailable"
	// CertificatesAvailableReason: all of them exist and are valid.
	CertificatesAvailableReason = "Available"
	// CertificatesNotAvailableReason: a Secret is missing or invalid. The message names it.
	CertificatesNotAvailableReason = "NotAvailable"

	// KubeconfigAvailableCondition: the kubeconfig Secret exists and is valid.
	KubeconfigAvailableCondition = "KubeconfigAvailable"
	// KubeconfigAvailableReason: the Secret exists and is valid.
	KubeconfigAvailableReason = "Available"
	// KubeconfigNotAvailableReason: the Secret does not exist or is not usable. The message contains the cause.
	KubeconfigNotAvailableReason = "NotAvailable"
	// KubeconfigRefusedReason: the kubeconfig secret is not the control plane's own, and contains a field that managers
	// do not accept. The message names the field.
	KubeconfigRefusedReason = "KubeconfigRefused"

	// EtcdClusterHealthyCondition: every voting member of etcd works. The reason is QuorumLost if there is no
	// majority, and otherwise one of the reasons of several conditions.
	EtcdClusterHealthyCondition = "EtcdClusterHealthy"
	// QuorumLostReason: no majority of etcd's voting members works. The cluster takes no writes.
	QuorumLostReason = "QuorumLost"

	// ControlPlaneComponentsHealthyCondition: the API server of every Machine works. Its reasons are reasons of several conditions.
	ControlPlaneComponentsHealthyCondition = "ControlPlaneComponentsHealthy"

	// MachineEtcdMemberHealthyCondition of a Machine: its etcd member is a voter and works. It is a readiness
	// gate, unless etcd is external. Its reasons are reasons of several conditions.
	MachineEtcdMemberHealthyCondition = "EtcdMemberHealthy"
	// MachineAPIServerHealthyCondition of a Machine: its API server works. It is a readiness gate. Its reasons are reasons of several
	// conditions.
	MachineAPIServerHealthyCondition = "APIServerHealthy"

	// ManifestsAppliedCondition: every manifest of the spec was applied to the cluster. Only control planes with manifests have it.
	ManifestsAppliedCondition = "ManifestsApplied"
	// ManifestsAppliedReason: the manifests were applied.
	ManifestsAppliedReason = "Applied"
	// ManifestsNotAppliedReason: a manifest was not applied yet, for example because the API server refuses an object. The message
	// names the manifest and the object. The controller retries.
	ManifestsNotAppliedReason = "NotApplied"

	// UpdatingCondition: a machine is updated in place. The message contains the step and the number of machines that
	// remain.
	UpdatingCondition = clusterv1.MachineUpdatingCondition
	// UpdatingReason: an update in place is running.
	UpdatingReason = "Updating"
	// NotUpdatingReason: no update in place is running.
	NotUpdatingReason = "NotUpdating"
	// UpdateFailedReason: an update in place failed or was rolled back. No other machine is updated.
	UpdateFailedReason = "UpdateFailed"
	// CannotUpdateReason: the policy is Only, and a change needs other machines. The message names the field.
	CannotUpdateReason = "CannotUpdateInPlace"
)

// Reasons of several conditions of a CapstanControlPlane and its Machines.
const (
	// HealthyReason of EtcdClusterHealthy, ControlPlaneComponentsHealthy, EtcdMemberHealthy and APIServerHealthy: the part works.
	HealthyReason = "Healthy"
	// NotHealthyReason of the same conditions: the part does not work. The message contains the cause.
	NotHealthyReason = "NotHealthy"
	// HealthUnknownReason of the same conditions: no current observation exists. The message contains the cause.
	HealthUnknownReason = "HealthUnknown"
	// WaitingForConnectionReason of Available, EtcdClusterHealthy, ControlPlaneComponentsHealthy and ManifestsApplied: Cluster API has
	// no connection to the workload cluster.
	WaitingForConnectionReason = "ConnectionDown"
)

// Reasons of conditions of Cluster API, for a CapstanControlPlane and its Machines.
const (
	// CannotChangeMachinesReason of MachinesUpToDate: a change of the template cannot be applied to the Machines.
	CannotChangeMachinesReason = "CannotChangeMachines"
	// WaitingForWorkersReason of Deleting: worker machines must be deleted first.
	WaitingForWorkersReason = "WaitingForWorkersDeletion"
	// WaitingForMachinesReason of Deleting: control plane machines are being deleted.
	WaitingForMachinesReason = "WaitingForMachineDeletion"

	// RemediationDeferredReason of a Machine's OwnerRemediated: the remediation waits. The message contains the cause.
	RemediationDeferredReason = "RemediationDeferred"
	// CannotBeRemediatedReason of a Machine's OwnerRemediated: the remediation would cost the majority, or was tried too often. The
	// message contains the cause.
	CannotBeRemediatedReason = "CannotBeRemediated"
	// RemediationMachineDeletingReason of a Machine's OwnerRemediated: the Machine is being deleted.
	RemediationMachineDeletingReason = "MachineDeleting"
)

// RolloutStrategyType is the strategy for the replacement of machines.
// +kubebuilder:validation:Enum=RollingUpdate
type RolloutStrategyType string

// RollingUpdateStrategyType replaces machines one at a time.
const RollingUpdateStrategyType RolloutStrategyType = "RollingUpdate"

// CapstanControlPlaneSpec is the desired state of a CapstanControlPlane.
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.role)",message="config.role is set by the control plane provider for each machine"
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.node) || !has(self.config.node.name)",message="config.node.name cannot be set: each machine needs its own name"
// +kubebuilder:validation:XValidation:rule="!has(self.replicas) || self.replicas >= 3 || !has(self.rollout) || !has(self.rollout.strategy) || !has(self.rollout.strategy.rollingUpdate) || !has(self.rollout.strategy.rollingUpdate.maxSurge) || string(self.rollout.strategy.rollingUpdate.maxSurge) != '0'",message="maxSurge 0 requires at least three replicas: with fewer, the control plane would be interrupted"
// +kubebuilder:validation:XValidation:rule="!has(self.replicas) || self.replicas % 2 == 1 || (has(self.config) && has(self.config.cluster) && has(self.config.cluster.etcd) && has(self.config.cluster.etcd.external))",message="replicas must be odd unless etcd is external: an even number of etcd members tolerates no more failures than the next lower odd number"
// +kubebuilder:validation:XValidation:rule="!has(self.config) || !has(self.config.restore)",message="config.restore is set by the control plane provider: use restore instead"
// +kubebuilder:validation:XValidation:rule="!(has(self.backup) || has(self.restore)) || !(has(self.config) && has(self.config.cluster) && has(self.config.cluster.etcd) && has(self.config.cluster.etcd.external))",message="backup and restore are not possible with an external etcd: use the backup of that etcd"
// +kubebuilder:validation:XValidation:rule="!has(self.restore) || has(self.restore.store) || has(self.backup)",message="restore requires a store: set restore.store or backup"
// +kubebuilder:validation:XValidation:rule="!has(self.rollout) || !has(self.rollout.before) || !has(self.rollout.before.certificatesExpiryDays) || self.rollout.before.certificatesExpiryDays < (has(self.config) && has(self.config.cluster) && has(self.config.cluster.certificateValidityDays) ? self.config.cluster.certificateValidityDays : 365)",message="rollout.before.certificatesExpiryDays must be less than config.cluster.certificateValidityDays (default 365): otherwise a new machine would be replaced at once"
type CapstanControlPlaneSpec struct {
	// replicas is the number of control plane machines. Default: 1. It must be odd unless etcd is external.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Replicas *int32 `json:"replicas,omitempty"`

	// version is the Kubernetes version, for example v1.36.3. A missing v is added.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Version string `json:"version,omitempty"`

	// machineTemplate describes the Machines.
	// +required
	MachineTemplate MachineTemplate `json:"machineTemplate,omitempty,omitzero"`

	// config contains the bootstrap configuration of the machines and the settings of the cluster.
	// +optional
	Config bootstrapv1.CapstanConfigSpec `json:"config,omitempty,omitzero"`

	// rollout configures when and how machines are replaced.
	// +optional
	Rollout RolloutSpec `json:"rollout,omitempty,omitzero"`

	// remediation configures the replacement of unhealthy machines.
	// +optional
	Remediation RemediationSpec `json:"remediation,omitempty,omitzero"`

	// machineNaming configures the names of Machines. Infrastructure machines and CapstanConfigs have the names of
	// their Machines.
	// +optional
	MachineNaming MachineNamingSpec `json:"machineNaming,omitempty,omitzero"`

	// kubeconfig configures the client certificate of the kubeconfig Secret.
	// +optional
	Kubeconfig KubeconfigSpec `json:"kubeconfig,omitempty,omitzero"`

	// certificates configures the rotation of the cluster's certificate authority.
	// +optional
	Certificates CertificatesSpec `json:"certificates,omitempty,omitzero"`

	// backup configures backups of etcd and their store.
	// +optional
	Backup BackupSpec `json:"backup,omitempty,omitzero"`

	// restore names a backup to restore. All data that was written after the backup is lost, and all control plane
	// machines are replaced. A new control plane starts with the backup.
	// +optional
	Restore RestoreSpec `json:"restore,omitempty,omitzero"`

	// manifests are objects that are applied to the cluster once, in their order, as soon as its API server answers. A failed
	// manifest is tried again, and the condition ManifestsApplied names the reason. Later changes of an applied manifest have no
	// effect.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=20
	Manifests []Manifest `json:"manifests,omitempty"`
}

// MachineTemplate describes the Machines of a control plane.
type MachineTemplate struct {
	// metadata contains the labels and annotations of the Machines and, by the rules of Cluster API, of their
	// Nodes. A change is applied in place.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the Machines.
	// +required
	Spec MachineTemplateSpec `json:"spec,omitempty,omitzero"`
}

// MachineTemplateSpec is the spec of the Machines of a control plane.
type MachineTemplateSpec struct {
	// infrastructureRef names the template of the infrastructure machines. A change replaces the machines.
	// +required
	InfrastructureRef clusterv1.ContractVersionedObjectReference `json:"infrastructureRef,omitempty,omitzero"`

	// readinessGates are additional conditions that a Machine needs to be Ready. A change is applied in place.
	// +optional
	// +listType=map
	// +listMapKey=conditionType
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	ReadinessGates []clusterv1.MachineReadinessGate `json:"readinessGates,omitempty"`

	// minReadySeconds is the time in seconds that a Machine must be Ready before it is Available. During a
	// rollout, an outdated Machine is deleted only when the up-to-date Machines are Available. Default: 0. A
	// change is applied in place.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinReadySeconds *int32 `json:"minReadySeconds,omitempty"`

	// deletion configures timeouts for the deletion of Machines. A change is applied in place.
	// +optional
	Deletion MachineDeletionSpec `json:"deletion,omitempty,omitzero"`

	// taints are Node taints that Cluster API manages. A change is applied in place. Cluster API core refuses
	// taints unless its feature gate MachineTaintPropagation (alpha, off by default) is enabled.
	// +optional
	// +listType=map
	// +listMapKey=key
	// +listMapKey=effect
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Taints []clusterv1.MachineTaint `json:"taints,omitempty"`
}

// MachineDeletionSpec configures timeouts for the deletion of Machines.
// +kubebuilder:validation:MinProperties=1
type MachineDeletionSpec struct {
	// nodeDrainTimeoutSeconds is the maximum time in seconds for draining a Node. 0 means no limit.
	// +optional
	// +kubebuilder:validation:Minimum=0
	NodeDrainTimeoutSeconds *int32 `json:"nodeDrainTimeoutSeconds,omitempty"`

	// nodeVolumeDetachTimeoutSeconds is the maximum time in seconds for detaching volumes. 0 means no limit.
	// +optional
	// +kubebuilder:validation:Minimum=0
	NodeVolumeDetachTimeoutSeconds *int32 `json:"nodeVolumeDetachTimeoutSeconds,omitempty"`

	// nodeDeletionTimeoutSeconds is the maximum time in seconds for deleting the Node. 0 means no limit. Default:
	// the default of Machines, 10 seconds.
	// +optional
	// +kubebuilder:validation:Minimum=0
	NodeDeletionTimeoutSeconds *int32 `json:"nodeDeletionTimeoutSeconds,omitempty"`
}

// RolloutSpec configures when and how machines are replaced.
// +kubebuilder:validation:MinProperties=1
type RolloutSpec struct {
	// before configures early replacement.
	// +optional
	Before RolloutBeforeSpec `json:"before,omitempty,omitzero"`

	// after replaces all machines that are older than this time, as soon as this time has come, even if nothing
	// else changed.
	// +optional
	After metav1.Time `json:"after,omitempty,omitzero"`

	// strategy configures how machines are replaced or updated.
	// +optional
	Strategy RolloutStrategy `json:"strategy,omitempty,omitzero"`
}

// RolloutBeforeSpec configures early replacement.
// +kubebuilder:validation:MinProperties=1
type RolloutBeforeSpec struct {
	// certificatesExpiryDays replaces a machine when its certificates expire within this number of days. It must
	// be less than config.cluster.certificateValidityDays. A machine that is younger than this number of days is
	// not replaced, because a new machine's certificates would end with the same certificate authority. It has no effect
	// with an external etcd.
	// +optional
	// +kubebuilder:validation:Minimum=7
	CertificatesExpiryDays int32 `json:"certificatesExpiryDays,omitempty"`
}

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

// RolloutStrategy configures how machines are replaced or updated.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.drainBeforeUpdate) || !self.drainBeforeUpdate || (has(self.inPlace) && self.inPlace != 'Never')",message="drainBeforeUpdate requires inPlace Prefer or Only: a machine is always drained before its replacement"
type RolloutStrategy struct {
	// type is the strategy. The only value and default is RollingUpdate.
	// +required
	Type RolloutStrategyType `json:"type,omitempty"`

	// rollingUpdate configures the type RollingUpdate.
	// +optional
	RollingUpdate RollingUpdate `json:"rollingUpdate,omitempty,omitzero"`

	// inPlace selects between updates in place and replacement. Never (default) replaces outdated machines. Prefer
	// updates a machine in place if every change can be made in place, and replaces it otherwise. Only never
	// replaces an outdated machine: a change that needs another machine stops the rollout, and the condition
	// RollingOut names the field.
	// +optional
	InPlace InPlacePolicy `json:"inPlace,omitempty"`

	// drainBeforeUpdate drains the Node and waits for the detachment of its volumes before an update in place. The
	// timeouts of machineTemplate.spec.deletion apply. Default: false, pods keep running during the update.
	// +optional
	DrainBeforeUpdate *bool `json:"drainBeforeUpdate,omitempty"`
}

// RollingUpdate configures the replacement of machines one at a time.
// +kubebuilder:validation:MinProperties=1
type RollingUpdate struct {
	// maxSurge is the number of machines above replicas during a rollout: 1 (default) or 0. 0 requires at least
	// three replicas. It is 0 while an outdated machine has a volume that its successor needs.
	// +optional
	// +kubebuilder:validation:XValidation:rule="string(self) in ['0', '1']",message="maxSurge must be 0 or 1"
	MaxSurge *intstr.IntOrString `json:"maxSurge,omitempty"`
}

// RemediationSpec configures the replacement of unhealthy machines.
// +kubebuilder:validation:MinProperties=1
type RemediationSpec struct {
	// maxRetry is the maximum number of further attempts when a replacement fails as well. Default: no limit.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxRetry *int32 `json:"maxRetry,omitempty"`

	// retryPeriodSeconds is the minimum time in seconds before a failed replacement is replaced. Default: 0.
	// +optional
	// +kubebuilder:validation:Minimum=0
	RetryPeriodSeconds *int32 `json:"retryPeriodSeconds,omitempty"`

	// minHealthyPeriodSeconds is the time in seconds after which a failure is unrelated to the previous one and
	// retries are counted from zero. Default: 3600.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinHealthyPeriodSeconds *int32 `json:"minHealthyPeriodSeconds,omitempty"`
}

// MachineNamingSpec configures the names of Machines.
// +kubebuilder:validation:MinProperties=1
type MachineNamingSpec struct {
	// template is the template of the names. It may contain text, {{ .cluster.name }} and
	// {{ .capstanControlPlane.name }}, must contain {{ .random }}, five letters and digits, and may contain nothing
	// else of Go's templates. Default: `{{ .capstanControlPlane.name }}-{{
	// .random }}`. Names of more than 63 characters are cut to 58 and get five random characters.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.contains('.random')",message="template must contain {{ .random }}, so that names are unique"
	Template string `json:"template,omitempty"`
}

// KubeconfigSpec configures the client certificate of the kubeconfig Secret.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="(has(self.renewBeforeDays) ? self.renewBeforeDays : (has(self.validityDays) ? self.validityDays / 2 : 182)) < (has(self.validityDays) ? self.validityDays : 365)",message="renewBeforeDays must be less than validityDays (default 365)"
type KubeconfigSpec struct {
	// validityDays is the validity of the certificate in days. Default: 365.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3650
	ValidityDays int32 `json:"validityDays,omitempty"`

	// renewBeforeDays is the number of days before its expiry at which the certificate is renewed. Default: half
	// of validityDays.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3649
	RenewBeforeDays int32 `json:"renewBeforeDays,omitempty"`
}

// CapstanControlPlaneStatus is the observed state of a CapstanControlPlane. It can be rebuilt from the spec, the
// Machines and the workload cluster.
// +kubebuilder:validation:MinProperties=1
type CapstanControlPlaneStatus struct {
	// conditions describe the current state: Ready, Available, Initialized, CertificatesAvailable, KubeconfigAvailable,
	// EtcdClusterHealthy, ControlPlaneComponentsHealthy, ManifestsApplied, MachinesReady, MachinesUpToDate, RollingOut,
	// Updating, ScalingUp, ScalingDown, Remediating, Deleting, Paused, CertificateAuthorityRotating,
	// CertificatesExpiring, BackupSucceeded, Restored.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization contains the fields that Cluster API reads during the first provisioning.
	// +optional
	Initialization CapstanControlPlaneInitializationStatus `json:"initialization,omitempty,omitzero"`

	// selector is the label selector of the Machines, as a string for the scale subresource.
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

	// versions lists the Kubernetes versions of the Machines in ascending order, with the number of Machines of
	// each version.
	// +optional
	// +listType=map
	// +listMapKey=version
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	Versions []clusterv1.StatusVersion `json:"versions,omitempty"`

	// version is the lowest Kubernetes version of the Machines.
	//
	// Deprecated: use versions.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Version string `json:"version,omitempty"`

	// observedGeneration is the latest generation of this object that the controller processed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// lastRemediation describes the last replacement of an unhealthy machine.
	// +optional
	LastRemediation LastRemediationStatus `json:"lastRemediation,omitempty,omitzero"`

	// backups lists the backups in the store, newest first.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=100
	Backups []BackupStatus `json:"backups,omitempty"`
}

// CapstanControlPlaneInitializationStatus contains the fields that Cluster API reads during the first
// provisioning.
// +kubebuilder:validation:MinProperties=1
type CapstanControlPlaneInitializationStatus struct {
	// controlPlaneInitialized is true once the API server has answered through the endpoint. It is never unset.
	// +optional
	ControlPlaneInitialized *bool `json:"controlPlaneInitialized,omitempty"`
}

// LastRemediationStatus describes the last replacement of an unhealthy machine.
type LastRemediationStatus struct {
	// machine is the name of the replaced Machine.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Machine string `json:"machine,omitempty"`

	// time is the time of the replacement.
	// +required
	Time metav1.Time `json:"time,omitempty,omitzero"`

	// retryCount is the number of further attempts.
	// +required
	// +kubebuilder:validation:Minimum=0
	RetryCount *int32 `json:"retryCount,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstancontrolplanes,shortName=capcp,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta1=v1beta1","cluster.x-k8s.io/v1beta2=v1beta2"}
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Available",type="string",JSONPath=`.status.conditions[?(@.type=="Available")].status`,description="The control plane works"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Available")].reason`,description="Reason",priority=10
// +kubebuilder:printcolumn:name="Initialized",type=boolean,JSONPath=".status.initialization.controlPlaneInitialized",description="The API server has answered"
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=".spec.replicas",description="Desired machines"
// +kubebuilder:printcolumn:name="Current",type=integer,JSONPath=".status.replicas",description="Existing machines"
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=".status.readyReplicas",description="Ready machines"
// +kubebuilder:printcolumn:name="Up-to-date",type=integer,JSONPath=".status.upToDateReplicas",description="Up-to-date machines"
// +kubebuilder:printcolumn:name="Updating",type="string",JSONPath=`.status.conditions[?(@.type=="Updating")].status`,description="A machine is updated in place",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"
// +kubebuilder:printcolumn:name="Version",type=string,JSONPath=".spec.version",description="Kubernetes version"

// CapstanControlPlane is the control plane of a cluster. Its Machines run kube-apiserver, kube-controller-manager,
// kube-scheduler and etcd as supervised processes.
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

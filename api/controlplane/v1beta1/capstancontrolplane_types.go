package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

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
	Rollout controlplanev1.RolloutSpec `json:"rollout,omitempty,omitzero"`

	// remediation configures the replacement of unhealthy machines.
	// +optional
	Remediation controlplanev1.RemediationSpec `json:"remediation,omitempty,omitzero"`

	// machineNaming configures the names of Machines. Infrastructure machines and CapstanConfigs have the names of
	// their Machines.
	// +optional
	MachineNaming controlplanev1.MachineNamingSpec `json:"machineNaming,omitempty,omitzero"`

	// kubeconfig configures the client certificate of the kubeconfig Secret.
	// +optional
	Kubeconfig controlplanev1.KubeconfigSpec `json:"kubeconfig,omitempty,omitzero"`

	// certificates configures the rotation of the cluster's certificate authority.
	// +optional
	Certificates controlplanev1.CertificatesSpec `json:"certificates,omitempty,omitzero"`

	// backup configures backups of etcd and their store.
	// +optional
	Backup controlplanev1.BackupSpec `json:"backup,omitempty,omitzero"`

	// restore names a backup to restore. All data that was written after the backup is lost, and all control plane
	// machines are replaced. A new control plane starts with the backup.
	// +optional
	Restore controlplanev1.RestoreSpec `json:"restore,omitempty,omitzero"`

	// manifests are objects that are applied to the cluster once, in their order, as soon as its API server answers. A failed
	// manifest is tried again, and the condition ManifestsApplied names the reason. Later changes of an applied manifest have no
	// effect.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=20
	Manifests []controlplanev1.Manifest `json:"manifests,omitempty"`
}

// MachineTemplate describes the Machines of a control plane.
type MachineTemplate struct {
	// metadata contains the labels and annotations of the Machines and, by the rules of Cluster API, of their
	// Nodes. A change is applied in place.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// infrastructureRef names the template of the infrastructure machines, in the namespace of the control plane. Another
	// namespace is refused. A change replaces the machines. On output, apiVersion is a version of the template that Cluster API reads.
	// +required
	// +kubebuilder:validation:XValidation:rule="has(self.apiVersion) && self.apiVersion.matches('^[a-z0-9.-]{1,253}/[a-z0-9]{1,63}$')",message="apiVersion must be a group and a version, for example infrastructure.capstan.dev/v1beta1"
	// +kubebuilder:validation:XValidation:rule="has(self.kind) && self.kind.matches('^[A-Za-z0-9]{1,63}$')",message="kind must be set, for example CapstanMachineTemplate"
	// +kubebuilder:validation:XValidation:rule="has(self.name) && self.name.matches('^[a-z0-9.-]{1,253}$')",message="name must be the name of a template"
	InfrastructureRef corev1.ObjectReference `json:"infrastructureRef,omitempty,omitzero"`

	// nodeDrainTimeout is the maximum time for draining a Node. Fractions of seconds are rounded up.
	// 0 means no limit. A change is applied in place.
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s') && duration(self) <= duration('2147483647s')",message="must be from 0s to 2147483647s, for example 10m"
	NodeDrainTimeout *metav1.Duration `json:"nodeDrainTimeout,omitempty"`

	// nodeVolumeDetachTimeout is the maximum time for detaching volumes. Fractions of seconds are rounded up. 0 means no limit.
	// A change is applied in place.
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s') && duration(self) <= duration('2147483647s')",message="must be from 0s to 2147483647s, for example 10m"
	NodeVolumeDetachTimeout *metav1.Duration `json:"nodeVolumeDetachTimeout,omitempty"`

	// nodeDeletionTimeout is the maximum time for deleting the Node. Fractions of seconds are rounded
	// up. 0 means no limit. Default: the default of Machines, 10 seconds. A change is applied in place.
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s') && duration(self) <= duration('2147483647s')",message="must be from 0s to 2147483647s, for example 10m"
	NodeDeletionTimeout *metav1.Duration `json:"nodeDeletionTimeout,omitempty"`

	// readinessGates are additional conditions that a Machine needs to be Ready. A change is applied in place.
	// +optional
	// +listType=map
	// +listMapKey=conditionType
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	ReadinessGates []clusterv1.MachineReadinessGate `json:"readinessGates,omitempty"`

	// minReadySeconds is the time in seconds that a Machine must be Ready before it is Available. Default: 0.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinReadySeconds *int32 `json:"minReadySeconds,omitempty"`

	// taints are Node taints that Cluster API manages. They require its feature gate MachineTaintPropagation.
	// +optional
	// +listType=map
	// +listMapKey=key
	// +listMapKey=effect
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Taints []clusterv1.MachineTaint `json:"taints,omitempty"`
}

// CapstanControlPlaneStatus is the observed state of a CapstanControlPlane. It can be rebuilt from the spec, the
// Machines and the workload cluster.
// +kubebuilder:validation:MinProperties=1
type CapstanControlPlaneStatus struct {
	// initialized is true once the API server has answered through the endpoint. It is never unset. Cluster API reads it.
	// +optional
	Initialized *bool `json:"initialized,omitempty"`

	// ready equals initialized: from then on the API server takes requests. See the condition Ready for the current state.
	// +optional
	Ready *bool `json:"ready,omitempty"`

	// failureReason and failureMessage describe a failure that only deletion ends. Capstan never sets them for
	// this kind: a control plane that lost all of its machines can be restored from a backup. See the conditions.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	FailureReason *string `json:"failureReason,omitempty"`

	// failureMessage is the message for failureReason.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=10240
	FailureMessage *string `json:"failureMessage,omitempty"`

	// externalManagedControlPlane is always false, because every control plane machine is a Node.
	// +optional
	ExternalManagedControlPlane bool `json:"externalManagedControlPlane,omitempty"`

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

	// updatedReplicas is the number of Machines whose UpToDate condition is true.
	// +optional
	UpdatedReplicas *int32 `json:"updatedReplicas,omitempty"`

	// unavailableReplicas is the number of Machines that are missing or whose Available condition is not true: the larger of
	// spec.replicas and replicas, less v1beta2.availableReplicas.
	// +optional
	UnavailableReplicas *int32 `json:"unavailableReplicas,omitempty"`

	// version is the lowest Kubernetes version of the Machines.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Version *string `json:"version,omitempty"`

	// versions lists the Kubernetes versions of the Machines in ascending order, with the number of Machines of
	// each version.
	// +optional
	// +listType=map
	// +listMapKey=version
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	Versions []clusterv1.StatusVersion `json:"versions,omitempty"`

	// lastRemediation describes the last replacement of an unhealthy machine.
	// +optional
	LastRemediation controlplanev1.LastRemediationStatus `json:"lastRemediation,omitempty,omitzero"`

	// backups lists the backups in the store, newest first.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=100
	Backups []controlplanev1.BackupStatus `json:"backups,omitempty"`

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

// V1Beta2Status contains the parts of the v1beta2 status of a CapstanControlPlane that the v1beta1
// contract does not have.
// +kubebuilder:validation:MinProperties=1
type V1Beta2Status struct {
	// conditions are the conditions of v1beta2.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// availableReplicas is the number of Machines whose Available condition is true.
	// +optional
	AvailableReplicas *int32 `json:"availableReplicas,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstancontrolplanes,shortName=capcp,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:deprecatedversion:warning="controlplane.capstan.dev/v1beta1 CapstanControlPlane is deprecated: use v1beta2. Cluster API v1.16 (April 2027) no longer reads the v1beta1 contract"
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Available",type="string",JSONPath=`.status.conditions[?(@.type=="Available")].status`,description="The control plane works"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Reason",priority=10
// +kubebuilder:printcolumn:name="Initialized",type=boolean,JSONPath=".status.initialized",description="The API server has answered"
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=".spec.replicas",description="Desired machines"
// +kubebuilder:printcolumn:name="Current",type=integer,JSONPath=".status.replicas",description="Existing machines"
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=".status.readyReplicas",description="Ready machines"
// +kubebuilder:printcolumn:name="Up-to-date",type=integer,JSONPath=".status.updatedReplicas",description="Up-to-date machines"
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"
// +kubebuilder:printcolumn:name="Version",type=string,JSONPath=".spec.version",description="Kubernetes version"

// CapstanControlPlane is the control plane of a cluster. Its Machines run kube-apiserver, kube-controller-manager,
// kube-scheduler and etcd as supervised processes.
//
// The version is deprecated: use v1beta2.
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

// +kubebuilder:object:root=true

// CapstanControlPlaneList is a list of CapstanControlPlanes.
//
// The version is deprecated: use v1beta2.
type CapstanControlPlaneList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanControlPlanes.
	Items []CapstanControlPlane `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanControlPlane{}, &CapstanControlPlaneList{}) }

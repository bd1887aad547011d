package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// RestoreSecretName is the Secret in BackupSecretNamespace that has the credentials of the store that a backup is restored
// from: it may be another one than that of the backups which are made meanwhile.
const RestoreSecretName = "capstan-etcd-restore"

// CheckPhase says how far a check is.
// +kubebuilder:validation:Enum=Checking;Succeeded;Failed
type CheckPhase string

const (
	// CheckBegun is a check that a machine has begun.
	CheckBegun CheckPhase = "Checking"
	// CheckSucceeded is one of a backup that a machine can begin with.
	CheckSucceeded CheckPhase = "Succeeded"
	// CheckFailed is one of a backup that cannot be used, or cannot be reached.
	CheckFailed CheckPhase = "Failed"
)

// EtcdBackupCheckSpec says which machine is to look at which backup.
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a check is made once: make another one"
type EtcdBackupCheckSpec struct {
	// member of etcd whose machine makes the check.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Member string `json:"member,omitempty"`

	// backup is the name of the backup in the store.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Backup string `json:"backup,omitempty"`

	// store of the backup. The Secrets that it names are in the management cluster: what is in them the machine finds
	// in the Secret kube-system/capstan-etcd-restore.
	// +required
	Store BackupStore `json:"store,omitempty,omitzero"`

	// folder in the store: namespace and name of the cluster that was backed up.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Folder string `json:"folder,omitempty"`

	// sha256 of the snapshot, when it is known.
	// +optional
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`
}

// EtcdBackupCheckStatus is what the machine has found.
type EtcdBackupCheckStatus struct {
	// phase: Checking, Succeeded or Failed; not set as long as no machine has begun.
	// +optional
	Phase CheckPhase `json:"phase,omitempty"`

	// message is why it has failed.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message,omitempty"`

	// location of the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Location string `json:"location,omitempty"`

	// sizeBytes of the snapshot.
	// +optional
	SizeBytes int64 `json:"sizeBytes,omitempty"`

	// kubernetesVersion of the cluster when it was backed up.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`

	// keys that what is in the backup needs.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	Keys []BackupKey `json:"keys,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=etcdbackupchecks,scope=Cluster,categories=capstan
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Backup",type="string",JSONPath=".spec.backup",description="Which backup"
// +kubebuilder:printcolumn:name="Phase",type="string",JSONPath=".status.phase",description="Checking, Succeeded or Failed"
// +kubebuilder:printcolumn:name="Message",type="string",JSONPath=".status.message",description="Why it has failed"
// +kubebuilder:printcolumn:name="Member",type="string",JSONPath=".spec.member",description="Whose machine makes it",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// EtcdBackupCheck is a look at a backup before the cluster is restored from it. The control plane provider makes it as long
// as the cluster serves; the machine of the member that it names fetches the backup and tells whether it can be used.
type EtcdBackupCheck struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec says which machine is to look at which backup.
	// +required
	Spec EtcdBackupCheckSpec `json:"spec,omitempty,omitzero"`
	// status is what the machine has found.
	// +optional
	Status EtcdBackupCheckStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// EtcdBackupCheckList is a list of EtcdBackupChecks.
type EtcdBackupCheckList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the EtcdBackupChecks.
	Items []EtcdBackupCheck `json:"items"`
}

func init() { objectTypes = append(objectTypes, &EtcdBackupCheck{}, &EtcdBackupCheckList{}) }

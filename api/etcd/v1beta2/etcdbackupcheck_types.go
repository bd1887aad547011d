package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// RestoreSecretName is the Secret in BackupSecretNamespace with the credentials of the store of a restore. It can
// differ from the store of new backups.
const RestoreSecretName = "capstan-etcd-restore"

// CheckPhase is the progress of a check.
// +kubebuilder:validation:Enum=Checking;Succeeded;Failed
type CheckPhase string

// Phases of a check. A check that no machine has started has none.
const (
	// CheckBegun: a machine has started the check.
	CheckBegun CheckPhase = "Checking"
	// CheckSucceeded: a machine can start with the backup.
	CheckSucceeded CheckPhase = "Succeeded"
	// CheckFailed: the backup is not usable or not reachable.
	CheckFailed CheckPhase = "Failed"
)

// EtcdBackupCheckSpec describes the check: the machine and the backup.
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec is immutable: create another EtcdBackupCheck"
type EtcdBackupCheckSpec struct {
	// member is the name of the etcd member whose machine does the check.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Member string `json:"member,omitempty"`

	// backup is the name of the backup in the store.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Backup string `json:"backup,omitempty"`

	// store is the store of the backup. Its Secrets are in the management cluster. The machine reads their content
	// from the Secret kube-system/capstan-etcd-restore.
	// +required
	Store BackupStore `json:"store,omitempty,omitzero"`

	// folder is the folder in the store: namespace and name of the cluster of the backup.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Folder string `json:"folder,omitempty"`

	// sha256 is the checksum of the snapshot, if known.
	// +optional
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`
}

// EtcdBackupCheckStatus is the result of the check.
type EtcdBackupCheckStatus struct {
	// phase is Checking, Succeeded or Failed. It is empty until a machine has started the check.
	// +optional
	Phase CheckPhase `json:"phase,omitempty"`

	// message contains the cause of a failure.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message,omitempty"`

	// location is the location of the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Location string `json:"location,omitempty"`

	// sizeBytes is the size of the snapshot in bytes.
	// +optional
	SizeBytes int64 `json:"sizeBytes,omitempty"`

	// kubernetesVersion is the Kubernetes version of the cluster at the time of the backup.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`

	// keys are the keys that the backup requires.
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
// +kubebuilder:printcolumn:name="Backup",type="string",JSONPath=".spec.backup",description="Name of the backup"
// +kubebuilder:printcolumn:name="Phase",type="string",JSONPath=".status.phase",description="Checking, Succeeded or Failed"
// +kubebuilder:printcolumn:name="Message",type="string",JSONPath=".status.message",description="Cause of the failure"
// +kubebuilder:printcolumn:name="Member",type="string",JSONPath=".spec.member",description="etcd member whose machine does it",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// EtcdBackupCheck examines a backup before the cluster is restored from it. The control plane provider creates it
// while the cluster works. The machine of the named member downloads the backup and reports whether it is usable.
type EtcdBackupCheck struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec describes the check.
	// +required
	Spec EtcdBackupCheckSpec `json:"spec,omitempty,omitzero"`
	// status is the result of the check.
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

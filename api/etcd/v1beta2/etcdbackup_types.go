package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BackupSecretNamespace and BackupSecretName identify the Secret in the workload cluster with the credentials of
// the store.
const (
	BackupSecretNamespace = "kube-system"
	BackupSecretName      = "capstan-etcd-backup"
)

// BackupPhase is the result of a backup.
// +kubebuilder:validation:Enum=Succeeded;Failed
type BackupPhase string

// Results of a backup. A backup that has not ended has none.
const (
	// BackupSucceeded: the store contains the complete backup.
	BackupSucceeded BackupPhase = "Succeeded"
	// BackupFailed: the backup failed and is not retried.
	BackupFailed BackupPhase = "Failed"
)

// EtcdBackupSpec describes the backup: the machine, the store and the keys.
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec is immutable: create another EtcdBackup"
type EtcdBackupSpec struct {
	// member is the name of the etcd member whose machine creates the backup.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Member string `json:"member,omitempty"`

	// trigger is the cause of the backup.
	// +required
	Trigger BackupTrigger `json:"trigger,omitempty"`

	// request identifies the cause: the scheduled time, the value of the annotation, or the new version.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Request string `json:"request,omitempty"`

	// store is the store of the backup. Its Secrets are in the management cluster. The machine reads their content
	// from the Secret kube-system/capstan-etcd-backup.
	// +required
	Store BackupStore `json:"store,omitempty,omitzero"`

	// folder is the folder in the store: namespace and name of the cluster.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Folder string `json:"folder,omitempty"`

	// kubernetesVersion is the Kubernetes version of the cluster.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`

	// keys are the keys that the backup requires.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	Keys []BackupKey `json:"keys,omitempty"`

	// remove lists backups in the same folder that are removed when this backup is complete.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MaxLength=253
	Remove []string `json:"remove,omitempty"`
}

// EtcdBackupStatus is the result of the backup. The machine writes it once, at the end.
type EtcdBackupStatus struct {
	// phase is Succeeded or Failed. It is empty while the backup is in progress.
	// +optional
	Phase BackupPhase `json:"phase,omitempty"`

	// message contains the cause of a failure, or backups that could not be removed.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message,omitempty"`

	// location is the location of the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Location string `json:"location,omitempty"`

	// time is the time at which the backup completed or failed.
	// +optional
	Time *metav1.Time `json:"time,omitempty"`

	// sizeBytes is the size of the snapshot in bytes.
	// +optional
	SizeBytes int64 `json:"sizeBytes,omitempty"`

	// revision is the etcd revision of the snapshot. It contains all changes up to this revision.
	// +optional
	Revision int64 `json:"revision,omitempty"`

	// etcdVersion is the version of etcd that created the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	EtcdVersion string `json:"etcdVersion,omitempty"`

	// sha256 is the checksum of the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`

	// removed lists the backups that were removed from the store.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MaxLength=253
	Removed []string `json:"removed,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=etcdbackups,scope=Cluster,categories=capstan
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Trigger",type="string",JSONPath=".spec.trigger",description="Cause of the backup"
// +kubebuilder:printcolumn:name="Phase",type="string",JSONPath=".status.phase",description="Succeeded or Failed"
// +kubebuilder:printcolumn:name="Size",type="integer",JSONPath=".status.sizeBytes",description="Size of the snapshot in bytes"
// +kubebuilder:printcolumn:name="Member",type="string",JSONPath=".spec.member",description="etcd member whose machine does it",priority=10
// +kubebuilder:printcolumn:name="Location",type="string",JSONPath=".status.location",description="Location",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// EtcdBackup is a backup of the etcd of its own cluster. The control plane provider creates it. The machine of the
// named member takes the snapshot, stores it and reports the result. Users request and find backups in their
// CapstanControlPlane.
type EtcdBackup struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata. The name is that of the backup in the store.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec describes the backup.
	// +required
	Spec EtcdBackupSpec `json:"spec,omitempty,omitzero"`
	// status is the result of the backup.
	// +optional
	Status EtcdBackupStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// EtcdBackupList is a list of EtcdBackups.
type EtcdBackupList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the EtcdBackups.
	Items []EtcdBackup `json:"items"`
}

func init() { objectTypes = append(objectTypes, &EtcdBackup{}, &EtcdBackupList{}) }

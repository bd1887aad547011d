package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BackupSecretNamespace and BackupSecretName are of the Secret in the workload cluster that has the credentials of the
// store.
const (
	BackupSecretNamespace = "kube-system"
	BackupSecretName      = "capstan-etcd-backup"
)

// BackupPhase says what has become of a backup.
// +kubebuilder:validation:Enum=Succeeded;Failed
type BackupPhase string

const (
	// BackupSucceeded is a backup that lies in the store, complete.
	BackupSucceeded BackupPhase = "Succeeded"
	// BackupFailed is one that does not, and never will.
	BackupFailed BackupPhase = "Failed"
)

// EtcdBackupSpec says which machine is to make the backup, and where it goes.
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a backup is made once: make another one"
type EtcdBackupSpec struct {
	// member of etcd whose machine makes the backup.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Member string `json:"member,omitempty"`

	// trigger is why the backup is made.
	// +required
	Trigger BackupTrigger `json:"trigger,omitempty"`

	// request is what was due, asked for, or the version to come.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Request string `json:"request,omitempty"`

	// store for the backup. The Secrets that it names are in the management cluster: what is in them the machine finds
	// in the Secret kube-system/capstan-etcd-backup.
	// +required
	Store BackupStore `json:"store,omitempty,omitzero"`

	// folder in the store: namespace and name of the cluster.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Folder string `json:"folder,omitempty"`

	// kubernetesVersion that the cluster runs.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`

	// keys that what is in the backup needs.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	Keys []BackupKey `json:"keys,omitempty"`

	// remove names backups in the same folder that are removed once this one is complete.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MaxLength=253
	Remove []string `json:"remove,omitempty"`
}

// EtcdBackupStatus is what has become of the backup. The machine writes it once, at the end.
type EtcdBackupStatus struct {
	// phase: Succeeded or Failed; not set as long as the backup is being made.
	// +optional
	Phase BackupPhase `json:"phase,omitempty"`

	// message is why it has failed, or what could not be removed.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message,omitempty"`

	// location of the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Location string `json:"location,omitempty"`

	// time at which the backup was complete, or failed.
	// +optional
	Time *metav1.Time `json:"time,omitempty"`

	// sizeBytes of the snapshot.
	// +optional
	SizeBytes int64 `json:"sizeBytes,omitempty"`

	// revision of etcd: everything up to it is in the snapshot.
	// +optional
	Revision int64 `json:"revision,omitempty"`

	// etcdVersion that made the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	EtcdVersion string `json:"etcdVersion,omitempty"`

	// sha256 of the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`

	// removed are the backups that are not in the store any more.
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
// +kubebuilder:printcolumn:name="Trigger",type="string",JSONPath=".spec.trigger",description="Why it was made"
// +kubebuilder:printcolumn:name="Phase",type="string",JSONPath=".status.phase",description="Succeeded or Failed"
// +kubebuilder:printcolumn:name="Size",type="integer",JSONPath=".status.sizeBytes",description="Bytes of the snapshot"
// +kubebuilder:printcolumn:name="Member",type="string",JSONPath=".spec.member",description="Whose machine makes it",priority=10
// +kubebuilder:printcolumn:name="Location",type="string",JSONPath=".status.location",description="Where it is",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// EtcdBackup is a backup of the etcd of the cluster that it lives in. The control plane provider makes it; the machine of
// the member that it names takes the snapshot, brings it to the store and tells what has become of it. Users ask for
// backups, and find them, at their CapstanControlPlane.
type EtcdBackup struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata. The name is that of the backup in the store.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec says which machine is to make the backup, and where it goes.
	// +required
	Spec EtcdBackupSpec `json:"spec,omitempty,omitzero"`
	// status is what has become of the backup.
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

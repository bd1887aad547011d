package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// Annotations and defaults of backups and restores.
const (
	// BackupAnnotation requests a backup. Each new value requests one backup. status.backups contains the value.
	BackupAnnotation = "controlplane.capstan.dev/backup"

	// RestoreAnnotation is on a control plane during a restore, and on the Machine that starts from the backup. Its
	// value identifies the restore. It survives a move, which loses the status.
	RestoreAnnotation = "controlplane.capstan.dev/restore"
	// RestoredAnnotation is on a control plane that was restored. Its value is that of RestoreAnnotation, so that a
	// backup is never restored twice.
	RestoredAnnotation = "controlplane.capstan.dev/restored"

	// RestoreUncheckedAnnotation identifies a restore whose backup no machine has checked before the restore
	// started. The controller sets it when the cluster does not answer. Users set it to restore a working cluster
	// without a check, if no machine can do it.
	RestoreUncheckedAnnotation = "controlplane.capstan.dev/restore-unchecked"

	// DefaultBackupRetention is the default number of backups that are kept.
	DefaultBackupRetention = 7
)

// Conditions of a CapstanControlPlane about backups and restores, and their reasons.
const (
	// BackupSucceededCondition: the store contains the last backup that was due. It exists only with spec.backup.
	BackupSucceededCondition = "BackupSucceeded"
	// BackupSucceededReason: the last backup that was due is in the store.
	BackupSucceededReason = "Succeeded"
	// BackupFailedReason: the last backup failed. The message contains the cause.
	BackupFailedReason = "Failed"
	// NoBackupReason: no backup has ended yet.
	NoBackupReason = "NoBackupYet"
	// BackupImpossibleReason: no backup can start. The message contains the cause.
	BackupImpossibleReason = "NotPossible"

	// RestoredCondition: the restore of spec.restore is complete. It exists only with spec.restore.
	RestoredCondition = "Restored"
	// RestoredReason: the cluster has the data of the backup and answers.
	RestoredReason = "Restored"
	// CheckingReason: a machine examines the backup. Nothing was removed yet.
	CheckingReason = "Checking"
	// RestoringReason: a machine has checked the backup, and the restore is in progress.
	RestoringReason = "Restoring"
	// RestoringUncheckedReason: no machine could examine the backup, and the restore is in progress.
	RestoringUncheckedReason = "RestoringUnchecked"
	// RestoreImpossibleReason: the backup cannot be restored. The message contains the cause.
	RestoreImpossibleReason = "NotPossible"
)

// BackupSpec configures backups of etcd and their store.
type BackupSpec struct {
	// store is the place of the backups.
	// +required
	Store etcdv1.BackupStore `json:"store,omitempty,omitzero"`

	// schedule is the schedule of backups in cron format, in UTC: minute, hour, day of month, month, day of week;
	// or @hourly, @daily, @weekly, @monthly, or for example @every 6h. If empty, backups are made on demand and
	// before upgrades.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.startsWith('@') || self.split(' ').filter(f, f != '').size() == 5",message="schedule must have five fields (minute, hour, day of month, month, day of week), or be one of @hourly, @daily, @weekly, @monthly, @every 6h"
	Schedule string `json:"schedule,omitempty"`

	// retention is the number of backups that are kept. When a new backup is complete, the oldest are removed,
	// except for the last one of each kind (scheduled, on demand, before an upgrade). Default: 7.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=60
	Retention *int32 `json:"retention,omitempty"`

	// beforeUpgrade makes a backup before the rollout of another Kubernetes version. The rollout waits for it.
	// Default: true. Set it to false to continue without a backup.
	// +optional
	BeforeUpgrade *bool `json:"beforeUpgrade,omitempty"`
}

// IsDefined reports whether backups are configured.
func (b BackupSpec) IsDefined() bool { return b.Store.IsDefined() }

// RestoreSpec names a backup to restore. All data that was written after the backup is lost. The restore happens
// once for each combination of name, folder and attempt.
type RestoreSpec struct {
	// name is the name of the backup in status.backups.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name,omitempty"`

	// store is the store that contains the backup. Default: the store of spec.backup.
	// +optional
	Store etcdv1.BackupStore `json:"store,omitempty,omitzero"`

	// folder is the folder of the backup in the store: namespace/name of the cluster of the backup. Default: the
	// folder of this cluster.
	// +optional
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=126
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Folder string `json:"folder,omitempty"`

	// attempt distinguishes this restore from an earlier restore of the same backup. A new value restores the
	// backup again.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^[-_.a-zA-Z0-9]+$`
	Attempt string `json:"attempt,omitempty"`

	// keys are the keys that the backup requires, as in its .json file in the store. They are not needed for a
	// backup in status.backups.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	Keys []etcdv1.BackupKey `json:"keys,omitempty"`

	// otherAuthorities allows a backup from before a rotation, with another certificate authority and service
	// account key than this cluster's. Service account tokens from that time are no longer valid. The encryption
	// key must be the same. Default: false.
	// +optional
	OtherAuthorities *bool `json:"otherAuthorities,omitempty"`
}

// IsDefined reports whether a backup is referenced.
func (r RestoreSpec) IsDefined() bool { return r.Name != "" }

// ID of the restore: the same as long as it is the same one.
func (r RestoreSpec) ID() string {
	id := r.Name
	if r.Folder != "" {
		id = r.Folder + "/" + id
	}
	if r.Attempt != "" {
		id += "#" + r.Attempt
	}
	return id
}

// BackupStatus describes a backup in the store.
type BackupStatus struct {
	// name is the name of the backup.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// trigger is the cause of the backup.
	// +optional
	Trigger etcdv1.BackupTrigger `json:"trigger,omitempty"`

	// request identifies the cause: the scheduled time, the value of the annotation, or the new version.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Request string `json:"request,omitempty"`

	// location is the location of the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Location string `json:"location,omitempty"`

	// time is the time at which the backup completed.
	// +required
	Time metav1.Time `json:"time,omitempty,omitzero"`

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

	// kubernetesVersion is the Kubernetes version of the cluster at the time of the backup.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`

	// sha256 is the checksum of the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`

	// keys are the keys that the backup requires. Keep them: the backup does not contain them.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	Keys []etcdv1.BackupKey `json:"keys,omitempty"`
}

package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

const (
	// BackupAnnotation asks for a backup: each value, whatever it is, is one. It is named in status.backups.
	BackupAnnotation = "controlplane.capstan.dev/backup"

	// RestoreAnnotation is on a control plane while it is restored, and on the Machine that begins with the backup;
	// RestoredAnnotation is on a control plane that was restored. Both say which restore it is. They outlive a move, which
	// loses the status: a backup is never restored twice.
	RestoreAnnotation  = "controlplane.capstan.dev/restore"
	RestoredAnnotation = "controlplane.capstan.dev/restored"

	// RestoreUncheckedAnnotation names a restore that no machine has checked the backup for before it began. We set it when
	// the cluster does not answer; users set it to restore a cluster that serves without a check, when no machine can do it.
	RestoreUncheckedAnnotation = "controlplane.capstan.dev/restore-unchecked"

	// DefaultBackupRetention is how many backups are kept.
	DefaultBackupRetention = 7

	// BackupSucceededCondition: the last backup that was due is in the store. Only with spec.backup.
	BackupSucceededCondition = "BackupSucceeded"
	// BackupSucceededReason, BackupFailedReason, NoBackupReason and BackupImpossibleReason are its reasons.
	BackupSucceededReason  = "Succeeded"
	BackupFailedReason     = "Failed"
	NoBackupReason         = "NoBackupYet"
	BackupImpossibleReason = "NotPossible"

	// RestoredCondition: what spec.restore asks for was done. Only with spec.restore.
	RestoredCondition = "Restored"
	// RestoredReason, CheckingReason (a machine looks at the backup before anything is removed), RestoringReason,
	// RestoringUncheckedReason (no machine could look) and RestoreImpossibleReason are its reasons.
	RestoredReason           = "Restored"
	CheckingReason           = "Checking"
	RestoringReason          = "Restoring"
	RestoringUncheckedReason = "RestoringUnchecked"
	RestoreImpossibleReason  = "NotPossible"
)

// BackupSpec says when etcd is backed up, and where the backups go.
type BackupSpec struct {
	// store of the backups.
	// +required
	Store etcdv1.BackupStore `json:"store,omitempty,omitzero"`

	// schedule of backups in the form of cron, in UTC: minute, hour, day of month, month, day of week; or @hourly, @daily,
	// @weekly, @monthly, @every 6h. Without it backups are made on demand and before upgrades.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.startsWith('@') || self.split(' ').filter(f, f != '').size() == 5",message="schedule must have five fields (minute, hour, day of month, month, day of week), or be one of @hourly, @daily, @weekly, @monthly, @every 6h"
	Schedule string `json:"schedule,omitempty"`

	// retention is how many backups are kept, whatever they were made for. The oldest are removed once another one is
	// complete, but the last one of each kind (scheduled, on demand, before an upgrade) stays. 7 when not set.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=60
	Retention *int32 `json:"retention,omitempty"`

	// beforeUpgrade makes a backup before another version of Kubernetes is rolled out, which waits for it. True when not
	// set. Set it to false to go on without one.
	// +optional
	BeforeUpgrade *bool `json:"beforeUpgrade,omitempty"`
}

// IsDefined says whether there are backups.
func (b BackupSpec) IsDefined() bool { return b.Store.IsDefined() }

// RestoreSpec names a backup that the cluster begins with again. Everything that was written after it is gone. It is done
// once for each name, folder and attempt.
type RestoreSpec struct {
	// name of the backup, as in status.backups.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name,omitempty"`

	// store that has the backup. That of spec.backup when not set.
	// +optional
	Store etcdv1.BackupStore `json:"store,omitempty,omitzero"`

	// folder of the backup in the store: namespace/name of the cluster that was backed up. This cluster's own when not set.
	// +optional
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=126
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Folder string `json:"folder,omitempty"`

	// attempt tells a restore from an earlier one of the same backup: another value restores it again.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^[-_.a-zA-Z0-9]+$`
	Attempt string `json:"attempt,omitempty"`

	// keys that the backup needs, as its .json file in the store names them. Not needed for a backup in status.backups.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	Keys []etcdv1.BackupKey `json:"keys,omitempty"`

	// otherAuthorities allows the certificate authority and the service account key of this cluster to be other ones than the
	// backup's: after they were rotated. Tokens of then are not valid any more. The encryption key is always needed.
	// +optional
	OtherAuthorities *bool `json:"otherAuthorities,omitempty"`
}

// IsDefined says whether a backup is named.
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

// BackupStatus is a backup that is in the store.
type BackupStatus struct {
	// name of the backup.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// trigger is why it was made.
	// +optional
	Trigger etcdv1.BackupTrigger `json:"trigger,omitempty"`

	// request is what was due, asked for, or the version to come.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Request string `json:"request,omitempty"`

	// location of the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Location string `json:"location,omitempty"`

	// time at which it was complete.
	// +required
	Time metav1.Time `json:"time,omitempty,omitzero"`

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

	// kubernetesVersion that the cluster ran.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`

	// sha256 of the snapshot.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`

	// keys that what is in the backup needs. Keep them: they are not in the backup.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	Keys []etcdv1.BackupKey `json:"keys,omitempty"`
}

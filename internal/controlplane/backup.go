package controlplane

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/conditions"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
)

// secretRetry is the interval at which Secrets of the user are read again: changes of Secrets without the label of the
// cluster are no events.
const secretRetry = 30 * time.Second

// backups is the step that makes backups of etcd.
type backups struct {
	*recorder
	workloads *workloads
	stores    *stores
}

// reconcile makes the backups that are due. An error is reported and the attempt is repeated, because the remediation of
// Machines must not wait for backups.
func (r *backups) reconcile(ctx context.Context, s *scope) (result, error) {
	again, err := r.backUp(ctx, s)
	if err == nil {
		return requeueAfter(again), nil
	}
	ctrl.LoggerFrom(ctx).Error(err, "Cannot make or read backups")
	r.showBackups(s, nil, err.Error())
	return requeueAfter(secretRetry), nil
}

// backUp starts the backups that are due and reports the existing ones. It sets s.UpgradeHeld to the reason why no other
// version can be rolled out yet.
func (r *backups) backUp(ctx context.Context, s *scope) (again time.Duration, err error) {
	spec, w := s.Object.Spec.Backup, model.BackupTarget{Since: s.Object.CreationTimestamp.Time}
	defer func() { measureBackups(s.Object, w) }()
	if !spec.IsDefined() || !s.Stacked() {
		return r.forgetBackups(ctx, s)
	}
	var problem string
	w.OnDemand, problem = model.OnDemandRequest(s.Object)
	if w.Schedule, err = model.ParseSchedule(spec.Schedule); err != nil {
		r.showBackups(s, nil, "spec.backup.schedule: "+err.Error())
		return 0, nil
	}
	if outdated, begun := model.VersionSpread(s.Machines.UnsortedList(), model.WantedVersion(s.Object)); outdated && s.Initialized() && ptr.Deref(spec.BeforeUpgrade, true) {
		w.UpgradeTo, w.Begun = model.WantedVersion(s.Object), begun
	}
	s.UpgradeHeld = model.UpgradeHold(w, model.BackupAttempts(s.Object.Status.Backups, nil), s.Now)
	f := s.Fleet()
	if f.Unknown != "" {
		return 0, nil // The last known state remains.
	}
	found, err := r.readBackups(ctx, s)
	if err != nil || found == nil {
		return model.UnhealthyRetry, err
	}
	if found, err = r.clearBackups(ctx, s, f, found); err != nil {
		return 0, err
	}
	attempts := model.BackupAttempts(s.Object.Status.Backups, found)
	s.UpgradeHeld = model.UpgradeHold(w, attempts, s.Now)
	next, again := model.NextBackup(w, attempts, s.Now)
	if next != nil {
		cannot, err := r.makeBackup(ctx, s, f, *next)
		if err != nil {
			return 0, err
		}
		if cannot != "" {
			again, problem = secretRetry, cannot
		}
	}
	r.showBackups(s, attempts, problem)
	return again, nil
}

// forgetBackups removes the credentials of the store from the workload cluster when the spec has no backups any more. The condition is
// the record of them, and is removed last.
func (r *backups) forgetBackups(ctx context.Context, s *scope) (again time.Duration, err error) {
	switch {
	case !conditions.Has(s.Object, controlplanev1.BackupSucceededCondition):
		return 0, nil
	case !s.answers():
		return model.UnhealthyRetry, nil
	}
	if err := r.stores.bringSecret(ctx, s, etcdv1.BackupSecretName, nil); err != nil {
		return 0, err
	}
	conditions.Delete(s.Object, controlplanev1.BackupSucceededCondition)
	return 0, nil
}

// showBackups sets the condition, and records an event when a failure changes it.
func (r *backups) showBackups(s *scope, attempts []model.BackupAttempt, problem string) {
	before := conditions.GetMessage(s.Object, controlplanev1.BackupSucceededCondition)
	c := model.BackupCondition(attempts, problem)
	conditions.Set(s.Object, c)
	if c.Status == metav1.ConditionFalse && before != c.Message {
		r.event(s, corev1.EventTypeWarning, "BackupFailed", "Backup", "%s", c.Message)
	}
}

// readBackups lists the EtcdBackups of the workload cluster and adds them to the status; nil when the workload cluster does
// not have the kind.
func (r *backups) readBackups(ctx context.Context, s *scope) ([]etcdv1.EtcdBackup, error) {
	ctx, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	found, installed, err := listBackups(ctx, s)
	if err != nil {
		return nil, err
	}
	if !installed {
		r.workloads.reinstall(s)
		r.showBackups(s, nil, "the cluster does not have the kind EtcdBackup yet")
		return nil, nil
	}
	for i := range found {
		model.RefuseReport(&found[i])
	}
	had := map[string]bool{}
	for _, b := range s.Object.Status.Backups {
		had[b.Name] = true
	}
	s.Object.Status.Backups = model.MergeBackups(s.Object.Status.Backups, found)
	for _, b := range s.Object.Status.Backups {
		if !had[b.Name] {
			r.event(s, corev1.EventTypeNormal, "BackupSucceeded", "Backup", "Backup %s (%s) is at %s", b.Name, b.Trigger, b.Location)
		}
	}
	if found == nil {
		found = []etcdv1.EtcdBackup{}
	}
	return found, r.workloads.watchWorkload(ctx, s, "etcdbackups", &etcdv1.EtcdBackup{})
}

// listBackups returns the EtcdBackups of the workload cluster. installed is false while the cluster does not have the kind.
func listBackups(ctx context.Context, s *scope) (found []etcdv1.EtcdBackup, installed bool, err error) {
	list := &etcdv1.EtcdBackupList{}
	err = reconciling.ListBounded(ctx, s.client, list)
	if apimeta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("cannot read EtcdBackups: %w", err)
	}
	return list.Items, true, nil
}

// deleteBackup deletes an EtcdBackup of the workload cluster, and not a successor of the same name.
func deleteBackup(ctx context.Context, s *scope, b *etcdv1.EtcdBackup) error {
	if err := client.IgnoreNotFound(s.client.Delete(ctx, b, client.Preconditions{UID: &b.UID})); err != nil {
		return fmt.Errorf("cannot delete the EtcdBackup %s: %w", b.Name, err)
	}
	return nil
}

// clearBackups deletes the EtcdBackups that are not needed any more, and returns the others.
func (r *backups) clearBackups(ctx context.Context, s *scope, f model.Fleet, found []etcdv1.EtcdBackup) ([]etcdv1.EtcdBackup, error) {
	known := s.Object.Status.Backups
	gone := model.SupersededBackups(known, found)
	var out []etcdv1.EtcdBackup
	for i := range found {
		b := &found[i]
		if !slices.Contains(gone, b.Name) && !model.IsLostBackup(b, known, f, s.Now) {
			out = append(out, *b)
			continue
		}
		if err := deleteBackup(ctx, s, b); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// makeBackup requests a backup from a machine. problem is the reason why that is not possible now.
func (r *backups) makeBackup(ctx context.Context, s *scope, f model.Fleet, want model.WantedBackup) (problem string, err error) {
	spec := s.Object.Spec.Backup
	members := model.BackupMembers(f, s.Workload.Members)
	if len(members) == 0 {
		return "no member of etcd is healthy", nil
	}
	credentials, problem, err := r.stores.storeSecret(ctx, s, spec.Store)
	if err != nil || problem != "" {
		return problem, err
	}
	if err := r.stores.bringSecret(ctx, s, etcdv1.BackupSecretName, credentials); err != nil {
		return "", err
	}
	keys, err := r.stores.backupKeys(ctx, s)
	if err != nil {
		return "", err
	}
	b := &etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: model.BackupName(s.Cluster, s.Now)}, Spec: etcdv1.EtcdBackupSpec{
		Member: members[0], Trigger: want.Trigger, Request: want.Request, Store: spec.Store, Folder: model.BackupFolder(s.Cluster),
		KubernetesVersion: s.LowestVersion(), Keys: keys,
		Remove: model.ExpiredBackups(s.Object.Status.Backups, int(ptr.Deref(spec.Retention, controlplanev1.DefaultBackupRetention)), want.Trigger, s.Object.Spec.Restore.Name),
	}}
	if err := s.client.Create(ctx, b); err != nil {
		return "", fmt.Errorf("cannot make the EtcdBackup %s: %w", b.Name, err)
	}
	ctrl.LoggerFrom(ctx).Info("Requested backup", "EtcdBackup", b.Name, "trigger", want.Trigger, "member", b.Spec.Member)
	return "", nil
}

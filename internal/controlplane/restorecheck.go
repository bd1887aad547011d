package controlplane

import (
	"context"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
)

// checkRestore decides whether the restore can start. While the cluster serves, one of its machines has to examine the backup
// first. Only the EtcdBackupCheck is stored.
func (r *restores) checkRestore(ctx context.Context, s *scope, way model.CheckWay, why string) (ready bool, unchecked string, again time.Duration, err error) {
	spec := s.Object.Spec.Restore
	switch {
	case way == model.CheckByNobody:
		return true, why, 0, nil
	case way == model.CheckLater:
		s.showRestored(metav1.ConditionFalse, controlplanev1.CheckingReason, fmt.Sprintf(
			"Waiting for a machine that checks the backup %s: %s. If this lasts %s, the restore starts without a check", spec.Name, why, model.Grace))
		return false, "", model.UnhealthyRetry, nil
	case s.Object.Annotations[controlplanev1.RestoreUncheckedAnnotation] == spec.ID():
		return true, "the annotation " + controlplanev1.RestoreUncheckedAnnotation + " disables the check", 0, nil
	case s.client == nil:
		s.showChecking(nil, "", "there is no connection to the cluster")
		return false, "", model.UnhealthyRetry, nil
	}
	found, err := r.readCheck(ctx, s)
	if apimeta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		r.workloads.reinstall(s)
		s.showChecking(nil, "", "the cluster does not have the kind EtcdBackupCheck yet")
		return false, "", model.UnhealthyRetry, nil
	}
	if err != nil {
		return false, "", 0, fmt.Errorf("cannot read EtcdBackupChecks: %w", err)
	}
	if found != nil && found.Status.Phase == etcdv1.CheckSucceeded {
		if problems := model.UnfitBackup(found.Status, s.RestoreSource.Keys, s.Object); len(problems) > 0 {
			r.refuseRestore(s, problems)
			return false, "", 0, nil
		}
		return true, "", 0, nil
	}
	if found != nil && found.Status.Phase == etcdv1.CheckFailed {
		r.refuseRestore(s, []string{fmt.Sprintf("the machine of the etcd member %s examined it: %s", found.Spec.Member, found.Status.Message)})
		return false, "", 0, nil
	}
	return false, "", model.UnhealthyRetry, r.makeCheck(ctx, s, found)
}

// readCheck returns the check of the present spec.restore; nil when there is none. It deletes former checks.
func (r *restores) readCheck(ctx context.Context, s *scope) (found *etcdv1.EtcdBackupCheck, err error) {
	list := &etcdv1.EtcdBackupCheckList{}
	if err := reconciling.ListBounded(ctx, s.client, list); err != nil {
		return nil, err
	}
	for i := range list.Items {
		c := &list.Items[i]
		if c.Name == model.CheckName(s.Object) && !model.CheckIsOutdated(c, s.Now) {
			found = c
		} else if err := r.removeCheck(ctx, s, c); err != nil {
			return nil, err
		}
	}
	return found, r.workloads.watchWorkload(ctx, s, "etcdbackupchecks", &etcdv1.EtcdBackupCheck{})
}

func (r *restores) removeCheck(ctx context.Context, s *scope, c *etcdv1.EtcdBackupCheck) error {
	if err := s.client.Delete(ctx, c, client.Preconditions{UID: &c.UID}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("cannot delete the EtcdBackupCheck %s: %w", c.Name, err)
	}
	return nil
}

// makeCheck requests a check of the backup from a machine, or from another machine if the first one does not start.
func (r *restores) makeCheck(ctx context.Context, s *scope, found *etcdv1.EtcdBackupCheck) error {
	f, problem := s.Fleet(), ""
	members := model.BackupMembers(f, s.Workload.Members)
	if len(members) == 0 {
		problem = "no member of etcd is healthy"
		if f.Unknown != "" {
			problem = f.Unknown
		}
	}
	member := model.NextCheck(found, members, s.Now)
	s.showChecking(found, member, problem)
	if member == "" {
		return nil
	}
	if found != nil {
		if err := r.removeCheck(ctx, s, found); err != nil {
			return err
		}
	}
	source := s.RestoreSource
	credentials, problem, err := r.stores.storeSecret(ctx, s, source.Store)
	if err != nil || problem != "" {
		return err // prepareRestore reports it.
	}
	if err := r.stores.bringSecret(ctx, s, etcdv1.RestoreSecretName, credentials); err != nil {
		return err
	}
	check := &etcdv1.EtcdBackupCheck{
		ObjectMeta: metav1.ObjectMeta{Name: model.CheckName(s.Object)},
		Spec:       etcdv1.EtcdBackupCheckSpec{Member: member, Backup: source.Name, Store: source.Store, Folder: source.Folder, SHA256: source.SHA256},
	}
	if err := s.client.Create(ctx, check); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("cannot make the EtcdBackupCheck %s: %w", check.Name, err)
	}
	return nil
}

// clearChecks removes the objects of checks from the workload cluster, if it can be reached. Remaining objects have no
// effect.
func (r *restores) clearChecks(ctx context.Context, s *scope) {
	if s.client == nil {
		return
	}
	_ = s.client.DeleteAllOf(ctx, &etcdv1.EtcdBackupCheck{})
	_ = r.stores.bringSecret(ctx, s, etcdv1.RestoreSecretName, nil)
}

func (s *scope) showChecking(found *etcdv1.EtcdBackupCheck, member, problem string) {
	spec := s.Object.Spec.Restore
	s.showRestored(metav1.ConditionFalse, controlplanev1.CheckingReason, model.CheckMessage(spec.Name, found, member, problem, controlplanev1.RestoreUncheckedAnnotation, spec.ID()))
}

// refuseRestore reports the reason why a backup is not restored.
func (r *restores) refuseRestore(s *scope, problems []string) {
	r.showImpossible(s, fmt.Sprintf("The backup %s cannot be restored: %s. Nothing was changed. Name another backup, or correct it and set spec.restore.attempt to another value",
		s.Object.Spec.Restore.Name, strings.Join(problems, "; ")))
}

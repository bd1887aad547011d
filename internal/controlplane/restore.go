package controlplane

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/stored"
)

// restoredMarker is a ConfigMap in the restored cluster with the restore that created it. It is read when the annotation of
// the control plane is lost, for example because the management cluster was restored.
const restoredMarker = "capstan-restored"

// restores is the step that takes a cluster back to a backup.
type restores struct {
	*clients
	*machineReader
	*machineWriter
	*annotator
	*recorder
	workloads *workloads
	stores    *stores
	machines  *machines
	// answered is the time when the API server of a cluster could use etcd last.
	answered *sightings
}

// reconcile takes the cluster back to the backup that spec.restore names, once. No other step may run meanwhile.
func (r *restores) reconcile(ctx context.Context, s *scope) (result, error) {
	spec := s.Object.Spec.Restore
	if !spec.IsDefined() || !s.Stacked() {
		return result{}, r.forgetRestore(ctx, s)
	}
	step, machines := s.Restoration().Next()
	if step == model.RestoreNone {
		s.showRestored(metav1.ConditionTrue, controlplanev1.RestoredReason, "")
		return result{}, r.annotate(ctx, s, controlplanev1.RestoreAnnotation, "")
	}
	if step != model.RestoreWait {
		// The next steps cannot be undone, so the decision reads the stored object.
		if current, err := r.readLive(ctx, s, controlplanev1.RestoreAnnotation, controlplanev1.RestoredAnnotation, controlplanev1.RestoreUncheckedAnnotation); err != nil || !current {
			return result{stop: true}, err
		}
		if step, machines = s.Restoration().Next(); step == model.RestoreNone {
			return result{stop: true}, nil // The cache will deliver the change.
		}
	}
	if step == model.RestoreBegin {
		return r.begin(ctx, s)
	}
	if problems, err := r.prepareRestore(ctx, s, false); err != nil {
		return result{stop: true}, err
	} else if len(problems) > 0 && step == model.RestoreCreate {
		return r.cannotRestore(s, step, problems), nil
	}
	out, err := r.restoreOn(ctx, s, step, machines)
	return restoring(out), err
}

// restoring stops the reconciliation: no other step may run during a restore.
func restoring(out result) result {
	out.stop = true
	out.blocked = cmp.Or(out.blocked, "the cluster is being restored")
	return out
}

// begin starts a restore after the check of the backup. Until then, a running cluster continues.
func (r *restores) begin(ctx context.Context, s *scope) (result, error) {
	id, err := r.readMarker(ctx, s)
	if err != nil {
		return result{stop: true}, err
	}
	if id == s.Object.Spec.Restore.ID() {
		return result{stop: true, requeueAfter: model.UnhealthyRetry}, r.finishRestore(ctx, s)
	}
	way, why := model.ChooseCheck(s.Fleet(), s.Readiness, s.Initialized(), s.Now.Sub(r.answered.last(client.ObjectKeyFromObject(s.Object), s.Object.UID, s.Now)))
	if way == model.CheckImpossible {
		return r.cannotRestore(s, model.RestoreBegin, []string{cmp.Or(conditions.GetMessage(s.Object, controlplanev1.KubeconfigAvailableCondition), why)}), nil
	}
	// The check on a machine compares the keys itself.
	if problems, err := r.prepareRestore(ctx, s, way == model.CheckByNobody && s.Initialized()); err != nil {
		return result{stop: true}, err
	} else if len(problems) > 0 {
		return r.cannotRestore(s, model.RestoreBegin, problems), nil
	}
	ready, unchecked, again, err := r.checkRestore(ctx, s, way, why)
	if err != nil || !ready {
		return requeueAfter(again), err
	}
	out, err := r.recordBegin(ctx, s, unchecked)
	return restoring(out), err
}

// recordBegin records that the restore has begun. unchecked is the reason why no machine has checked the backup; "" when one has.
func (r *restores) recordBegin(ctx context.Context, s *scope, unchecked string) (result, error) {
	spec := s.Object.Spec.Restore
	s.showRestoring("The restore starts", false, unchecked)
	if err := r.annotate(ctx, s, controlplanev1.RestoreAnnotation, spec.ID()); err != nil {
		return result{}, err
	}
	note := ""
	if unchecked != "" {
		note = spec.ID()
	}
	if err := r.annotate(ctx, s, controlplanev1.RestoreUncheckedAnnotation, note); err != nil {
		return result{}, err
	}
	ctrl.LoggerFrom(ctx).Info("Starting restore", "backup", spec.Name)
	r.event(s, corev1.EventTypeNormal, "RestoreBegins", "Restore", "The cluster goes back to the backup %s: every control plane machine is replaced%s", spec.Name, model.NotChecked(unchecked))
	return requeueAfter(model.JoiningRetry), nil
}

// forgetRestore removes the records of a restore that the spec does not ask for any more.
func (r *restores) forgetRestore(ctx context.Context, s *scope) error {
	if conditions.Has(s.Object, controlplanev1.RestoredCondition) {
		r.clearChecks(ctx, s)
		conditions.Delete(s.Object, controlplanev1.RestoredCondition)
	}
	// The next restore is a new one, regardless of the conditions of this one.
	if err := r.annotate(ctx, s, controlplanev1.RestoreUncheckedAnnotation, ""); err != nil {
		return err
	}
	return r.annotate(ctx, s, controlplanev1.RestoreAnnotation, "")
}

// cannotRestore reports the problems of the backup. A running cluster continues.
func (r *restores) cannotRestore(s *scope, step model.RestoreStep, problems []string) result {
	r.showImpossible(s, fmt.Sprintf("The backup %s cannot be restored: %s", s.Object.Spec.Restore.Name, strings.Join(problems, "; ")))
	if s.Initialized() && step == model.RestoreBegin {
		return requeueAfter(secretRetry)
	}
	return result{
		stop: true, requeueAfter: secretRetry,
		blocked: "the backup that spec.restore names cannot be restored; see the condition " + controlplanev1.RestoredCondition,
	}
}

// restoreOn does one step after the begin.
func (r *restores) restoreOn(ctx context.Context, s *scope, step model.RestoreStep, machines []*clusterv1.Machine) (result, error) {
	spec := s.Object.Spec.Restore
	show := func(format string, args ...any) {
		s.showRestoring(fmt.Sprintf(format, args...), s.Object.Annotations[controlplanev1.RestoreUncheckedAnnotation] == spec.ID(), "")
	}
	switch step {
	case model.RestoreRemove:
		message, again := s.FormerMachines(machines)
		show("%s", message)
		for _, m := range machines {
			if err := r.discard(ctx, s, m); err != nil {
				return result{}, err
			}
		}
		return requeueAfter(again), nil
	case model.RestoreCreate:
		show("The first machine is being created")
		return r.machines.createMachine(ctx, s, bootstrapv1.RoleInit)
	case model.RestoreWait:
		refused := ""
		if s.Readiness.Refused() {
			refused = s.Readiness.Problem()
		}
		show("%s", model.FirstMachineMessage(machines, spec.Name, why(machines[0]), refused))
		return requeueAfter(model.UnhealthyRetry), nil
	case model.RestoreFinish:
		if s.client == nil {
			show("The cluster serves again. The restore waits for Cluster API's connection to the cluster")
			return requeueAfter(model.UnhealthyRetry), nil
		}
		show("The cluster serves again. Stale Nodes are being deleted")
		return r.cleanUp(ctx, s)
	}
	return result{}, nil
}

// cleanUp deletes stale Nodes and EtcdBackups in the restored cluster, removes certificate authorities from before a rotation, and ends the
// restore. A rotation that is underway removes them at its end.
func (r *restores) cleanUp(ctx context.Context, s *scope) (result, error) {
	if err := r.removeStaleNodes(ctx, s); err != nil {
		return result{}, err
	}
	if err := r.removeFormerBackups(ctx, s); err != nil {
		return result{}, err
	}
	if s.Authority != nil && !s.Rotation().Underway() {
		if finished, err := finishRotation(ctx, s); err != nil || !finished {
			return requeueAfter(model.JoiningRetry), err
		}
	}
	if err := r.markRestored(ctx, s); err != nil {
		return result{}, err
	}
	r.clearChecks(ctx, s)
	return requeueAfter(model.JoiningRetry), r.finishRestore(ctx, s)
}

// showRestoring reports the progress of a restore; see model.RestoringCondition.
func (s *scope) showRestoring(message string, unchecked bool, why string) {
	reason, text := model.RestoringCondition(message, unchecked, why)
	s.showRestored(metav1.ConditionFalse, reason, text)
}

// showImpossible reports the reason why the backup cannot be restored, and records an event for each new reason.
func (r *restores) showImpossible(s *scope, message string) {
	before := conditions.GetMessage(s.Object, controlplanev1.RestoredCondition)
	s.showRestored(metav1.ConditionFalse, controlplanev1.RestoreImpossibleReason, message)
	if message != before {
		r.event(s, corev1.EventTypeWarning, "RestoreImpossible", "Restore", "%s", message)
	}
}

func (s *scope) showRestored(status metav1.ConditionStatus, reason, message string) {
	reconciling.SetCondition(s.Object, controlplanev1.RestoredCondition, status, reason, "%s", message)
}

// prepareRestore collects the input of the first machine, and its problems. blind: no machine can examine the backup before
// Machines are removed.
func (r *restores) prepareRestore(ctx context.Context, s *scope, blind bool) (problems []string, err error) {
	spec := s.Object.Spec.Restore
	keys, err := r.stores.backupKeys(ctx, s)
	if err != nil {
		return nil, err
	}
	known, store, problems := model.RestoreSource(s.Object, model.BackupFolder(s.Cluster), keys, blind)
	if _, problem, err := r.stores.storeSecret(ctx, s, store); err != nil {
		return nil, err
	} else if problem != "" {
		problems = append(problems, problem)
	}
	source := &bootstrapv1.RestoreSource{Name: spec.Name, Folder: spec.Folder, Store: store, Keys: keys, OtherAuthorities: spec.OtherAuthorities}
	if source.Folder == "" {
		source.Folder = model.BackupFolder(s.Cluster)
	}
	if known != nil {
		source.SHA256 = known.SHA256
	}
	s.RestoreSource = source
	return problems, nil
}

// discard deletes a former Machine, whose etcd and Node are not needed any more: it is not drained. A manager that has lost its leadership
// can come here late, when the Machine serves the restored cluster. So it is only deleted if it has not changed since it was read.
func (r *restores) discard(ctx context.Context, s *scope, m *clusterv1.Machine) error {
	before := m.DeepCopy()
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.ExcludeNodeDrainingAnnotation, "")
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.ExcludeWaitForNodeVolumeDetachAnnotation, "")
	delete(m.Annotations, controlplanev1.PreTerminateHookAnnotation)
	if !stored.Equal(before.Annotations, m.Annotations) {
		err := r.Client.Patch(ctx, m, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
		if apierrors.IsConflict(err) {
			return nil // It has changed, which is an event.
		}
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("cannot let the Machine %s go: %w", m.Name, err)
		}
	}
	if !m.DeletionTimestamp.IsZero() {
		return nil
	}
	return r.deleteMachine(ctx, s, m, "Restore")
}

// why returns the reason why the infrastructure of a Machine is not ready.
func why(m *clusterv1.Machine) string {
	if c := conditions.Get(m, clusterv1.InfrastructureReadyCondition); c != nil && c.Status == metav1.ConditionFalse {
		return c.Message
	}
	return ""
}

// removeStaleNodes deletes the Nodes of Machines that do not exist.
func (r *restores) removeStaleNodes(ctx context.Context, s *scope) error {
	list := &corev1.NodeList{}
	if err := s.client.List(ctx, list); err != nil {
		return fmt.Errorf("cannot list the Nodes of the restored cluster: %w", err)
	}
	all := &clusterv1.MachineList{}
	if err := r.LiveClient.List(ctx, all, reconciling.OfCluster(client.ObjectKeyFromObject(s.Cluster))); err != nil {
		return err
	}
	nodes, machines := map[string]map[string]string{}, map[string]bool{}
	for i := range list.Items {
		nodes[list.Items[i].Name] = list.Items[i].Annotations
	}
	for i := range all.Items {
		machines[all.Items[i].Name] = true
	}
	for _, name := range slices.Sorted(slices.Values(model.StaleNodes(nodes, s.Cluster.Namespace, machines))) {
		if err := client.IgnoreNotFound(s.client.Delete(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})); err != nil {
			return fmt.Errorf("cannot delete the Node %s, whose Machine does not exist: %w", name, err)
		}
	}
	return nil
}

// removeFormerBackups deletes the EtcdBackups that the restore has brought back and the status does not list: their files may have been
// removed from the store since. The status must not list them again. An empty status proves nothing: after the loss of the management
// cluster, these objects are the only list of the backups.
func (r *restores) removeFormerBackups(ctx context.Context, s *scope) error {
	known := s.Object.Status.Backups
	if len(known) == 0 {
		return nil
	}
	found, _, err := listBackups(ctx, s)
	if err != nil {
		return err
	}
	gone := model.SupersededBackups(known, found)
	for i := range found {
		if !slices.Contains(gone, found[i].Name) {
			continue
		}
		if err := deleteBackup(ctx, s, &found[i]); err != nil {
			return err
		}
	}
	return nil
}

func marker() *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: restoredMarker}}
}

// markRestored records in the cluster which restore created it.
func (r *restores) markRestored(ctx context.Context, s *scope) error {
	m := marker()
	if _, err := controllerutil.CreateOrPatch(ctx, s.client, m, func() error {
		m.Data = map[string]string{"restore": s.Object.Spec.Restore.ID()}
		return nil
	}); err != nil {
		return fmt.Errorf("cannot mark the cluster as restored: %w", err)
	}
	return nil
}

// readMarker returns the restore that created the cluster; "" without a restore, or when the cluster does not answer.
func (r *restores) readMarker(ctx context.Context, s *scope) (string, error) {
	if s.client == nil || !s.Restoration().Serves {
		return "", nil
	}
	m := marker()
	if err := s.client.Get(ctx, client.ObjectKeyFromObject(m), m); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("cannot ask the cluster whether it was restored: %w", err)
	}
	return m.Data["restore"], nil
}

// finishRestore records that the restore is complete.
func (r *restores) finishRestore(ctx context.Context, s *scope) error {
	if err := r.annotate(ctx, s, controlplanev1.RestoredAnnotation, s.Object.Spec.Restore.ID()); err != nil {
		return err
	}
	s.showRestored(metav1.ConditionTrue, controlplanev1.RestoredReason, "")
	ctrl.LoggerFrom(ctx).Info("Restored cluster", "backup", s.Object.Spec.Restore.Name)
	r.event(s, corev1.EventTypeNormal, "Restored", "Restore", "The cluster is back at the backup %s", s.Object.Spec.Restore.Name)
	return nil
}

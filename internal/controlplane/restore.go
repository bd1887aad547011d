package controlplane

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// restoredMarker is a ConfigMap in the restored cluster that says which restore made it. It is not needed as long as the
// control plane's annotation is there; a management cluster that is itself restored may have lost that.
const restoredMarker = "capstan-restored"

// reconcileRestore takes the cluster back to the backup that spec.restore names, once. busy says that nothing else is to be
// done meanwhile.
func (r *Reconciler) reconcileRestore(ctx context.Context, s *scope) (busy bool, again time.Duration, err error) {
	spec := s.controlPlane.Spec.Restore
	if !spec.IsDefined() || !s.stacked() {
		if conditions.Has(s.controlPlane, controlplanev1.RestoredCondition) {
			r.clearChecks(ctx, s)
			conditions.Delete(s.controlPlane, controlplanev1.RestoredCondition)
		}
		// The next restore is another one, whatever was said of this.
		if err := r.annotate(ctx, s, controlplanev1.RestoreUncheckedAnnotation, ""); err != nil {
			return false, 0, err
		}
		return false, 0, r.annotate(ctx, s, controlplanev1.RestoreAnnotation, "")
	}
	step, machines := s.restoring().next()
	if step == restoreNone {
		s.tellRestored(metav1.ConditionTrue, controlplanev1.RestoredReason, "")
		return false, 0, r.annotate(ctx, s, controlplanev1.RestoreAnnotation, "")
	}
	if step != restoreWait {
		// What follows cannot be taken back: what is stored decides.
		if current, err := r.readRestoring(ctx, s); err != nil || !current {
			return true, 0, err
		}
		if step, machines = s.restoring().next(); step == restoreNone {
			return true, 0, nil // The cache is about to tell.
		}
	}
	var way checkWay
	var why string
	if step == restoreBegin {
		if id, err := r.readMarker(ctx, s); err != nil || id == spec.ID() {
			return true, unhealthyRetry, r.finishRestore(ctx, s, err)
		}
		way, why = whoChecks(s.fleet(), s.answer, s.initialized(), now().Sub(r.answered.last(s.controlPlane.UID, now())))
	}
	// What a machine looks at tells its keys itself.
	if problems, err := r.prepareRestore(ctx, s, way == checkByNobody && s.initialized()); err != nil {
		return true, 0, err
	} else if len(problems) > 0 && (step == restoreBegin || step == restoreCreate) {
		s.tellRestored(metav1.ConditionFalse, controlplanev1.RestoreImpossibleReason, fmt.Sprintf("The backup %s cannot be restored: %s", spec.Name, strings.Join(problems, "; ")))
		if s.initialized() && step == restoreBegin {
			return false, secretRetry, nil // A cluster that runs goes on.
		}
		s.blocked = "the backup that spec.restore names cannot be restored; see the condition " + controlplanev1.RestoredCondition
		return true, secretRetry, nil
	}
	if step == restoreBegin {
		if ready, again, err := r.checkRestore(ctx, s, way, why); err != nil || !ready {
			return false, again, err // A cluster that runs goes on.
		}
	}
	again, err = r.restoreOn(ctx, s, step, machines)
	return true, again, err
}

// restoreOn does one step.
func (r *Reconciler) restoreOn(ctx context.Context, s *scope, step restoreStep, machines []*clusterv1.Machine) (again time.Duration, err error) {
	spec := s.controlPlane.Spec.Restore
	unchecked := step != restoreBegin && s.controlPlane.Annotations[controlplanev1.RestoreUncheckedAnnotation] == spec.ID()
	tell := func(format string, args ...any) {
		reason, text := restoringCondition(fmt.Sprintf(format, args...), unchecked, s.unchecked)
		s.tellRestored(metav1.ConditionFalse, reason, text)
	}
	s.blocked = "the cluster is being restored"
	switch step {
	case restoreNone:
	case restoreBegin:
		tell("It begins")
		if err := r.annotate(ctx, s, controlplanev1.RestoreAnnotation, spec.ID()); err != nil {
			return 0, err
		}
		note := ""
		if s.unchecked != "" {
			note = spec.ID()
		}
		if err := r.annotate(ctx, s, controlplanev1.RestoreUncheckedAnnotation, note); err != nil {
			return 0, err
		}
		r.event(s, corev1.EventTypeNormal, "RestoreBegins", "Restore", "The cluster goes back to the backup %s: every control plane machine is replaced%s", spec.Name, notChecked(s.unchecked))
		return joiningRetry, nil
	case restoreRemove:
		tell("%d control plane machines of before are removed", len(machines))
		for _, m := range machines {
			if err := r.discard(ctx, s, m); err != nil {
				return 0, err
			}
		}
	case restoreCreate:
		tell("The first machine is made")
		err := r.createMachine(ctx, s, true)
		return s.again, err
	case restoreWait:
		tell("%s", beginsWith(machines, spec.Name, why(machines[0])))
		return unhealthyRetry, nil
	case restoreFinish:
		tell("The cluster serves again, and is put in order")
		if s.workload.client == nil {
			return unhealthyRetry, nil
		}
		if err := r.removeStaleNodes(ctx, s); err != nil {
			return 0, err
		}
		if err := r.markRestored(ctx, s); err != nil {
			return 0, err
		}
		r.clearChecks(ctx, s)
		return joiningRetry, r.finishRestore(ctx, s, nil)
	}
	return 0, nil
}

func (s *scope) tellRestored(status metav1.ConditionStatus, reason, message string) {
	setCondition(s.controlPlane, controlplanev1.RestoredCondition, status, reason, message)
}

// restoring is what is known about the restore.
func (s *scope) restoring() restoring {
	return restoring{
		id:    s.controlPlane.Spec.Restore.ID(),
		began: s.controlPlane.Annotations[controlplanev1.RestoreAnnotation], done: s.controlPlane.Annotations[controlplanev1.RestoredAnnotation],
		machines: s.machines.SortedByCreationTimestamp(), outdated: s.outdated, serves: s.answer != nil && s.answer.ready && s.answer.err == nil,
	}
}

// readRestoring replaces what came from the cache by what is stored. current says that the spec has not changed since.
func (r *Reconciler) readRestoring(ctx context.Context, s *scope) (current bool, err error) {
	live := &controlplanev1.CapstanControlPlane{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(s.controlPlane), live); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	for _, name := range []string{controlplanev1.RestoreAnnotation, controlplanev1.RestoredAnnotation, controlplanev1.RestoreUncheckedAnnotation} {
		if live.Annotations[name] != s.controlPlane.Annotations[name] {
			return false, nil // An event follows.
		}
	}
	return r.readLive(ctx, s)
}

// prepareRestore finds out what the first machine needs, and what is wrong with it. blind says that nobody can look into the
// backup before machines are removed.
func (r *Reconciler) prepareRestore(ctx context.Context, s *scope, blind bool) (problems []string, err error) {
	spec := s.controlPlane.Spec.Restore
	keys, err := r.backupKeys(ctx, s)
	if err != nil {
		return nil, err
	}
	known, store, problems := restoreSource(s.controlPlane, backupFolder(s.cluster), keys, blind)
	if _, problem, err := r.storeSecret(ctx, s, store); err != nil {
		return nil, err
	} else if problem != "" {
		problems = append(problems, problem)
	}
	source := &bootstrapv1.RestoreSource{Name: spec.Name, Folder: spec.Folder, Store: store, Keys: keys, OtherAuthorities: spec.OtherAuthorities}
	if source.Folder == "" {
		source.Folder = backupFolder(s.cluster)
	}
	if known != nil {
		source.SHA256 = known.SHA256
	}
	s.restoreSource = source
	return problems, nil
}

// discard deletes a Machine of before, whose etcd and Node are of no use any more: it is not drained, and leaves nothing.
func (r *Reconciler) discard(ctx context.Context, s *scope, m *clusterv1.Machine) error {
	before := m.DeepCopy()
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.ExcludeNodeDrainingAnnotation, "")
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.ExcludeWaitForNodeVolumeDetachAnnotation, "")
	delete(m.Annotations, controlplanev1.PreTerminateHookAnnotation)
	if !equalJSON(before.Annotations, m.Annotations) {
		if err := r.Client.Patch(ctx, m, client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("cannot let the Machine %s go: %w", m.Name, err)
		}
	}
	if !m.DeletionTimestamp.IsZero() {
		return nil
	}
	return r.deleteMachine(ctx, s, m, "Restore")
}

// why is what a Machine tells about its start.
func why(m *clusterv1.Machine) string {
	if c := conditions.Get(m, clusterv1.InfrastructureReadyCondition); c != nil && c.Status == metav1.ConditionFalse {
		return c.Message
	}
	return ""
}

// removeStaleNodes deletes the Nodes of Machines that are not there any more.
func (r *Reconciler) removeStaleNodes(ctx context.Context, s *scope) error {
	list := &corev1.NodeList{}
	if err := s.workload.client.List(ctx, list); err != nil {
		return fmt.Errorf("cannot list the Nodes of the restored cluster: %w", err)
	}
	all := &clusterv1.MachineList{}
	if err := r.LiveClient.List(ctx, all, client.InNamespace(s.cluster.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: s.cluster.Name}); err != nil {
		return err
	}
	nodes, machines := map[string]map[string]string{}, map[string]bool{}
	for i := range list.Items {
		nodes[list.Items[i].Name] = list.Items[i].Annotations
	}
	for i := range all.Items {
		machines[all.Items[i].Name] = true
	}
	for _, name := range slices.Sorted(slices.Values(staleNodes(nodes, s.cluster.Namespace, machines))) {
		if err := client.IgnoreNotFound(s.workload.client.Delete(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})); err != nil {
			return fmt.Errorf("cannot delete the Node %s, whose Machine is gone: %w", name, err)
		}
	}
	return nil
}

func marker() *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: restoredMarker}}
}

// markRestored writes into the cluster which restore made it.
func (r *Reconciler) markRestored(ctx context.Context, s *scope) error {
	m := marker()
	if _, err := controllerutil.CreateOrPatch(ctx, s.workload.client, m, func() error {
		m.Data = map[string]string{"restore": s.controlPlane.Spec.Restore.ID()}
		return nil
	}); err != nil {
		return fmt.Errorf("cannot mark the cluster as restored: %w", err)
	}
	return nil
}

// restoredAs is the restore that the cluster that there is now comes from, or is about to; "" when it is none. Each Machine says
// which it was made for.
func (s *scope) restoredAs() string {
	known := s.restoring()
	if known.id != "" && (known.began == known.id || known.done == known.id) {
		return known.id
	}
	return known.done
}

// readMarker is the restore that made the cluster, if it can be asked; "" when it was none, or nobody answers.
func (r *Reconciler) readMarker(ctx context.Context, s *scope) (string, error) {
	if s.workload.client == nil || !s.restoring().serves {
		return "", nil
	}
	m := marker()
	if err := s.workload.client.Get(ctx, client.ObjectKeyFromObject(m), m); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("cannot ask the cluster whether it was restored: %w", err)
	}
	return m.Data["restore"], nil
}

// finishRestore writes down that the restore is done, for good.
func (r *Reconciler) finishRestore(ctx context.Context, s *scope, err error) error {
	if err != nil {
		return err
	}
	if err := r.annotate(ctx, s, controlplanev1.RestoredAnnotation, s.controlPlane.Spec.Restore.ID()); err != nil {
		return err
	}
	s.tellRestored(metav1.ConditionTrue, controlplanev1.RestoredReason, "")
	r.event(s, corev1.EventTypeNormal, "Restored", "Restore", "The cluster is back at the backup %s", s.controlPlane.Spec.Restore.Name)
	return nil
}

// mustBeGiven says that a key has to be that of the cluster which was backed up: another one would be of no use.
func (s *scope) mustBeGiven(purpose secret.Purpose) bool {
	spec := s.controlPlane.Spec.Restore
	if !spec.IsDefined() || s.initialized() {
		return false
	}
	return purpose == encryptionPurpose || (purpose == secret.ClusterCA || purpose == secret.ServiceAccount) && !ptr.Deref(spec.OtherAuthorities, false)
}

// encryptionPurpose stands for the encryption key, which Cluster API has no purpose for.
const encryptionPurpose = secret.Purpose("encryption")

func notGiven(name string) string {
	return fmt.Sprintf("the secret %s does not exist: spec.restore needs the one of the cluster that was backed up", name)
}

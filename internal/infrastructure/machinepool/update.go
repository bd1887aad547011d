package machinepool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/reconciling"
)

// Machines of a pool are updated in place with these writes:
//
//  1. MachinePool: Cluster API's annotation of an update in progress. The bootstrap provider renders the data of the update.
//  2. CapstanMachine: the annotation, the spec, the version, the name of the bootstrap data and the hash, in one patch. The
//     machine's controller carries out the update.
//  3. After the success: the annotation of the CapstanMachine is removed, and that of the MachinePool with the last one.
//
// The annotations are the record: after an interruption, the next reconcile continues.

// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigs,verbs=get

// updateRetry is the interval at which updates are looked at if no event announces their progress.
const updateRetry = 10 * time.Second

// desireUpdates reads the CapstanConfig of the pool if updates are allowed.
func (r *Reconciler) desireUpdates(ctx context.Context, s *scope) error {
	ref := s.machinePool.Spec.Template.Spec.Bootstrap.ConfigRef
	u := updateInput{policy: s.pool.Spec.RollingUpdate.InPlace, spec: s.pool.Spec.MachineTemplate.Spec}
	u.foreign = ref.Kind != bootstrapv1.ConfigKind || ref.APIGroup != bootstrapv1.GroupVersion.Group
	s.want.updating = u
	if u.foreign || !u.allowed() && !slices.ContainsFunc(s.members, member.isUpdating) {
		return nil
	}
	config := &bootstrapv1.CapstanConfig{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: s.pool.Namespace, Name: ref.Name}, config); err != nil {
		return client.IgnoreNotFound(err)
	}
	s.want.readConfig(config)
	return nil
}

// update carries out the plan of updates. A part that fails, for example without a connection to the workload cluster, holds no other one back.
func (r *Reconciler) update(ctx context.Context, s *scope, p updatePlan) error {
	byName := map[string]member{}
	for _, m := range s.members {
		byName[m.capstan.Name] = m
	}
	return errors.Join(
		r.uncordon(ctx, s, p.uncordon, byName),
		r.startUpdates(ctx, s, p.start, byName),
		forEach(p.finish, func(name string) error { return r.finishUpdate(ctx, byName[name].capstan) }),
	)
}

// startUpdates begins the updates of the machines whose Nodes are drained.
func (r *Reconciler) startUpdates(ctx context.Context, s *scope, names []string, byName map[string]member) error {
	ready, undrained := r.drained(ctx, s, names, byName)
	if len(ready) == 0 {
		return undrained
	}
	if err := r.announce(ctx, s, true); err != nil {
		return errors.Join(undrained, err)
	}
	r.event(s, "UpdatesStarted", "Update", "Updating %s in place to Kubernetes %s", strings.Join(ready, ", "), s.want.version)
	return errors.Join(undrained, forEach(ready, func(name string) error { return r.startUpdate(ctx, s, byName[name].capstan) }))
}

// announce writes or removes the annotation of the MachinePool.
func (r *Reconciler) announce(ctx context.Context, s *scope, wanted bool) error {
	_, has := s.machinePool.Annotations[clusterv1.UpdateInProgressAnnotation]
	if has == wanted {
		return nil
	}
	before := s.machinePool
	s.machinePool = before.DeepCopy() // not the cache's
	if wanted {
		metav1.SetMetaDataAnnotation(&s.machinePool.ObjectMeta, clusterv1.UpdateInProgressAnnotation, "")
	} else {
		delete(s.machinePool.Annotations, clusterv1.UpdateInProgressAnnotation)
	}
	return r.Client.Patch(ctx, s.machinePool, client.MergeFrom(before))
}

func (r *Reconciler) startUpdate(ctx context.Context, s *scope, m *infrav1.CapstanMachine) error {
	ctrl.LoggerFrom(ctx).Info("Updating a machine in place", "CapstanMachine", klog.KObj(m), "version", s.want.version)
	m = m.DeepCopy()
	return client.IgnoreNotFound(reconciling.Change(ctx, r.Client, m, func() {
		m.Spec = inplace.KeepIdentity(m.Spec, s.want.updating.spec)
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.UpdateInProgressAnnotation, "")
		for key, value := range s.want.annotations() {
			metav1.SetMetaDataAnnotation(&m.ObjectMeta, key, value)
		}
	}))
}

func (r *Reconciler) finishUpdate(ctx context.Context, m *infrav1.CapstanMachine) error {
	ctrl.LoggerFrom(ctx).Info("Updated a machine in place", "CapstanMachine", klog.KObj(m))
	m = m.DeepCopy()
	return client.IgnoreNotFound(reconciling.Change(ctx, r.Client, m, func() { delete(m.Annotations, clusterv1.UpdateInProgressAnnotation) }))
}

// recordConfig writes the parts of the CapstanConfig on machines that are up to date and lack them: those that were made before
// the pool allowed updates in place.
func (r *Reconciler) recordConfig(ctx context.Context, s *scope) error {
	if s.want.updating.config == nil || !s.want.updating.allowed() {
		return nil
	}
	config := s.want.updating.config.String()
	behind := slices.DeleteFunc(slices.Clone(s.members), func(m member) bool {
		annotations := m.capstan.Annotations
		return m.leaving() || m.isUpdating() || annotations[infrav1.MachineBootstrapSecretAnnotation] != s.want.secret || annotations[infrav1.MachineConfigAnnotation] == config
	})
	return forEach(behind, func(m member) error {
		machine := m.capstan.DeepCopy()
		return client.IgnoreNotFound(reconciling.Change(ctx, r.Client, machine, func() {
			metav1.SetMetaDataAnnotation(&machine.ObjectMeta, infrav1.MachineConfigAnnotation, config)
		}))
	})
}

// setUpdating shows the progress of updates in place. A pool that allows none has no condition.
func setUpdating(s *scope, p updatePlan, instances []instance) {
	if !s.want.updating.allowed() && !slices.ContainsFunc(s.members, member.isUpdating) {
		conditions.Delete(s.pool, infrav1.UpdatingCondition)
		return
	}
	remaining, current := 0, ""
	for _, i := range instances {
		if i.behind && !i.leaving {
			remaining++
		}
		if i.update.busy() && current == "" {
			current = fmt.Sprintf("machine %s: %s", i.name, cmp.Or(i.update.text, "the update waits for its host"))
		}
	}
	current = cmp.Or(current, s.draining)
	switch {
	case current != "":
		reconciling.SetCondition(s.pool, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.UpdateRunningReason, "%d of %d machines remain; %s", remaining, len(instances), current)
	case p.why != "":
		reconciling.SetCondition(s.pool, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateFailedReason, "%d of %d machines remain; %s", remaining, len(instances), p.why)
	case p.waits != "":
		reconciling.SetCondition(s.pool, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.WaitingForUpdateReason, "%d of %d machines remain; %s", remaining, len(instances), p.waits)
	default:
		reconciling.SetCondition(s.pool, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.NotUpdatingReason, "")
	}
}

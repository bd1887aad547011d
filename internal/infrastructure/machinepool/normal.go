package machinepool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/order"
	"capstan.dev/capstan/internal/reconciling"
)

// reconcileNormal runs the steps of the contract in their order.
func (r *Reconciler) reconcileNormal(ctx context.Context, s *scope) (ctrl.Result, error) {
	if err := r.identify(ctx, s); err != nil {
		return ctrl.Result{}, err
	}
	if err := r.shareReplicas(ctx, s); err != nil {
		return ctrl.Result{}, err
	}
	if err := r.observe(ctx, r.Client, s); err != nil {
		return ctrl.Result{}, err
	}
	again, err := r.follow(ctx, s)
	setStatus(s, time.Now())
	return ctrl.Result{RequeueAfter: again}, err
}

// observe reads the machines of the pool with c, and computes its desired state.
func (r *Reconciler) observe(ctx context.Context, c client.Reader, s *scope) (err error) {
	if s.members, s.orphans, err = find(ctx, c, s); err != nil {
		return err
	}
	return r.desire(ctx, s)
}

// follow takes the next steps towards the desired state. It returns the time until others are due without an event; zero if none are.
func (r *Reconciler) follow(ctx context.Context, s *scope) (time.Duration, error) {
	if why := waitsFor(s); why != nil {
		s.invalid = why
		return 0, nil // Cluster and MachinePool are watched.
	}
	// Metadata that the API server refuses holds nothing else back.
	s.trouble = errors.Join(r.propagateMetadata(ctx, s), r.recordConfig(ctx, s))
	s.next = decide(s.observed, time.Now())
	acts := !s.next.empty()
	if acts {
		if err := r.act(ctx, s); err != nil {
			return 0, errors.Join(s.trouble, err)
		}
	}
	if s.trouble != nil {
		return afterTrouble(ctx, s.trouble, s.next.again)
	}
	updating := slices.ContainsFunc(s.members, member.isUpdating)
	if !acts { // s.members does not contain the updates that act has begun.
		if err := r.announce(ctx, s, updating); err != nil {
			return 0, err
		}
	}
	// Only time makes a Node that is ready one that has been ready for long enough.
	again := s.next.again
	if updating || s.draining != "" || s.next.updates.waits != "" {
		again = order.Sooner(again, updateRetry)
	}
	return again, nil
}

// afterTrouble returns the time until the next attempt of steps that failed. It returns a conflict as an error, which the next attempt solves,
// and each error while the manager ends. Other causes can last. They are logged, and the next attempt follows soon: after repeated errors it
// could be many minutes away.
func afterTrouble(ctx context.Context, trouble error, again time.Duration) (time.Duration, error) {
	if apierrors.IsConflict(trouble) || ctx.Err() != nil {
		return 0, trouble
	}
	ctrl.LoggerFrom(ctx).Error(trouble, "A step of the pool failed")
	return order.Sooner(again, updateRetry), nil
}

// identify writes the pool's id before its first machine is made (MP-03).
func (r *Reconciler) identify(ctx context.Context, s *scope) error {
	if s.pool.Spec.ID != "" && s.pool.Spec.ProviderID != "" {
		return nil
	}
	before := s.pool.DeepCopy()
	if s.pool.Spec.ID == "" {
		s.pool.Spec.ID = uuid.NewString()
	}
	if s.pool.Spec.ProviderID == "" {
		s.pool.Spec.ProviderID = infrav1.PoolProviderIDPrefix + s.pool.Spec.ID
	}
	return r.record(ctx, s, before)
}

// record writes the spec before the steps that depend on it.
func (r *Reconciler) record(ctx context.Context, s *scope, before *infrav1.CapstanMachinePool) error {
	patch, err := reconciling.Record(ctx, r.Client, r.LiveClient, before, s.pool)
	if err != nil {
		s.pool.Spec, s.pool.Annotations = before.Spec, before.Annotations
		return err
	}
	s.patch = patch
	return nil
}

// shareReplicas copies the pool's replicas to the MachinePool while another component manages them, as the annotation
// cluster.x-k8s.io/replicas-managed-by requires. The initial value is that of the MachinePool.
func (r *Reconciler) shareReplicas(ctx context.Context, s *scope) error {
	before := s.pool.DeepCopy()
	if ownReplicas(s.machinePool, s.pool) {
		return r.record(ctx, s, before)
	}
	if !annotations.ReplicasManagedByExternalAutoscaler(s.machinePool) {
		return nil
	}
	if ptr.Deref(s.machinePool.Spec.Replicas, -1) == *s.pool.Spec.Replicas {
		return nil
	}
	mp := s.machinePool
	s.machinePool = mp.DeepCopy() // not the cache's
	s.machinePool.Spec.Replicas = ptr.To(*s.pool.Spec.Replicas)
	return r.Client.Patch(ctx, s.machinePool, client.MergeFrom(mp))
}

// ownReplicas gives the pool the replicas of its MachinePool when another component begins to manage them, and removes them when none does:
// the next one begins with the number of its time. Replicas of a user's manifest stay. It reports a change of the pool.
func ownReplicas(mp *clusterv1.MachinePool, pool *infrav1.CapstanMachinePool) bool {
	managed := annotations.ReplicasManagedByExternalAutoscaler(mp)
	_, copied := pool.Annotations[infrav1.PoolReplicasCopiedAnnotation]
	switch {
	case managed && pool.Spec.Replicas == nil:
		pool.Spec.Replicas = ptr.To(ptr.Deref(mp.Spec.Replicas, 1))
		metav1.SetMetaDataAnnotation(&pool.ObjectMeta, infrav1.PoolReplicasCopiedAnnotation, "")
	case !managed && copied:
		pool.Spec.Replicas = nil
		delete(pool.Annotations, infrav1.PoolReplicasCopiedAnnotation)
	default:
		return false
	}
	return true
}

// waitsFor returns the missing prerequisites of the pool.
func waitsFor(s *scope) *invalid {
	if why := checkReplicas(s.want.replicas); why != nil {
		return why
	}
	if !ptr.Deref(s.cluster.Status.Initialization.InfrastructureProvisioned, false) {
		return &invalid{infrav1.WaitingForClusterInfrastructureReason, "Waiting for the cluster's network and control plane endpoint"}
	}
	if s.want.secret == "" {
		return &invalid{infrav1.WaitingForBootstrapDataReason, "Waiting for the bootstrap provider to create the bootstrap data of the MachinePool"}
	}
	return nil
}

// act repeats the decision with the objects in the API server, because the cache may lack the writes of the last reconcile or of a killed
// manager, and carries it out. s.trouble has the errors of its steps. Those of the reads are returned: nothing was done.
func (r *Reconciler) act(ctx context.Context, s *scope) error {
	live := &scope{pool: &infrav1.CapstanMachinePool{}}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(s.pool), live.pool); err != nil {
		return err
	}
	if err := r.findOwners(ctx, r.LiveClient, live); err != nil {
		return err
	}
	if live.machinePool == nil || live.cluster == nil || !live.pool.DeletionTimestamp.IsZero() || annotations.IsPaused(live.cluster, live.pool) {
		return nil // The change is an event.
	}
	if err := r.observe(ctx, r.LiveClient, live); err != nil {
		return err
	}
	s.observed = live.observed
	if waitsFor(live) != nil {
		return nil
	}
	s.next = decide(live.observed, time.Now())
	s.trouble = errors.Join(s.trouble, r.carryOut(ctx, live, s.next))
	s.draining = live.draining
	return nil
}

// actions are the next steps of a pool. The next decision contains those that failed.
type actions struct {
	// machines are Machines to delete because of their CapstanMachines: orphans and strays.
	machines []clusterv1.Machine
	plan     plan
	updates  updatePlan
	// instances are those that the plans are about.
	instances []instance
	// again is the time until the passing of time alone changes an instance; zero if it does not.
	again time.Duration
}

// decide returns the next steps. It depends only on its arguments.
func decide(o observed, now time.Time) *actions {
	out := &actions{machines: append(slices.Clone(o.orphans), strays(o.members)...)}
	out.instances, out.again = instances(o.members, o.want, now)
	out.plan = makePlan(o.want, out.instances)
	out.updates = planUpdates(o.want, out.plan.after(out.instances))
	return out
}

func (a *actions) empty() bool {
	return len(a.machines) == 0 && a.plan.empty() && a.updates.empty()
}

// carryOut takes the steps. Machines are deleted before new ones are created, so that a full host has room. A step that fails, for example
// because of a ResourceQuota, holds no other one back.
func (r *Reconciler) carryOut(ctx context.Context, s *scope, a *actions) error {
	return errors.Join(
		r.deleteMachines(ctx, a.machines),
		r.deleteMembers(ctx, s, a.plan.remove, a.plan.causes.String()),
		r.createMembers(ctx, s, a.plan.create),
		r.update(ctx, s, a.updates),
	)
}

// strays returns Machines whose CapstanMachine is being deleted, for example by hand, while they are not. They are
// deleted as well, so that the Node is removed.
func strays(members []member) []clusterv1.Machine {
	var out []clusterv1.Machine
	for _, m := range members {
		if m.machine != nil && m.machine.DeletionTimestamp.IsZero() && !m.capstan.DeletionTimestamp.IsZero() {
			out = append(out, *m.machine)
		}
	}
	return out
}

func (r *Reconciler) event(s *scope, reason, action, format string, args ...any) {
	r.recorder.Eventf(s.pool, nil, corev1.EventTypeNormal, reason, action, "%s", fmt.Sprintf(format, args...))
}

package cluster

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/reconciling"
)

// Cluster API core tries to connect to a cluster at the moment when its infrastructure is provisioned,
// gives up after 5 s, and tries again 30 s later; until then no Machine gets its Node. On a busy box an API server
// needs longer than 5 s. So machines may boot as soon as network and endpoint exist, and `provisioned` is held back
// until the first API server answers. A machine boots faster when all that it needs exists, and when it does not share
// its processors with others that boot, so the boot is held back too. The waits are bounded. Only speed rests on them (ALL-15). From the
// moment when machines may boot, CapstanCluster.AllowsBoot is true, and what they use does not change.
const (
	// prepareWait bounds the wait for the kubeconfig and for the first Machine's bootstrap data.
	prepareWait = 10 * time.Second
	// turnWait bounds the wait for other clusters of the host that boot.
	turnWait = 2 * time.Minute
	// answerWait bounds the wait for the first API server.
	answerWait = time.Minute
)

func provisioned(c *infrav1.CapstanCluster) bool {
	return ptr.Deref(c.Status.Initialization.Provisioned, false)
}

// provision sets initialization.provisioned when the infrastructure exists (IC-02).
func (r *Reconciler) provision(ctx context.Context, s *scope) (ctrl.Result, error) {
	if ptr.Deref(s.cluster.Status.Initialization.ControlPlaneInitialized, false) {
		r.slots.release(client.ObjectKeyFromObject(s.capstan))
	}
	if provisioned(s.capstan) {
		return ctrl.Result{}, nil
	}
	// Events end the wait of a cluster. The timer limits it, in case no event comes.
	if wait, err := r.provisionDelay(ctx, s); err != nil || wait > 0 {
		return ctrl.Result{RequeueAfter: wait}, err
	}
	s.capstan.Status.Initialization.Provisioned = ptr.To(true)
	ctrl.LoggerFrom(ctx).Info("Cluster infrastructure is provisioned", "endpoint", s.capstan.Spec.ControlPlaneEndpoint.String())
	r.recorder.Eventf(s.capstan, nil, corev1.EventTypeNormal, clusterv1.ProvisionedReason, "Provision",
		"Machine network %s, control plane endpoint %s", s.capstan.Spec.Network.MachineCIDR, s.capstan.Spec.ControlPlaneEndpoint.String())
	return ctrl.Result{}, nil
}

// provisionDelay returns how much longer provisioned is held back, at most; zero ends it.
func (r *Reconciler) provisionDelay(ctx context.Context, s *scope) (time.Duration, error) {
	answered := answers(s.cluster, r.reported(s))
	if !answered && !conditions.IsTrue(s.capstan, infrav1.BootAllowedCondition) {
		if wait, err := r.bootDelay(ctx, s); err != nil || wait > 0 {
			return wait, err
		}
	}
	reconciling.SetCondition(s.capstan, infrav1.BootAllowedCondition, metav1.ConditionTrue, infrav1.BootAllowedReason, "")
	booting := time.Since(conditions.GetLastTransitionTime(s.capstan, infrav1.BootAllowedCondition).Time)
	return remaining(s.cluster.Spec.ControlPlaneRef, answered || r.StrictContract, booting, answerWait), nil
}

// bootDelay returns how much longer no machine may boot, at most.
func (r *Reconciler) bootDelay(ctx context.Context, s *scope) (time.Duration, error) {
	if r.StrictContract {
		return 0, nil
	}
	prepared, err := r.prepared(ctx, s)
	if err != nil {
		return 0, err
	}
	waited := time.Since(conditions.GetLastTransitionTime(s.capstan, infrav1.LoadBalancerReadyCondition).Time)
	if wait := remaining(s.cluster.Spec.ControlPlaneRef, prepared, waited, prepareWait); wait > 0 {
		reconciling.SetCondition(s.capstan, infrav1.BootAllowedCondition, metav1.ConditionFalse, infrav1.PreparingFirstMachineReason,
			"Waiting for the kubeconfig and the bootstrap data of the first control plane machine")
		return wait, nil
	}
	if !needsTurn(s.capstan, prepared, waited) {
		return 0, nil
	}
	wait := r.slots.acquire(client.ObjectKeyFromObject(s.capstan), s.capstan.Spec.LoadBalancer.HostName, r.slotsOf(s), time.Now())
	if wait > 0 {
		reconciling.SetCondition(s.capstan, infrav1.BootAllowedCondition, metav1.ConditionFalse, infrav1.WaitingForOtherClustersReason,
			"Waiting for other clusters that boot on host %s", s.capstan.Spec.LoadBalancer.HostName)
	}
	return wait, nil
}

// needsTurn reports whether a cluster waits for others of the load balancer's host. With an external endpoint that host is unknown.
func needsTurn(c *infrav1.CapstanCluster, prepared bool, waited time.Duration) bool {
	return prepared && waited < turnWait && !external(c)
}

// remaining returns how much longer a cluster is held back, with a limit from the start of the wait; zero ends it. CapstanControlPlane
// prepares all that it can as soon as it sees the endpoint, and creates its first machine before `provisioned`. Other control planes may do
// so later, and are never waited for.
func remaining(controlPlane clusterv1.ContractVersionedObjectReference, done bool, waited, limit time.Duration) time.Duration {
	if done || controlPlane.GroupKind() != controlplanev1.ControlPlaneGroupKind {
		return 0
	}
	return max(0, limit-waited)
}

// reported is the load balancer as its host reports it, or nil.
func (r *Reconciler) reported(s *scope) *hostpb.LoadBalancer {
	if host := r.Pool.Connected(s.capstan.Spec.LoadBalancer.HostName); host != nil {
		return host.LoadBalancer(s.capstan.Spec.ID)
	}
	return nil
}

// answers reports whether an API server of a cluster answers: core has this from the control plane provider, and the load
// balancer checks it.
func answers(cluster *clusterv1.Cluster, lb *hostpb.LoadBalancer) bool {
	return ptr.Deref(cluster.Status.Initialization.ControlPlaneInitialized, false) ||
		owner.Same(lb, cluster) && slices.ContainsFunc(lb.GetBackends(), (*hostpb.Backend).GetHealthy)
}

// prepared reports whether the cluster's first machine could boot now: there is a kubeconfig, and a control
// plane Machine with bootstrap data.
func (r *Reconciler) prepared(ctx context.Context, s *scope) (bool, error) {
	err := r.SecretCachingClient.Get(ctx, client.ObjectKey{
		Namespace: s.cluster.Namespace, Name: secret.Name(s.cluster.Name, secret.Kubeconfig),
	}, &corev1.Secret{})
	if err != nil {
		return false, client.IgnoreNotFound(err)
	}
	machines := &clusterv1.MachineList{}
	if err := r.Client.List(ctx, machines, reconciling.ControlPlaneOf(s.key()), client.UnsafeDisableDeepCopy); err != nil {
		return false, err
	}
	for i := range machines.Items {
		if isPreparedControlPlane(&machines.Items[i]) {
			return true, nil
		}
	}
	return false, nil
}

// slotsOf returns how many clusters may boot on the load balancer's host at the same time, because an API server needs
// two processors to start in time.
func (r *Reconciler) slotsOf(s *scope) int {
	host := r.Pool.Connected(s.capstan.Spec.LoadBalancer.HostName)
	if host == nil || host.Info() == nil {
		return 1
	}
	return max(1, int(host.Info().GetCpus())/2)
}

package cluster

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// Cluster API core tries to connect to a cluster at the moment when its infrastructure is provisioned,
// gives up after 5 s, and tries again 30 s later; until then no Machine gets its Node. A cluster gains
// half a minute when all that is left after `provisioned` is to boot its first machine, and when that
// machine does not share its processors with others that boot. So `provisioned` is held back for a
// bounded time. Only speed rests on it (ALL-15).
const (
	// prepareWait bounds the wait for the kubeconfig and for the first Machine's bootstrap data.
	prepareWait = 10 * time.Second
	// turnWait bounds the wait for other clusters of the host that boot.
	turnWait = 2 * time.Minute
)

// provision sets initialization.provisioned when the infrastructure exists (IC-02).
func (r *Reconciler) provision(ctx context.Context, s *scope) (ctrl.Result, error) {
	key := client.ObjectKeyFromObject(s.capstan)
	if ptr.Deref(s.cluster.Status.Initialization.ControlPlaneInitialized, false) {
		r.turns.done(key)
	}
	if ptr.Deref(s.capstan.Status.Initialization.Provisioned, false) {
		return ctrl.Result{}, nil
	}
	prepared, err := r.prepared(ctx, s)
	if err != nil {
		return ctrl.Result{}, err
	}
	waited := time.Since(conditions.GetLastTransitionTime(s.capstan, infrav1.LoadBalancerReadyCondition).Time)
	if wait := holdForPreparation(s.cluster.Spec.ControlPlaneRef, prepared || r.StrictContract, waited); wait > 0 {
		// The Secret and the Machine are the events. The timer bounds the wait, because they may never appear.
		return ctrl.Result{RequeueAfter: wait}, nil
	}
	if prepared && waited < turnWait {
		if wait := r.turns.take(key, s.capstan.Spec.LoadBalancer.HostName, r.slots(s), time.Now()); wait > 0 {
			// The end of another cluster's turn is the event; the timer is for a turn that is never ended.
			return ctrl.Result{RequeueAfter: wait}, nil
		}
	}
	s.capstan.Status.Initialization.Provisioned = ptr.To(true)
	ctrl.LoggerFrom(ctx).Info("Cluster infrastructure is provisioned", "endpoint", s.capstan.Spec.ControlPlaneEndpoint.String())
	r.recorder.Eventf(s.capstan, nil, corev1.EventTypeNormal, clusterv1.ProvisionedReason, "Provision",
		"Machine network %s, control plane endpoint %s", s.capstan.Spec.Network.MachineCIDR, s.capstan.Spec.ControlPlaneEndpoint.String())
	return ctrl.Result{}, nil
}

// holdForPreparation returns how much longer provisioned is held back; zero ends it. CapstanControlPlane
// prepares all that it can as soon as it sees the endpoint; other control planes do so later, and are
// never waited for.
func holdForPreparation(controlPlane clusterv1.ContractVersionedObjectReference, prepared bool, waited time.Duration) time.Duration {
	if prepared || controlPlane.Kind != "CapstanControlPlane" {
		return 0
	}
	return max(0, prepareWait-waited)
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
	err = r.Client.List(ctx, machines, reconciling.OfCluster(s.key()))
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return slices.ContainsFunc(machines.Items, func(m clusterv1.Machine) bool { return isPreparedControlPlane(&m) }), err
}

// slots returns how many clusters may boot on the load balancer's host at the same time, because an API server needs
// two processors to start in time.
func (r *Reconciler) slots(s *scope) int {
	host := r.connected(s.capstan.Spec.LoadBalancer.HostName)
	if host == nil || host.Info() == nil {
		return 1
	}
	return max(1, int(host.Info().GetCpus())/2)
}

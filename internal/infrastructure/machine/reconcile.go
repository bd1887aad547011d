package machine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
)

// reconcileNormal runs the steps of the contract in their order.
func (r *Reconciler) reconcileNormal(ctx context.Context, s *scope) error {
	return reconciling.IgnoreWaiting(reconciling.RunSteps(ctx, s, r.waitForPrerequisites, r.assign, r.ensureMachine))
}

// ensureMachine makes the host create the machine once, and reports its state.
func (r *Reconciler) ensureMachine(ctx context.Context, s *scope) error {
	if err := r.refuseCopy(ctx, s); err != nil {
		return err
	}
	if s.capstan.Spec.ProviderID != "" {
		// Known from spec alone, also after a move (ALL-12).
		markProvisioned(s, "")
	}
	host, err := r.chosenHost(ctx, s)
	if err != nil {
		return err
	}
	observed := host.Machine(s.capstan.Spec.ID)
	if observed == nil && s.capstan.Spec.ProviderID != "" {
		reportLost(s, host.Name())
		return nil
	}
	end, err := r.turn(ctx, s, host.Name(), showWait)
	if err != nil {
		return err
	}
	defer end()
	if observed != nil {
		r.promises.end(client.ObjectKeyFromObject(s.capstan))
	} else if observed, err = r.makeMachine(ctx, s, host); err != nil {
		return err
	}
	if conditions.GetReason(s.capstan, infrav1.UpdatingCondition) != infrav1.NoCapacityReason {
		r.unplaced.Delete(client.ObjectKeyFromObject(s.capstan))
	}
	if err := r.claim(ctx, s, host, observed); err != nil {
		return err
	}
	s.capstan.Spec.HostID = cmp.Or(s.capstan.Spec.HostID, host.ID()) // machines from before the field existed
	if err := r.startAgain(ctx, s, host); err != nil {
		return err
	}
	r.report(ctx, s, observed)
	if s.capstan.Spec.ProviderID == "" {
		return nil
	}
	return r.update(ctx, s, host, observed)
}

// refuseCopy stops an object whose id belongs to another machine of its host. The condition does not name a machine of another namespace.
func (r *Reconciler) refuseCopy(ctx context.Context, s *scope) error {
	other := r.onItsHost(s.capstan).GetSpec()
	if other == nil || owner.Same(other, s.capstan) {
		return nil
	}
	holder := "a machine of another namespace"
	if other.GetNamespace() == s.capstan.Namespace {
		holder = "machine " + other.GetName()
	}
	ctrl.LoggerFrom(ctx).V(4).Info("The object is a copy of another machine", "CapstanHost", klog.KRef("", s.capstan.Spec.HostName), "id", s.capstan.Spec.ID,
		"machine", klog.KRef(other.GetNamespace(), other.GetName()))
	reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineRefusedReason,
		"On host %s, the id %s belongs to %s. This object must be a copy of it, so Capstan changes nothing. Delete this object, and create copies without spec.id and spec.providerID",
		s.capstan.Spec.HostName, s.capstan.Spec.ID, holder)
	return reconciling.ErrWaiting // A deleted id is never used again, so only the deletion of the object remains.
}

// chosenHost returns the connected host of the machine. It waits while the host is away, or while another host has its name.
func (r *Reconciler) chosenHost(ctx context.Context, s *scope) (*connections.Host, error) {
	host := r.Pool.Connected(s.capstan.Spec.HostName)
	if host == nil {
		return nil, r.hostUnreachable(ctx, s)
	}
	if why := hostselection.Mismatch(host.Name(), s.capstan.Spec.HostID, host.ID()); why != "" {
		reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionUnknown, infrav1.MachineHostMismatchReason, "%s", why)
		return nil, reconciling.ErrWaiting // A change of the CapstanHost is the event.
	}
	return host, nil
}

// reportLost reports that the host has lost a machine that it had. A new machine with the same name would be another machine:
// the owner decides about that.
func reportLost(s *scope, host string) {
	reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineLostReason,
		"Host %s no longer has the machine: its disk is lost. Delete the Machine to replace it", host)
	conditions.Delete(s.capstan, infrav1.ServicesHealthyCondition)
}

// report copies the state of the machine into the object. The first time that the machine runs, it gets its providerID.
func (r *Reconciler) report(ctx context.Context, s *scope, observed *hostpb.Machine) {
	r.observe(s, observed.GetStatus())
	s.again = showCertificates(s.capstan, observed.GetStatus(), time.Now())
	if s.capstan.Spec.ProviderID == "" && observed.GetStatus().GetPhase() == hostpb.MachineStatus_RUNNING {
		s.capstan.Spec.ProviderID = infrav1.ProviderIDPrefix + s.capstan.Spec.ID
		ctrl.LoggerFrom(ctx).Info("Machine runs", "CapstanHost", klog.KRef("", s.capstan.Spec.HostName), "providerID", s.capstan.Spec.ProviderID)
		r.recorder.Eventf(s.capstan, nil, corev1.EventTypeNormal, clusterv1.ProvisionedReason, "Provision", "Runs on host %s", s.capstan.Spec.HostName)
	}
	if s.capstan.Spec.ProviderID != "" {
		markProvisioned(s, observed.GetSpec().GetFailureDomain())
	}
}

// claim records on the host that the machine's object is here, if it came with a move or is older than this record. It also
// confirms a machine that waits after an absence of its host, unless the machine is being replaced.
func (r *Reconciler) claim(ctx context.Context, s *scope, host *connections.Host, observed *hostpb.Machine) error {
	if observed.GetStatus().GetUnconfirmed() && !s.machine.DeletionTimestamp.IsZero() {
		return nil
	}
	id, err := connections.ManagementCluster(ctx, r.Client)
	if err != nil {
		return err
	}
	if err := host.Claim(ctx, observed, id); err != nil && connections.Code(err) != codes.FailedPrecondition {
		return fmt.Errorf("record on host %s that this management cluster has the machine: %s", host.Name(), connections.Message(err))
	}
	return nil // a machine whose record is damaged has nothing to write to
}

// startAgain passes on the request to start a failed machine. A request that the host refuses is not repeated.
func (r *Reconciler) startAgain(ctx context.Context, s *scope, host *connections.Host) error {
	if _, ok := s.capstan.Annotations[infrav1.MachineStartAnnotation]; !ok {
		return nil
	}
	m := s.capstan
	_, err := host.StartMachine(ctx, &hostpb.StartMachineRequest{Id: m.Spec.ID, Namespace: m.Namespace, Name: m.Name})
	switch connections.Code(err) {
	case codes.OK:
	case codes.Unavailable, codes.DeadlineExceeded, codes.Internal:
		return fmt.Errorf("start the machine on host %s: %s", host.Name(), connections.Message(err))
	default:
		r.recorder.Eventf(m, nil, corev1.EventTypeWarning, infrav1.MachineRefusedReason, "Start", "Host %s does not start the machine: %s", host.Name(), connections.PublicMessage(err))
	}
	delete(m.Annotations, infrav1.MachineStartAnnotation)
	return nil
}

// hostUnreachable keeps the state of the machine, which may still run. A manager that has just started has no
// connections. Until it has tried to connect, the previous conditions remain. Otherwise the state of every machine
// would be unknown for a moment.
func (r *Reconciler) hostUnreachable(ctx context.Context, s *scope) error {
	var err error
	if host := r.Pool.Get(s.capstan.Spec.HostName); host != nil {
		err = host.ConnectionError()
	} else if err = r.Client.Get(ctx, client.ObjectKey{Name: s.capstan.Spec.HostName}, &infrav1.CapstanHost{}); err == nil {
		err = connections.ErrConnecting
	}
	if err == nil || errors.Is(err, connections.ErrConnecting) && conditions.Has(s.capstan, infrav1.MachineRunningCondition) {
		return reconciling.ErrWaiting // The connection is an event.
	}
	reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionUnknown, infrav1.MachineHostUnreachableReason,
		"Host %s is not connected: %s", s.capstan.Spec.HostName, err)
	return reconciling.ErrWaiting
}

// markProvisioned sets the fields that the contract requires (IM-03, IM-04). failureDomain is empty if it is unknown.
func markProvisioned(s *scope, failureDomain string) {
	st := &s.capstan.Status
	st.Initialization.Provisioned = ptr.To(true)
	showAddresses(s.capstan)
	if failureDomain != "" {
		st.FailureDomain = failureDomain
	}
}

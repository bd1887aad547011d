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
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

// errWaiting ends a reconcile that an event will continue. A condition names the event.
var errWaiting = errors.New("waiting")

// bootstrapKey is the Secret's key of the bootstrap data (BC-02).
const bootstrapKey = "value"

// reconcileNormal runs the steps of the contract in their order. Each step completes, or sets a condition that names the missing
// prerequisite.
func (r *Reconciler) reconcileNormal(ctx context.Context, s *scope) error {
	for _, step := range []func(context.Context, *scope) error{
		r.waitForPrerequisites, r.assign, r.ensureMachine,
	} {
		if err := step(ctx, s); errors.Is(err, errWaiting) {
			return nil
		} else if err != nil {
			return err
		}
	}
	return nil
}

// waitForPrerequisites waits for the cluster's infrastructure and the bootstrap data (IM-05). A machine
// that was made needs neither.
func (r *Reconciler) waitForPrerequisites(ctx context.Context, s *scope) error {
	if s.capstan.Spec.ProviderID != "" {
		return nil
	}
	if provisioned, err := r.hasInfrastructure(ctx, s); err != nil {
		return err
	} else if !provisioned {
		set(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForClusterInfrastructureReason,
			"%s", r.missingInfrastructure(s.cluster))
		return errWaiting
	}
	name, err := r.dataSecretName(ctx, s)
	if err != nil {
		return err
	}
	if name == "" {
		set(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForBootstrapDataReason,
			"Waiting for the bootstrap provider to create the bootstrap data")
		return errWaiting
	}
	return nil
}

// hasInfrastructure reports whether the cluster has the infrastructure that a machine needs to boot. By default the CapstanCluster shows
// this before it is provisioned: the package cluster explains the reason.
func (r *Reconciler) hasInfrastructure(ctx context.Context, s *scope) (bool, error) {
	if ptr.Deref(s.cluster.Status.Initialization.InfrastructureProvisioned, false) {
		return true, nil
	}
	if !r.bootsAhead(s.cluster) {
		return false, nil
	}
	c, err := r.capstanCluster(ctx, s)
	return err == nil && c.AllowsBoot(), client.IgnoreNotFound(err)
}

// bootsAhead reports whether machines boot as soon as the CapstanCluster allows it, before the Cluster is provisioned.
func (r *Reconciler) bootsAhead(c *clusterv1.Cluster) bool {
	return !r.StrictContract && c.Spec.InfrastructureRef.Kind == "CapstanCluster"
}

// missingInfrastructure names the field for which hasInfrastructure waits.
func (r *Reconciler) missingInfrastructure(c *clusterv1.Cluster) string {
	if r.bootsAhead(c) {
		return "Waiting until the CapstanCluster allows the boot: see its condition " + infrav1.BootAllowedCondition
	}
	return fmt.Sprintf("Waiting for status.initialization.infrastructureProvisioned of Cluster %s: see the conditions of its infrastructure, %s %s",
		c.Name, c.Spec.InfrastructureRef.Kind, c.Spec.InfrastructureRef.Name)
}

// recorded returns a decision that a pool recorded for its machine, because core gives the Machine of a pool neither bootstrap data nor a
// failure domain, and a version only after its Node exists. The annotations of other machines come from templates of users, and do not
// count: the owner of the Machine decides.
func recorded(s *scope, annotation string) string {
	if _, ok := s.machine.Labels[clusterv1.MachinePoolNameLabel]; !ok {
		return ""
	}
	return s.capstan.Annotations[annotation]
}

// kubernetesVersion returns the version that the pool recorded, which an update in place changes before the Node has it, or that of the
// Machine.
func kubernetesVersion(s *scope) string {
	return cmp.Or(recorded(s, infrav1.MachineVersionAnnotation), s.machine.Spec.Version)
}

// wantedFailureDomain returns the failure domain that the pool recorded, or that of the Machine.
func wantedFailureDomain(s *scope) string {
	return cmp.Or(recorded(s, infrav1.MachineFailureDomainAnnotation), s.machine.Spec.FailureDomain)
}

// dataSecretName returns the name in the Machine. For a Machine of a pool it is the name that the pool recorded, else
// that of the MachinePool.
func (r *Reconciler) dataSecretName(ctx context.Context, s *scope) (string, error) {
	if name := ptr.Deref(s.machine.Spec.Bootstrap.DataSecretName, ""); name != "" {
		return name, nil
	}
	if name := recorded(s, infrav1.MachineBootstrapSecretAnnotation); name != "" {
		return name, nil
	}
	if _, ok := s.machine.Labels[clusterv1.MachinePoolNameLabel]; !ok {
		return "", nil
	}
	pool, err := util.GetMachinePoolByLabels(ctx, r.Client, s.machine.Namespace, s.machine.Labels)
	if err != nil || pool == nil {
		return "", err
	}
	return ptr.Deref(pool.Spec.Template.Spec.Bootstrap.DataSecretName, ""), nil
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
	set(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineRefusedReason,
		"On host %s, the id %s belongs to %s. This object must be a copy of it, so Capstan changes nothing. Delete this object, and create copies without spec.id and spec.providerID",
		s.capstan.Spec.HostName, s.capstan.Spec.ID, holder)
	return errWaiting // A deleted id is never used again, so only the deletion of the object remains.
}

// chosenHost returns the connected host of the machine. It waits while the host is away, or while another host has its name.
func (r *Reconciler) chosenHost(ctx context.Context, s *scope) (*connections.Host, error) {
	host := r.Pool.Connected(s.capstan.Spec.HostName)
	if host == nil {
		return nil, r.hostUnreachable(ctx, s)
	}
	if why := hostselection.Mismatch(host.Name(), s.capstan.Spec.HostID, host.ID()); why != "" {
		set(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionUnknown, infrav1.MachineHostMismatchReason, "%s", why)
		return nil, errWaiting // A change of the CapstanHost is the event.
	}
	return host, nil
}

// reportLost reports that the host has lost a machine that it had. A new machine with the same name would be another machine:
// the owner decides about that.
func reportLost(s *scope, host string) {
	set(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineLostReason,
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
	id, err := hostselection.ManagementCluster(ctx, r.Client)
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
		r.recorder.Eventf(m, nil, corev1.EventTypeWarning, infrav1.MachineRefusedReason, "Start", "Host %s does not start the machine: %s", host.Name(), connections.Message(err))
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
		return errWaiting // The connection is an event.
	}
	set(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionUnknown, infrav1.MachineHostUnreachableReason,
		"Host %s is not connected: %s", s.capstan.Spec.HostName, err)
	return errWaiting
}

// makeMachine calls the host to create the machine. A refusal is reported and retried when that can help: when memory
// became free (an event), after a while (an error), or with another address.
func (r *Reconciler) makeMachine(ctx context.Context, s *scope, host *connections.Host) (*hostpb.Machine, error) {
	if err := r.confirmAddress(ctx, s); err != nil {
		return nil, err
	}
	data, err := r.bootstrapData(ctx, s)
	if err != nil {
		return nil, err
	}
	spec, err := r.desired(ctx, s)
	if err != nil {
		return nil, err
	}
	if spec.Volumes, err = r.ensureVolumes(ctx, s, host); err != nil {
		return nil, err
	}
	managementCluster, err := hostselection.ManagementCluster(ctx, r.Client)
	if err != nil {
		return nil, err
	}
	r.unplaced.Store(client.ObjectKeyFromObject(s.capstan), nil)
	r.promises.note(s.capstan)
	// After a refusal, the call makes no promise of memory. Its withdrawal would be an event that leads to another call
	// at once.
	if conditions.GetReason(s.capstan, infrav1.MachineRunningCondition) != infrav1.MachineRefusedReason {
		host.Promise(spec.GetId(), connections.Resources{
			CPUs: spec.GetCpus(), Memory: spec.GetMemoryBytes(), Disk: spec.GetDiskBytes(), Devices: connections.CDIDevices(spec.GetDevices()),
		})
	}
	observed, err := host.EnsureMachine(ctx, &hostpb.EnsureMachineRequest{Spec: spec, BootstrapData: data, ManagementCluster: managementCluster})
	if err == nil {
		return observed, nil
	}
	host.Release(spec.GetId())
	set(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineRefusedReason,
		"Host %s refused the machine: %s", host.Name(), connections.PublicMessage(err))
	switch connections.Code(err) {
	case codes.AlreadyExists:
		if addressTaken(err, s.capstan) {
			return nil, r.assignOtherAddress(ctx, s)
		}
	case codes.ResourceExhausted, codes.InvalidArgument:
		// The host reports free memory as an event. The other refusals need a change of spec.
		r.recorder.Eventf(s.capstan, nil, corev1.EventTypeWarning, infrav1.MachineRefusedReason, "Provision", "%s", connections.Message(err))
		return nil, errWaiting
	}
	return nil, fmt.Errorf("machine on host %s: %w", host.Name(), err)
}

// bootstrapData reads from the API server, because the data is needed once and is not in the cache.
func (r *Reconciler) bootstrapData(ctx context.Context, s *scope) ([]byte, error) {
	name, err := r.dataSecretName(ctx, s)
	if err != nil {
		return nil, err
	}
	secret := &corev1.Secret{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: s.capstan.Namespace, Name: name}, secret); err != nil {
		set(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForBootstrapDataReason,
			"Cannot read Secret %s with the bootstrap data: %s", name, err)
		return nil, err
	}
	if len(secret.Data[bootstrapKey]) == 0 {
		set(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForBootstrapDataReason,
			"Secret %s has no bootstrap data under the key %q", name, bootstrapKey)
		return nil, fmt.Errorf("the Secret %s has no key %q", name, bootstrapKey)
	}
	return secret.Data[bootstrapKey], nil
}

// desired is the machine as the host shall make it.
func (r *Reconciler) desired(ctx context.Context, s *scope) (*hostpb.MachineSpec, error) {
	capstanCluster, err := r.capstanCluster(ctx, s)
	if err != nil {
		return nil, err
	}
	host, err := r.host(ctx, s)
	if err != nil {
		return nil, err
	}
	if err := checkOverlay(s, capstanCluster, host); err != nil {
		return nil, err
	}
	network, err := r.network(ctx, s, capstanCluster, host)
	if err != nil {
		return nil, err
	}
	m := s.capstan
	spec := &hostpb.MachineSpec{
		Id: m.Spec.ID, Namespace: m.Namespace, Name: m.Name, Cluster: s.cluster.Name,
		Network: network,
		Cpus:    m.Spec.CPUs, MemoryBytes: memory(m), Image: image(m),
		DiskBytes:         diskSize(m),
		PidsLimit:         cmp.Or(m.Spec.PidsLimit, infrav1.DefaultMachinePidsLimit),
		KubernetesVersion: kubernetesVersion(s),
		ProviderId:        infrav1.ProviderIDPrefix + m.Spec.ID,
		FailureDomain:     placement.FailureDomain(host),
		ControlPlane:      util.IsControlPlaneMachine(s.machine),
		HostMounts:        hostMounts(m),
		Devices:           machineDevices(m),
	}
	for _, a := range m.Spec.Network.Addresses {
		spec.Addresses = append(spec.Addresses, &hostpb.Address{Address: a.Address, Prefix: a.Prefix, Gateway: a.Gateway})
	}
	return spec, nil
}

// checkOverlay prevents that the machine's host makes a network that spans hosts before the CapstanCluster allows the boot.
// The Cluster may have been provisioned with another CapstanCluster: a new one could name the network of another tenant.
func checkOverlay(s *scope, c *infrav1.CapstanCluster, host *infrav1.CapstanHost) error {
	if c.Spec.Network.Overlay.VNI == 0 {
		return nil
	}
	if !c.AllowsBoot() {
		set(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForClusterInfrastructureReason,
			"Waiting for the network of CapstanCluster %s: see its conditions", c.Name)
		return fmt.Errorf("CapstanCluster %s does not allow the boot yet", c.Name) // No event: the Cluster was provisioned before.
	}
	if host.Spec.TunnelAddress == "" {
		set(s.capstan, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason,
			"CapstanHost %s has no spec.tunnelAddress, and the cluster's network spans hosts: set it, or delete the Machine", host.Name)
		return errWaiting // A change of the CapstanHost is the event.
	}
	return nil
}

// capstanCluster is the infrastructure of the machine's cluster.
func (r *Reconciler) capstanCluster(ctx context.Context, s *scope) (*infrav1.CapstanCluster, error) {
	ref := s.cluster.Spec.InfrastructureRef
	if ref.Kind != "CapstanCluster" {
		return nil, fmt.Errorf("cluster %s has infrastructure of kind %q: CapstanMachines need a CapstanCluster", s.cluster.Name, ref.Kind)
	}
	c := &infrav1.CapstanCluster{}
	return c, r.Client.Get(ctx, client.ObjectKey{Namespace: s.cluster.Namespace, Name: ref.Name}, c)
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

func set(m *infrav1.CapstanMachine, condition string, status metav1.ConditionStatus, reason, format string, args ...any) {
	conditions.Set(m, metav1.Condition{Type: condition, Status: status, Reason: reason, Message: fmt.Sprintf(format, args...)})
}

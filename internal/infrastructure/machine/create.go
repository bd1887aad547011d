package machine

import (
	"cmp"
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/reconciling"
)

// bootstrapKey is the Secret's key of the bootstrap data (BC-02).
const bootstrapKey = "value"

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
	managementCluster, err := connections.ManagementCluster(ctx, r.Client)
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
	reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineRefusedReason,
		"Host %s refused the machine: %s", host.Name(), connections.PublicMessage(err))
	switch connections.Code(err) {
	case codes.AlreadyExists:
		if addressTaken(err, s.capstan) {
			return nil, r.assignOtherAddress(ctx, s)
		}
	case codes.ResourceExhausted, codes.InvalidArgument:
		// The host reports free memory as an event. The other refusals need a change of spec.
		r.recorder.Eventf(s.capstan, nil, corev1.EventTypeWarning, infrav1.MachineRefusedReason, "Provision", "%s", connections.PublicMessage(err))
		return nil, reconciling.ErrWaiting
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
		reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForBootstrapDataReason,
			"Cannot read Secret %s with the bootstrap data: %s", name, err)
		return nil, err
	}
	if len(secret.Data[bootstrapKey]) == 0 {
		reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForBootstrapDataReason,
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
		reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForClusterInfrastructureReason,
			"Waiting for the network of CapstanCluster %s: see its conditions", c.Name)
		return fmt.Errorf("CapstanCluster %s does not allow the boot yet", c.Name) // No event: the Cluster was provisioned before.
	}
	if host.Spec.TunnelAddress == "" {
		reconciling.SetCondition(s.capstan, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason,
			"CapstanHost %s has no spec.tunnelAddress, and the cluster's network spans hosts: set it, or delete the Machine", host.Name)
		return reconciling.ErrWaiting // A change of the CapstanHost is the event.
	}
	return nil
}

// capstanCluster is the infrastructure of the machine's cluster.
func (r *Reconciler) capstanCluster(ctx context.Context, s *scope) (*infrav1.CapstanCluster, error) {
	ref := s.cluster.Spec.InfrastructureRef
	if ref.Kind != infrav1.ClusterKind {
		return nil, fmt.Errorf("cluster %s has infrastructure of kind %q: CapstanMachines need a CapstanCluster", s.cluster.Name, ref.Kind)
	}
	c := &infrav1.CapstanCluster{}
	return c, r.Client.Get(ctx, client.ObjectKey{Namespace: s.cluster.Namespace, Name: ref.Name}, c)
}

package machine

import (
	"cmp"
	"context"
	"fmt"

	"github.com/google/uuid"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"sigs.k8s.io/cluster-api/util"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/reconciling"
)

// assign gives the machine an id, a host and addresses, and writes all three to spec in one patch before the first side
// effect. It continues when the cache shows the write: see confirmAddress.
func (r *Reconciler) assign(ctx context.Context, s *scope) error {
	spec := &s.capstan.Spec
	if spec.ID == "" || spec.HostName == "" || len(spec.Network.Addresses) == 0 {
		claimed, err := r.claimAddresses(ctx, s)
		if err != nil {
			return err
		}
		if err := r.decide(ctx, s, claimed); err != nil {
			return err
		}
		s.recorded = true
		return reconciling.ErrWaiting
	}
	if err := r.adoptClaims(ctx, s); err != nil {
		return err
	}
	if err := r.checkHost(ctx, s); err != nil {
		return err
	}
	reconciling.SetCondition(s.capstan, infrav1.HostAssignedCondition, metav1.ConditionTrue, infrav1.HostAssignedReason, "")
	reconciling.SetCondition(s.capstan, infrav1.AddressesAssignedCondition, metav1.ConditionTrue, infrav1.AddressesAssignedReason, "")
	return nil
}

// checkHost refuses a forbidden host in spec, whichever client wrote it (ALL-18), until the machine is created. A
// running machine stays on its host even if that host would not be chosen any more.
func (r *Reconciler) checkHost(ctx context.Context, s *scope) error {
	m := s.capstan
	if m.Spec.ProviderID != "" || owner.Same(r.onItsHost(m).GetSpec(), m) {
		return nil
	}
	capstanCluster, err := r.capstanCluster(ctx, s)
	if err != nil {
		return err
	}
	usable, err := r.usable(ctx, s, capstanCluster)
	if err != nil {
		return err
	}
	permissions, err := hostselection.Permissions(ctx, r.Client, m, capstanCluster, usable)
	if err != nil {
		return err
	}
	allowed, lan := permissions[m.Spec.HostName], placement.LANOf(capstanCluster, m.Spec.Network.Addresses)
	if why := cmp.Or(allowed.LANRefusal(m.Namespace, lan), allowed.Refusal(m.Namespace, m.Spec.HostMounts, m.Spec.Devices)); why != "" {
		reconciling.SetCondition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.HostNotAllowedReason, "spec.hostName is CapstanHost %s, which %s", m.Spec.HostName, why)
		return reconciling.ErrWaiting // A change of the CapstanHost is the event.
	}
	return nil
}

// onItsHost returns the machine with this id in the last report of the host, or nil. It can belong to another owner:
// see package owner.
func (r *Reconciler) onItsHost(m *infrav1.CapstanMachine) *hostpb.Machine {
	if host := r.Pool.Get(m.Spec.HostName); host != nil {
		return host.Machine(m.Spec.ID)
	}
	return nil
}

// decide chooses and records.
func (r *Reconciler) decide(ctx context.Context, s *scope, claimed []infrav1.InterfaceAddress) error {
	capstanCluster, err := r.capstanCluster(ctx, s)
	if err != nil {
		return err
	}
	before := s.capstan.DeepCopy()
	end, err := r.readVolumes(ctx, s)
	if err != nil {
		return err
	}
	defer end()
	if err := r.choose(ctx, s, capstanCluster, claimed); err != nil {
		return err
	}
	if err := r.record(ctx, s, before); err != nil {
		key := client.ObjectKeyFromObject(s.capstan)
		r.takeBack(key)
		r.chosen.release(key)
		return err
	}
	return nil
}

// choose sets host and addresses, for one machine at a time. The host reports its memory late, so the placement of the
// next machine must include the resources that were promised to this one. All namespaces wait for the lock, so nothing that takes the
// longer the more objects a namespace has is read from the API server here.
func (r *Reconciler) choose(ctx context.Context, s *scope, capstanCluster *infrav1.CapstanCluster, claimed []infrav1.InterfaceAddress) error {
	spec := &s.capstan.Spec
	addresses := claimed
	if len(addresses) == 0 {
		addresses = spec.Network.Addresses
	}
	if len(addresses) == 0 && r.reserved.pausing(s.capstan.Namespace) {
		return searchLater(s)
	}
	r.placing.Lock()
	defer r.placing.Unlock()
	if err := checkLANAddresses(s, capstanCluster, addresses); err != nil {
		return err
	}
	host, err := r.chooseHost(ctx, s, capstanCluster, addresses)
	if err != nil {
		return err
	}
	r.unplaced.Delete(client.ObjectKeyFromObject(s.capstan)) // It has room. Only its host can refuse it: see makeMachine.
	if len(addresses) == 0 {
		if addresses, err = r.chooseAddress(ctx, s, capstanCluster); err != nil {
			return err
		}
	}
	if spec.ID == "" {
		spec.ID = uuid.NewString()
	}
	spec.HostName, spec.HostID, spec.Network.Addresses = host.Name(), host.ID(), addresses
	r.promise(s.capstan, host, connections.Resources{
		CPUs: spec.CPUs, Memory: memory(s.capstan), Disk: diskSize(s.capstan), Devices: connections.CDIDevices(machineDevices(s.capstan)),
	})
	r.chosen.note(s.cluster, s.capstan)
	return nil
}

// record writes the decision. The change of spec is the event for the next step. After a failed write the decision is
// dropped, so that for example the id does not reach the API server with the status.
func (r *Reconciler) record(ctx context.Context, s *scope, before *infrav1.CapstanMachine) error {
	patch, err := reconciling.Record(ctx, r.Client, r.LiveClient, before, s.capstan)
	if err != nil {
		before.Spec.DeepCopyInto(&s.capstan.Spec)
		return err
	}
	s.patch = patch
	ctrl.LoggerFrom(ctx).Info("Assigned a host and addresses", "CapstanHost", klog.KRef("", s.capstan.Spec.HostName),
		"id", s.capstan.Spec.ID, "addresses", s.capstan.Spec.Network.Addresses)
	r.frame.Wrote(s.capstan, s.capstan.ResourceVersion)
	return nil
}

// usable are the hosts that the machine may have; only the one that spec names, if it names one.
func (r *Reconciler) usable(ctx context.Context, s *scope, capstanCluster *infrav1.CapstanCluster) ([]infrav1.CapstanHost, error) {
	wanted, selectors := s.capstan.Spec.HostName, []*metav1.LabelSelector{capstanCluster.Spec.HostSelector, s.capstan.Spec.HostSelector}
	if wanted == "" {
		return hostselection.Usable(ctx, r.Client, s.capstan.Namespace, selectors...)
	}
	usable, err := hostselection.UsableHost(ctx, r.Client, wanted, s.capstan.Namespace, selectors...)
	if err == nil && len(usable) == 0 {
		reconciling.SetCondition(s.capstan, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.HostNotAllowedReason,
			"spec.hostName is CapstanHost %s, which does not exist, does not admit namespace %s, or does not match the host selectors: set another host, or change its spec.allowedNamespaces and labels",
			wanted, s.capstan.Namespace)
		return nil, reconciling.ErrWaiting // A change of the CapstanHost is the event.
	}
	return usable, err
}

// chooseHost places the machine (IM-02), or checks the host that spec names.
func (r *Reconciler) chooseHost(ctx context.Context, s *scope, capstanCluster *infrav1.CapstanCluster, addresses []infrav1.InterfaceAddress) (*connections.Host, error) {
	r.unplaced.Store(client.ObjectKeyFromObject(s.capstan), nil)
	usable, err := r.usable(ctx, s, capstanCluster)
	if err != nil {
		return nil, err
	}
	req, err := hostselection.Within(ctx, r.Client, r.Pool, capstanCluster)
	if err != nil {
		return nil, err
	}
	req.FailureDomain = wantedFailureDomain(s)
	req.Version = kubernetesVersion(s)
	req.Image = s.capstan.Spec.Image
	req.ControlPlane = util.IsControlPlaneMachine(s.machine)
	req.Tolerations = s.capstan.Spec.HostTolerations
	req.CPUs = s.capstan.Spec.CPUs
	req.Memory = memory(s.capstan)
	req.Disk = diskSize(s.capstan)
	req.LAN = placement.LANOf(capstanCluster, addresses)
	req.Namespace, req.Mounts, req.Devices = s.capstan.Namespace, s.capstan.Spec.HostMounts, s.capstan.Spec.Devices
	candidates := hostselection.Candidates(usable, r.Pool)
	permissions, err := hostselection.Permissions(ctx, r.Client, s.capstan, capstanCluster, usable)
	if err != nil {
		return nil, err
	}
	for i := range candidates {
		candidates[i].Permissions = permissions[candidates[i].Name]
	}
	if err := r.countMembers(ctx, s, candidates); err != nil {
		return nil, err
	}
	name, err := r.place(ctx, s, candidates, req)
	if err != nil {
		return nil, err
	}
	host := r.Pool.Get(name)
	if host == nil {
		return nil, fmt.Errorf("host %s was disconnected in between", name)
	}
	return host, nil
}

// place chooses the host, and binds the volumes of the machine, which stay on their host.
func (r *Reconciler) place(ctx context.Context, s *scope, candidates []placement.Host, req placement.Request) (string, error) {
	if len(s.capstan.Spec.Volumes) > 0 {
		return r.placeWithVolumes(ctx, s, candidates, req)
	}
	name, err := placement.Choose(candidates, req)
	countPlacement(err)
	if err != nil {
		reconciling.SetCondition(s.capstan, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason, "%s", err)
		return "", reconciling.ErrWaiting
	}
	return name, nil
}

// host is the CapstanHost of the machine.
func (r *Reconciler) host(ctx context.Context, s *scope) (*infrav1.CapstanHost, error) {
	h := &infrav1.CapstanHost{}
	if err := r.Client.Get(ctx, client.ObjectKey{Name: s.capstan.Spec.HostName}, h); err != nil {
		if apierrors.IsNotFound(err) {
			reconciling.SetCondition(s.capstan, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.HostNotFoundReason, "CapstanHost %s does not exist", s.capstan.Spec.HostName)
			return nil, reconciling.ErrWaiting
		}
		return nil, err
	}
	return h, nil
}

var defaultMemory = resource.MustParse(infrav1.DefaultMachineMemory)

// memory limit of a machine in bytes.
func memory(m *infrav1.CapstanMachine) int64 {
	if m.Spec.Memory != nil {
		return m.Spec.Memory.Value()
	}
	return defaultMemory.Value()
}

var defaultDiskSize = resource.MustParse(infrav1.DefaultMachineDiskSize)

// diskSize of a machine in bytes.
func diskSize(m *infrav1.CapstanMachine) int64 {
	size := ptr.Deref(m.Spec.Disk.Size, defaultDiskSize)
	return size.Value()
}

func image(m *infrav1.CapstanMachine) string {
	if m.Spec.Image != "" {
		return m.Spec.Image
	}
	return infrav1.DefaultMachineImage
}

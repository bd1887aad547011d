package machine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/infrastructure/volumeplan"
	"capstan.dev/capstan/internal/reconciling"
)

// A volume that outlives machines is a CapstanVolume. Its spec.machineName is the record of the machine that has it, and each write of
// it fails if the stored object is newer, so that one machine gets it. A machine gets its volumes before its host, and gives them back
// after its host has confirmed that nothing of the machine is left.

// volumePause is the time after which a machine that waits for a free volume asks for the replicas of its owner again: no kind of
// owner is watched for that.
const volumePause = 30 * time.Second

// ofVolume maps a volume to its machine, or to the machines that wait for a host: a free one, and one that its host has made. Until the cache
// shows that, placement counts the space of the volume twice, because the host reports it.
func (r *Reconciler) ofVolume(_ context.Context, o client.Object) []reconcile.Request {
	r.created.seen(o.GetUID())
	spec := o.(*infrav1.CapstanVolume).Spec
	switch {
	case spec.MachineName == "":
		return r.waitingForHosts()
	case !o.GetDeletionTimestamp().IsZero():
		return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: spec.MachineName}}}
	case spec.HostID != "":
		return r.waitingForHosts()
	}
	return nil // Its machine has written that.
}

// volumeInputs are read before the choice of a host.
type volumeInputs struct {
	// all volumes of the namespace.
	all []infrav1.CapstanVolume
	of  volumeOwner
}

// readVolumes reads what the choice of volumes needs, and returns the function that ends the choice. Until then no other machine of the
// namespace chooses volumes, so that two of them do not choose the same, or more than their owner has replicas. This takes a turn instead of
// a lock, because a namespace can have many volumes, and its machines would wait with all workers.
func (r *Reconciler) readVolumes(ctx context.Context, s *scope) (func(), error) {
	if len(s.capstan.Spec.Volumes) == 0 {
		return func() {}, nil
	}
	end, again := r.volumeTurns.TakeTimed(s.capstan.Namespace)
	if end == nil {
		s.again = again
		return nil, reconciling.ErrWaiting
	}
	if err := r.readVolumeInputs(ctx, s); err != nil {
		end()
		return nil, err
	}
	return end, nil
}

func (r *Reconciler) readVolumeInputs(ctx context.Context, s *scope) (err error) {
	if err := r.followVolumes(ctx, s); err != nil {
		return err
	}
	if s.volumes.all, err = listVolumes(ctx, r.LiveClient, s); err != nil {
		return err
	}
	if err := r.releaseDeleted(ctx, s, s.volumes.all); err != nil {
		return err
	}
	s.volumes.of, err = r.ownerOf(ctx, s)
	return err
}

// listVolumes lists the volumes of the machine's namespace.
func listVolumes(ctx context.Context, c client.Reader, s *scope) ([]infrav1.CapstanVolume, error) {
	list := &infrav1.CapstanVolumeList{}
	err := c.List(ctx, list, client.InNamespace(s.capstan.Namespace))
	return list.Items, err
}

// placeWithVolumes chooses a host together with the volumes, and binds them to the machine.
func (r *Reconciler) placeWithVolumes(ctx context.Context, s *scope, candidates []placement.Host, req placement.Request) (string, error) {
	all, of := s.volumes.all, s.volumes.of
	options, err := volumeplan.Plan(volumeplan.Request{
		Machine: s.capstan.Name, Cluster: s.cluster.Name, Owner: of.name, Replicas: of.replicas, Wanted: s.capstan.Spec.Volumes,
	}, all)
	if err != nil {
		s.again = volumePause
		reconciling.SetCondition(s.capstan, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.WaitingForVolumeReason, "%s", err)
		return "", reconciling.ErrWaiting
	}
	if err := r.subtractPending(ctx, options, candidates); err != nil {
		return "", err
	}
	var why error
	for _, o := range options {
		req.Host, req.Volume, req.NewVolumes, req.VolumeBytes = o.Host, o.Volume, len(o.Create) > 0, o.VolumeBytes()
		name, err := placement.Choose(candidates, req)
		if err == nil {
			countPlacement(nil)
			return name, errors.Join(r.bind(ctx, s, o.Bind), r.createVolumes(ctx, s, of, o.Create, name))
		}
		if why == nil {
			why = err
		}
	}
	countPlacement(why)
	return "", r.waitForHost(ctx, s, options[0], why)
}

// subtractPending reduces the space for volumes of the candidates by the volumes that machines have been promised there and that the host
// has not made yet: its report does not contain them, and placement promised their space to another machine before.
func (r *Reconciler) subtractPending(ctx context.Context, options []volumeplan.Option, candidates []placement.Host) error {
	if !slices.ContainsFunc(options, func(o volumeplan.Option) bool { return len(o.Create) > 0 }) {
		return nil
	}
	hosts := &infrav1.CapstanHostList{}
	if err := r.Client.List(ctx, hosts, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	volumes, err := r.decidedVolumes(ctx)
	if err != nil {
		return err
	}
	pending, err := volumeplan.PendingBytes(volumes, hostselection.ByNamespace(ctx, r.Client, hosts.Items))
	for i := range candidates {
		candidates[i].FreeVolumes -= pending[candidates[i].Name]
	}
	return err
}

// waitForHost lets the machine have the volumes of a host that cannot take it now: another machine of the owner must not take their
// place with empty ones.
func (r *Reconciler) waitForHost(ctx context.Context, s *scope, o volumeplan.Option, why error) error {
	if err := r.bind(ctx, s, o.Bind); err != nil {
		return err
	}
	if o.Host == "" {
		reconciling.SetCondition(s.capstan, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason, "%s", why)
		return reconciling.ErrWaiting
	}
	reconciling.SetCondition(s.capstan, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.WaitingForVolumeReason,
		"CapstanVolume %s of the machine is on host %s: %s%s. To start with an empty volume, delete the CapstanVolume, which deletes its data", o.Volume, o.Host, why, keepData(why))
	return reconciling.ErrWaiting
}

// keepData returns the remedy without a loss of data for a machine whose failure domain the host of its volume is not in; "" for another
// reason.
func keepData(why error) string {
	refused := &placement.Refused{}
	if !errors.As(why, &refused) || !slices.Contains(refused.Reasons, placement.Domain) {
		return ""
	}
	return ". The failure domain of a Machine never changes. To keep the data, delete the Machine if it belongs to a control plane, or remove the failure domain from its MachineDeployment or MachinePool"
}

// bind gives volumes to the machine.
func (r *Reconciler) bind(ctx context.Context, s *scope, free []infrav1.CapstanVolume) error {
	for i := range free {
		if err := reconciling.Change(ctx, r.Client, &free[i], func() { free[i].Spec.MachineName = s.capstan.Name }); err != nil {
			return fmt.Errorf("bind CapstanVolume %s: %w", free[i].Name, err)
		}
		ctrl.LoggerFrom(ctx).Info("Bound a volume", "CapstanVolume", klog.KObj(&free[i]), "CapstanHost", klog.KRef("", free[i].Spec.HostName))
	}
	return nil
}

// createVolumes creates the objects of new volumes, bound to the machine. A repeated call finds them by name.
func (r *Reconciler) createVolumes(ctx context.Context, s *scope, of volumeOwner, wanted []infrav1.MachineVolume, host string) error {
	for _, w := range wanted {
		v := &infrav1.CapstanVolume{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: s.capstan.Namespace, Name: fmt.Sprintf("%s-%s", w.Name, s.capstan.UID), Finalizers: []string{infrav1.VolumeFinalizer},
				Labels: map[string]string{clusterv1.ClusterNameLabel: s.cluster.Name},
			},
			Spec: infrav1.CapstanVolumeSpec{
				ID: uuid.NewString(), HostName: host, ClusterName: s.cluster.Name, Owner: of.name, VolumeName: w.Name, SizeGiB: w.SizeGiB, MachineName: s.capstan.Name,
			},
		}
		reconciling.CopyWatchLabel(v.Labels, s.capstan)
		if w.ReclaimPolicy == infrav1.VolumeDelete {
			v.OwnerReferences = []metav1.OwnerReference{of.ref}
		}
		if err := r.Client.Create(ctx, v); err != nil {
			return fmt.Errorf("create CapstanVolume %s: %w", v.Name, err)
		}
		r.created.note(v)
		ctrl.LoggerFrom(ctx).Info("Created a volume", "CapstanVolume", klog.KObj(v), "CapstanHost", klog.KRef("", host))
	}
	return nil
}

// releaseDeleted gives up volumes that somebody deletes while the machine is on no host.
func (r *Reconciler) releaseDeleted(ctx context.Context, s *scope, all []infrav1.CapstanVolume) error {
	if s.capstan.Spec.ID != "" {
		return nil
	}
	return r.release(ctx, s, all, func(v *infrav1.CapstanVolume) bool { return !v.DeletionTimestamp.IsZero() })
}

// releaseVolumes makes the volumes of a machine free after its host has removed it. A machine that waited for a host can have a volume
// that its spec does not name any more. The cache suffices for that: the volume was bound before the change of the spec.
func (r *Reconciler) releaseVolumes(ctx context.Context, s *scope) error {
	reader := client.Reader(r.LiveClient)
	if len(s.capstan.Spec.Volumes) == 0 {
		reader = r.Client
	}
	all, err := listVolumes(ctx, reader, s)
	if err != nil {
		return err
	}
	return r.release(ctx, s, all, func(*infrav1.CapstanVolume) bool { return true })
}

// release makes volumes of the machine free.
func (r *Reconciler) release(ctx context.Context, s *scope, all []infrav1.CapstanVolume, selected func(*infrav1.CapstanVolume) bool) error {
	for i := range all {
		v := &all[i]
		if v.Spec.MachineName != s.capstan.Name || !selected(v) {
			continue
		}
		err := reconciling.Change(ctx, r.Client, v, func() { v.Spec.MachineName = "" })
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("release CapstanVolume %s: %w", v.Name, err)
		}
	}
	return nil
}

// ensureVolumes makes the host create the new volumes of the machine, and returns the mounts of all.
func (r *Reconciler) ensureVolumes(ctx context.Context, s *scope, host *connections.Host) ([]*hostpb.VolumeMount, error) {
	if len(s.capstan.Spec.Volumes) == 0 {
		return nil, nil
	}
	all, err := listVolumes(ctx, r.LiveClient, s)
	if err != nil {
		return nil, err
	}
	bound := volumeplan.Bound(all, s.capstan.Name)
	var mounts []*hostpb.VolumeMount
	for _, wanted := range s.capstan.Spec.Volumes {
		v, found := bound[wanted.Name]
		if !found || v.Spec.HostName != host.Name() {
			reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForVolumeReason,
				"The machine is on host %s and has no CapstanVolume for its volume %s there: delete the Machine to replace it", host.Name(), wanted.Name)
			return nil, reconciling.ErrWaiting
		}
		if err := r.ensureVolume(ctx, s, host, &v); err != nil {
			return nil, err
		}
		mounts = append(mounts, &hostpb.VolumeMount{Id: v.Spec.ID, Path: wanted.Path})
	}
	return mounts, nil
}

// ensureVolume makes the host create a volume, once: a volume that was created and is not there any more is lost.
func (r *Reconciler) ensureVolume(ctx context.Context, s *scope, host *connections.Host, v *infrav1.CapstanVolume) error {
	if v.Spec.HostID != "" {
		if why := hostselection.Mismatch(host.Name(), v.Spec.HostID, host.ID()); why != "" {
			reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForVolumeReason, "CapstanVolume %s: %s", v.Name, why)
			return reconciling.ErrWaiting
		}
		return nil
	}
	_, err := host.EnsureVolume(ctx, &hostpb.Volume{Id: v.Spec.ID, Namespace: v.Namespace, Name: v.Name, SizeBytes: int64(v.Spec.SizeGiB) << 30})
	if err != nil {
		why := connections.PublicMessage(err)
		if connections.Code(err) == codes.Unimplemented {
			why = "its capstand is older than volumes: upgrade it"
		}
		reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForVolumeReason,
			"Host %s does not make CapstanVolume %s: %s", host.Name(), v.Name, why)
		return fmt.Errorf("volume %s on host %s: %w", v.Name, host.Name(), err)
	}
	return reconciling.Change(ctx, r.Client, v, func() { v.Spec.HostID = host.ID() })
}

// volumeOwner is the owner of machines that follow each other and have the same volumes.
type volumeOwner struct {
	name     string
	ref      metav1.OwnerReference
	replicas int
}

// ownerOf returns the owner of the machine: its MachineDeployment, MachinePool, control plane or MachineSet, or its Machine.
func (r *Reconciler) ownerOf(ctx context.Context, s *scope) (volumeOwner, error) {
	m := s.machine
	key := client.ObjectKey{Namespace: m.Namespace}
	if key.Name = m.Labels[clusterv1.MachineDeploymentNameLabel]; key.Name != "" {
		d := &clusterv1.MachineDeployment{}
		err := r.LiveClient.Get(ctx, key, d)
		return ownedBy(clusterv1.GroupVersion.WithKind("MachineDeployment"), d, d.Spec.Replicas), err
	}
	if isPooled(m) {
		pool, err := util.GetMachinePoolByLabels(ctx, r.Client, m.Namespace, m.Labels)
		if err != nil || pool == nil {
			return volumeOwner{}, errors.Join(err, fmt.Errorf("the MachinePool of Machine %s is not known yet", m.Name))
		}
		return ownedBy(clusterv1.GroupVersion.WithKind("MachinePool"), pool, pool.Spec.Replicas), nil
	}
	ref := metav1.GetControllerOf(m)
	switch {
	case ref == nil:
		return ownedBy(clusterv1.GroupVersion.WithKind("Machine"), m, nil), nil
	case ref.Kind == "MachineSet":
		set := &clusterv1.MachineSet{}
		key.Name = ref.Name
		err := r.LiveClient.Get(ctx, key, set)
		return ownedBy(clusterv1.GroupVersion.WithKind("MachineSet"), set, set.Spec.Replicas), err
	}
	return r.controlPlaneOf(ctx, m, ref)
}

func ownedBy(kind schema.GroupVersionKind, o client.Object, replicas *int32) volumeOwner {
	return volumeOwner{
		name:     kind.Kind + "/" + o.GetName(),
		ref:      metav1.OwnerReference{APIVersion: kind.GroupVersion().String(), Kind: kind.Kind, Name: o.GetName(), UID: o.GetUID()},
		replicas: int(ptr.Deref(replicas, 1)),
	}
}

// controlPlaneOf returns the control plane of the machine. Capstan cannot read the replicas of other kinds, so these get a new volume
// for each machine if none is free.
func (r *Reconciler) controlPlaneOf(ctx context.Context, m *clusterv1.Machine, ref *metav1.OwnerReference) (volumeOwner, error) {
	owner := volumeOwner{
		name: ref.Kind + "/" + ref.Name, replicas: math.MaxInt32,
		ref: metav1.OwnerReference{APIVersion: ref.APIVersion, Kind: ref.Kind, Name: ref.Name, UID: ref.UID},
	}
	if schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind).GroupKind() != controlplanev1.ControlPlaneGroupKind {
		return owner, nil
	}
	cp := &unstructured.Unstructured{}
	cp.SetGroupVersionKind(controlplanev1.GroupVersion.WithKind(ref.Kind))
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: m.Namespace, Name: ref.Name}, cp); err != nil {
		return owner, err
	}
	replicas, found, err := unstructured.NestedInt64(cp.Object, "spec", "replicas")
	if !found {
		replicas = 1
	}
	owner.replicas = int(replicas)
	return owner, err
}

package host

import (
	"context"
	"encoding/json"
	"iter"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machinedisk"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/host/refusal"
)

// machines is the registry of the machines of this host.
type machines struct {
	*platform
	networks *networks
	// removed is called after a machine was removed from the registry; mu is held.
	removed func()
	byID    map[string]*machine
	// tombstonesRead is when bury looked for old tombstones last.
	tombstonesRead time.Time
	// mounts decides whether a new machine may have its volumes; mu is held.
	mounts func(*hostpb.MachineSpec) error
	// volumeBytes returns the sizes of all volumes together; mu is held.
	volumeBytes func() int64
	// versions of Kubernetes that were found last.
	versions []string
	// linkMTUs are those of network.LinkMTUs at the last look.
	linkMTUs map[string]int32
	// tunnelProblems are those of HostInfo, also of keepLinks.
	tunnelProblems []string
	// containerArchives were found at the last look.
	containerArchives []*hostpb.ContainerArchive
}

// add registers a machine that is recorded on disk; mu is held.
func (ms *machines) add(spec *hostpb.MachineSpec) *machine {
	m := newMachine(ms.platform, spec, ms.forget)
	m.resized = func() {
		ms.mu.Lock()
		defer ms.mu.Unlock()
		ms.broadcaster.Publish(events.Host(ms.info()))
	}
	ms.byID[spec.Id] = m
	return m
}

// EnsureMachine records a machine and starts it in the background.
func (ms *machines) EnsureMachine(ctx context.Context, req *hostpb.EnsureMachineRequest) (*hostpb.Machine, error) {
	spec := req.Spec
	if err := admission.CheckMachine(spec); err != nil {
		return nil, err
	}
	if err := ms.probeLAN(ctx, spec); err != nil {
		return nil, networkError(err)
	}
	if err := ms.probeHostFiles(ctx, spec); err != nil {
		return nil, err
	}
	ms.mu.Lock()
	defer ms.mu.Unlock()
	if m := ms.byID[spec.Id]; m != nil {
		return ms.ensureAgain(m, req)
	}
	if err := ms.admit(spec); err != nil {
		return nil, err
	}
	if err := ms.networks.ensure(ctx, spec.Network, true); err != nil {
		return nil, err
	}
	if err := ms.record(req); err != nil {
		if err := ms.networks.unlease(context.WithoutCancel(ctx), spec.Network.Id, spec.Id); err != nil {
			ms.log.Error("The addresses of a machine that was not recorded were not released", "id", spec.Id, "error", err)
		}
		return nil, err
	}
	m := ms.add(proto.CloneOf(spec))
	m.trace = trace.SpanContextFromContext(ctx)
	m.log.Info("Machine recorded", "addresses", leased(spec), "cpus", spec.Cpus, "memoryMiB", spec.MemoryBytes>>20, "diskMiB", admission.DiskBytes(spec)>>20)
	ms.broadcaster.Publish(events.Machine(hostpb.Event_CHANGED, m.snapshot()))
	ms.broadcaster.Publish(events.Host(ms.info()))
	ms.running.Go(func() { m.run(ms.ctx) })
	return m.snapshot(), nil
}

// probeLAN refuses a new machine in a LAN where another station has one of its addresses. It takes a third of a second, so the
// lock of all objects is not held.
func (ms *machines) probeLAN(ctx context.Context, spec *hostpb.MachineSpec) error {
	if spec.Network.Lan == nil {
		return nil
	}
	ms.mu.Lock()
	exists := ms.byID[spec.Id] != nil
	ms.mu.Unlock()
	if exists {
		return nil
	}
	for _, a := range network.Probed(spec.Network.Id, addresses(spec)) {
		if err := ms.box.ProbeLAN(ctx, *boxLAN(spec.Network.Lan), a); err != nil {
			return err
		}
	}
	return nil
}

// probeHostFiles refuses a new machine whose mounts and device nodes the host does not have. A network file system can hang, so the lock of all
// objects is not held: the guard of fencing stops the machines of a capstand that does not get it.
func (ms *machines) probeHostFiles(ctx context.Context, spec *hostpb.MachineSpec) error {
	if len(hostFiles(spec)) == 0 {
		return nil
	}
	ms.mu.Lock()
	exists := ms.byID[spec.Id] != nil
	var err error
	if !exists {
		err = ms.admit(spec) // Only a machine that is admitted otherwise learns which files the host has.
	}
	ms.mu.Unlock()
	if exists || err != nil {
		return err
	}
	return ms.hasHostFiles(ctx, spec)
}

// record reserves a new machine's addresses and writes its spec to disk; mu is held.
func (ms *machines) record(req *hostpb.EnsureMachineRequest) error {
	if err := ms.lease(req.Spec); err != nil {
		return networkError(err)
	}
	chosen, err := ms.chooseDevices(req.Spec)
	if err != nil {
		return err
	}
	files, err := firstFiles(req, chosen)
	if err == nil {
		err = ms.store.unbury(machineTombstone(req.Spec.Id))
	}
	if err == nil {
		err = ms.store.create(machinesDir, req.Spec.Id, req.Spec, files)
	}
	if err != nil {
		return status.Errorf(codes.Internal, "recording machine: %v", err)
	}
	return ms.keepsVersion(req.Spec)
}

// keepsVersion discards a recorded machine whose version of Kubernetes was removed after the admission (NOT_PROVIDED). A removal hides the version
// before its last look for users: either it finds the record, or the record comes after the hiding and is discarded here. mu is held.
func (ms *machines) keepsVersion(spec *hostpb.MachineSpec) error {
	if slices.Contains(ms.installed(), spec.KubernetesVersion) {
		return nil
	}
	if err := ms.store.discard(ms.store.path(machinesDir, spec.Id)); err != nil {
		return status.Errorf(codes.Internal, "discarding the record of a machine whose version of Kubernetes was removed: %v", err)
	}
	return refusal.Errorf(hostpb.Refusal_NOT_PROVIDED, "machine %s/%s requests Kubernetes %q, which was removed from this host meanwhile: add the version again, or choose another one",
		spec.Namespace, spec.Name, spec.KubernetesVersion)
}

// firstFiles are those that a new machine has besides its spec. devices are its CDI devices.
func firstFiles(req *hostpb.EnsureMachineRequest, devices []string) (map[string][]byte, error) {
	state, err := json.Marshal(machineState{ManagementCluster: req.ManagementCluster, Devices: devices})
	files := map[string][]byte{"state.json": state}
	if len(req.BootstrapData) > 0 {
		files[bootstrapDataFile] = req.BootstrapData
	}
	return files, err
}

// admit decides whether a new machine may be created; mu is held.
func (ms *machines) admit(spec *hostpb.MachineSpec) error {
	if err := admission.NewMachine(spec, ms.info(), ms.store.machineDeleted(spec.Id, time.Now()), ms.specs()); err != nil {
		return err
	}
	if err := ms.mounts(spec); err != nil {
		return err
	}
	return ms.spaceFor(spec, admission.DiskBytes(spec))
}

// spaceFor refuses a machine for whose disk the host has too little space; mu is held. size is what the disk needs in addition.
func (ms *machines) spaceFor(spec *hostpb.MachineSpec, size int64) error {
	_, free, err := machinedisk.Space(ms.config.Root)
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	claimed := int64(0)
	if ms.preallocates() {
		claimed = size + ms.promisedSpace()
	}
	return admission.SpaceLeft(spec, free, claimed, ms.config.ReserveDisk)
}

// promisedSpace returns the bytes that the disks of accepted machines will occupy when they are made, or grow; mu is held.
func (ms *machines) promisedSpace() (total int64) {
	for _, m := range ms.byID {
		u := m.lastUpdate()
		switch {
		case m.fresh() && !m.disk().Exists():
			total += admission.DiskBytes(m.current.Load())
		case !u.Ended() && !u.Grown:
			total += max(0, admission.DiskBytes(u.To)-admission.DiskBytes(u.From))
		}
	}
	return total
}

// ensureAgain answers for a machine that exists. It accepts bootstrap data if the machine has none yet.
func (ms *machines) ensureAgain(m *machine, req *hostpb.EnsureMachineRequest) (*hostpb.Machine, error) {
	if err := owner.Ensure("machine", m.spec.Id, m.spec, req.Spec); err != nil {
		return nil, err
	}
	if m.deleted.Err() != nil {
		return nil, refusal.Errorf(hostpb.Refusal_DELETED, "machine %s is being deleted: create it again with a new id", m.spec.Id)
	}
	if m.broken != "" {
		return nil, refusal.Errorf(hostpb.Refusal_DAMAGED, "machine %s: %s", m.spec.Id, m.broken)
	}
	if err := admission.SameUpdatedMachine(m.current.Load(), m.lastUpdate().Other(), req.Spec); err != nil {
		return nil, err
	}
	m.mu.Lock()
	missing := !m.state.bootstrapped() && !atomicfile.Exists(m.bootstrapFile())
	m.mu.Unlock()
	if missing && len(req.BootstrapData) > 0 {
		if err := atomicfile.WriteFile(m.bootstrapFile(), req.BootstrapData, 0o600); err != nil {
			return nil, status.Errorf(codes.Internal, "recording bootstrap data: %v", err)
		}
		m.wake.Send()
	}
	return m.snapshot(), nil
}

// get returns a machine by its id, or the error NotFound.
func (ms *machines) get(id string) (*machine, error) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	if m := ms.byID[id]; m != nil {
		return m, nil
	}
	return nil, admission.NoMachine(id)
}

// owned returns the machine that a request of its owner may change.
func (ms *machines) owned(req admission.Request) (*machine, error) {
	m, err := ms.get(req.GetId())
	if err != nil {
		return nil, admission.Owned(req, nil)
	}
	return m, admission.Owned(req, m.spec)
}

// GetMachine returns one machine.
func (ms *machines) GetMachine(_ context.Context, req *hostpb.GetMachineRequest) (*hostpb.Machine, error) {
	m, err := ms.get(req.Id)
	if err != nil {
		return nil, err
	}
	return m.snapshot(), nil
}

// ListMachines returns every machine.
func (ms *machines) ListMachines(context.Context, *hostpb.ListMachinesRequest) (*hostpb.ListMachinesResponse, error) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	res := &hostpb.ListMachinesResponse{}
	for _, m := range ms.byID {
		res.Machines = append(res.Machines, m.snapshot())
	}
	return res, nil
}

// StartMachine starts a machine that has failed.
func (ms *machines) StartMachine(_ context.Context, req *hostpb.StartMachineRequest) (*hostpb.Machine, error) {
	m, err := ms.owned(req)
	if err != nil {
		return nil, err
	}
	if err := m.startAgain(); err != nil {
		return nil, err
	}
	return m.snapshot(), nil
}

// ClaimMachine records the management cluster of a machine.
func (ms *machines) ClaimMachine(_ context.Context, req *hostpb.ClaimMachineRequest) (*hostpb.Machine, error) {
	m, err := ms.owned(req)
	if err != nil {
		return nil, err
	}
	if err := m.claim(req.ManagementCluster); err != nil {
		return nil, err
	}
	return m.snapshot(), nil
}

// deleteWait is the longest time that DeleteMachine and DeleteLoadBalancer wait, so that most callers call only once.
const deleteWait = 5 * time.Second

// DeleteMachine removes a machine. It writes the tombstone first, so that the deletion continues after a crash.
func (ms *machines) DeleteMachine(ctx context.Context, req *hostpb.DeleteMachineRequest) (*hostpb.DeleteMachineResponse, error) {
	m, err := ms.bury(ctx, req)
	if err != nil {
		return nil, err
	}
	if m == nil {
		return &hostpb.DeleteMachineResponse{Done: true}, nil
	}
	m.delete()
	m.setStatus(func(s *hostpb.MachineStatus) {
		if s.Phase != hostpb.MachineStatus_DELETING { // A repeated call keeps the progress.
			s.Phase, s.Message = hostpb.MachineStatus_DELETING, ""
		}
	})
	select {
	case <-m.gone:
		return &hostpb.DeleteMachineResponse{Done: true}, nil
	case <-ctx.Done():
	case <-time.After(deleteWait):
	}
	return &hostpb.DeleteMachineResponse{Done: false}, nil
}

// tombstonePause is the time between two looks for old tombstones. Each look reads all of them, and a day can have many deletions.
const tombstonePause = time.Hour

// bury writes the tombstone of a machine and returns the machine if it exists. A machine without a record may have
// addresses, which bury releases.
func (ms *machines) bury(ctx context.Context, req *hostpb.DeleteMachineRequest) (*machine, error) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	m := ms.byID[req.Id]
	if err := admission.Deletion("machine", req, m.owner()); err != nil {
		return nil, err
	}
	now := time.Now()
	if now.Sub(ms.tombstonesRead) >= tombstonePause {
		ms.store.buryOld(now)
		ms.tombstonesRead = now
	}
	if tombstone := machineTombstone(req.Id); !ms.store.buried(tombstone, now) {
		if err := ms.store.bury(tombstone); err != nil {
			return nil, status.Errorf(codes.Internal, "deleting machine %s: %v", req.Id, err)
		}
	}
	if m != nil {
		return m, nil
	}
	return nil, ms.networks.unleaseUnrecorded(ctx, req.Id)
}

// managerConnected lets unconfirmed machines wait without a limit: the manager confirms those that still have an object.
func (ms *machines) managerConnected(managementCluster string) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	for _, m := range ms.byID {
		m.mu.Lock()
		if m.unconfirmed && m.state.ManagementCluster == managementCluster {
			m.wake.Send()
		}
		m.mu.Unlock()
	}
}

// forget removes a machine of which nothing is left from the registry, and its network if EnsureMachine created it.
func (ms *machines) forget(ctx context.Context, m *machine) error {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	delete(ms.byID, m.spec.Id)
	if err := ms.networks.deleteUnused(ctx, m.spec.Network.Id); err != nil {
		ms.byID[m.spec.Id] = m
		return err
	}
	m.publishDeletion()
	ms.broadcaster.Publish(events.Host(ms.info()))
	ms.removed()
	return nil
}

// specs iterates over the machines; mu is held.
func (ms *machines) specs() iter.Seq[*hostpb.MachineSpec] {
	return func(yield func(*hostpb.MachineSpec) bool) {
		for _, m := range ms.byID {
			if !yield(m.current.Load()) {
				return
			}
		}
	}
}

// Package host is capstand, the root daemon of a Linux host. It creates and maintains machines, networks and load
// balancers, through restarts of capstand and of the host.
//
// Every object has an id from its owner and belongs to the owner's namespace and name (package owner). A request is
// written to disk before it is carried out, and every step can be repeated: at its start capstand reads its state
// folder and continues each object from its last recorded step.
//
// The registries machines, networks and balancers implement the gRPC service hostpb.Host. They share the platform:
// state folder, runc, network box, event broadcaster and one lock. A machine and a loadBalancer each have one goroutine that
// starts, observes and removes the processes.
//
// Layer: host. Allowed imports: api, library, contract.
package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/devices"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/fencing"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/joining"
	"capstan.dev/capstan/internal/host/machineimage"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/host/runc"
)

// Config of a capstand.
type Config struct {
	// Root is the folder of all state.
	Root string
	// Assets is the folder that `make build` fills.
	Assets string
	// Backups contains one folder per cluster, which its control plane machines see at /var/lib/capstan/backups. It
	// outlives machines and clusters. The default is the folder backups in Root.
	Backups string
	// Images contains the images of machines, which an administrator puts there.
	Images string
	// ContainerImages contains archives of container images, which an administrator puts there. Each machine imports them before it
	// becomes a Node. It need not exist.
	ContainerImages string
	// CDIDirs are the folders with the CDI specifications of the host's devices.
	CDIDirs []string
	// Name of the host, for people.
	Name string
	// ReserveMemory is the memory of the host that machines cannot use, in bytes.
	ReserveMemory int64
	// ReserveDisk is the free space of the host below which it accepts no new machine, in bytes.
	ReserveDisk int64
	// PreallocateDisks makes the disk of a new machine occupy its full size from the start.
	PreallocateDisks bool
	// BalancerUID is the unprivileged user and group of the load balancers.
	BalancerUID int
	// EncryptOverlays encrypts the traffic of clusters to other hosts with WireGuard.
	EncryptOverlays bool
	// RunDir is the folder that all capstands of the box share: network.DefaultRunDir.
	RunDir string
	// Absence is the time without a manager after which a machine that does not run needs a confirmation; DefaultAbsence.
	Absence time.Duration
	// ConfirmTimeout is the longest wait for the first contact with a manager; 0 waits without a limit.
	ConfirmTimeout time.Duration
	// StopPodsWithin is the time that the pods of a machine have to stop when the machine ends in order; 0 kills them.
	StopPodsWithin time.Duration
	// Logging contains the flags of the logs of capstand's processes and machines (package logging); none for the defaults.
	Logging []string
	// Reboot starts a reboot of the box and returns before it goes down; nil if capstand cannot reboot it.
	Reboot func(context.Context) error
	// Credentials renews the certificates of managers that connect over TCP; nil without TCP.
	Credentials hostpb.CredentialsServer
	// Certificates are the paths of the certificates of the TCP listeners by their names in the metrics.
	Certificates map[string]string
}

// Host implements the gRPC service Host: the registries contribute the methods of their objects.
type Host struct {
	hostpb.UnsafeHostServer // a missing method is an error of the compiler
	*platform
	*networks
	*machines
	*volumes
	*balancers
}

var _ hostpb.HostServer = (*Host)(nil)

// newHost connects the registries, which are empty.
func newHost(p *platform) *Host {
	p.startSeconds, p.findHostFiles = newStartSeconds(), p.openHostFiles
	p.looks.byFiles, p.imageFolders.byFiles, p.backupFolders.byFiles = map[string]*look{}, map[string]*look{}, map[string]*look{}
	ns := &networks{platform: p, byID: map[string]*hostpb.Network{}, unrecorded: map[string]*hostpb.SetServicesRequest{}}
	h := &Host{
		platform: p, networks: ns,
		machines:  &machines{platform: p, networks: ns, byID: map[string]*machine{}},
		balancers: &balancers{platform: p, networks: ns, byID: map[string]*loadBalancer{}},
	}
	h.volumes = newVolumes(p, h.machines)
	ns.users = func(networkID string) error {
		return admission.UnusedNetwork(networkID, h.machines.specs(), h.balancers.specs())
	}
	ns.changed = func() { h.broadcaster.Publish(events.Host(h.machines.info())) }
	h.machines.removed, h.balancers.removed = h.removed, h.removed
	return h
}

// New opens the state of a host and continues everything that is recorded there, until ctx is done. Machines and load
// balancers keep running after that.
func New(ctx context.Context, config Config, log *slog.Logger) (*Host, error) {
	p := &platform{
		config: config, log: log, ctx: ctx, broadcaster: events.New(), store: store{config.Root},
		runc: runc.Runc{Binary: filepath.Join(config.Assets, "node", "bin", "runc"), Root: filepath.Join(config.Root, "runc")},
	}
	err := p.store.checkWriter()
	if err != nil {
		return nil, err
	}
	if p.id, err = p.store.open(); err != nil {
		return nil, err
	}
	if err := p.store.recordWriter(); err != nil {
		log.Warn("Cannot record the version of capstand", "error", err) // for example while the disk is full
	}
	if p.capabilities, err = runc.OwnCapabilities(); err != nil {
		return nil, err
	}
	memory, err := hostMemory()
	if err != nil {
		return nil, err
	}
	p.runc.Sessions = filepath.Join(config.RunDir, "exec", p.id)
	if err := os.RemoveAll(p.runc.Sessions); err != nil {
		return nil, err
	}
	p.capacity, p.boxID = max(0, memory-config.ReserveMemory), joining.BoxID("/")
	p.diskBackend = diskBackend(log)
	p.localVolumeSizes = localVolumeSizes(p.ctx, log, p.diskBackend, config.Root)
	p.box = network.Box{Dir: config.RunDir, HostID: p.id, HostRoot: config.Root}
	p.contacts = openContacts(p.store.path("contacts.json"), cmp.Or(config.Absence, DefaultAbsence), config.ConfirmTimeout, log)
	p.fence, err = fencing.Open(p.store.path("fencing.json"), filepath.Join(config.RunDir, "fencing", p.id+".json"), config.Root, string(p.cgroup("")), log)
	if err != nil {
		return nil, err
	}
	p.images = &machineimage.Store{
		Dir: config.Images, Unpacked: p.store.path(unpackedDir), Reserved: []string{admission.HostImage},
	}
	if p.cdi, err = devices.NewCDI(config.CDIDirs...); err != nil {
		return nil, err
	}
	setSysctls("/proc/sys", &p.sysctlErrors, log)
	writeUdevRules(udevFolder, log)
	if err := p.forgetOtherBoot(); err != nil {
		return nil, err
	}
	h := newHost(p)
	if err := h.recover(); err != nil {
		return nil, err
	}
	log.Info("Capstand started", "id", p.id, "root", config.Root, "machines", len(h.machines.byID), "loadBalancers", len(h.balancers.byID),
		"machineMemoryMiB", p.capacity>>20, "kubernetesVersions", h.machines.installed())
	return h, nil
}

// endWait bounds Wait. A goroutine in a file system that hangs does not end. Meanwhile, capstand renews no lease of fencing, of which the
// shortest ends after 30 s, and the orderly stop of machines at a shutdown waits.
const endWait = 15 * time.Second

// Wait returns when all goroutines have ended after the end of the context, among them the starts of machines. It returns after endWait at the
// latest. A goroutine that still runs may be killed, as by a crash.
func (h *Host) Wait() {
	ended := make(chan struct{})
	go func() {
		h.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(endWait):
		h.log.Warn("Some work of capstand has not ended, and capstand ends without it: the next capstand continues the work", "waited", endWait)
	}
}

// recover reads all recorded objects and starts their goroutines.
func (h *Host) recover() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	_ = h.machines.restoreVersions() // keepVersions tries again, and logs the error.
	if err := h.loadAll(); err != nil {
		return err
	}
	if err := h.networks.openLink(); err != nil {
		return err
	}
	h.recoverNetworks()
	h.startKeepers()
	for _, lb := range h.balancers.byID {
		described := lb.described
		h.running.Go(func() { lb.runWhenDescribed(h.ctx, described) })
	}
	h.contacts.connected = h.machines.managerConnected
	h.fence.SetNetworks(h.networks.acrossHosts(h.networks.overlays()))
	h.running.Go(func() { h.keepFenced(h.ctx) })
	for _, m := range h.machines.byID {
		h.running.Go(func() { m.run(h.ctx) })
	}
	h.emptyTrash()
	return nil
}

// recoverNetworks repairs the recorded networks that are used, and removes all others; mu is held. Errors are logged.
func (h *Host) recoverNetworks() {
	for _, n := range h.networks.byID {
		// capstand may have ended before the network's first machine was recorded, or after the last one was removed.
		if err := h.networks.deleteUnused(h.ctx, n.Id); err != nil {
			h.log.Error("Unused network was not removed", "id", n.Id, "error", err)
		}
		if h.networks.byID[n.Id] != nil {
			h.recoverNetwork(n)
		}
	}
	if err := h.box.Sweep(h.ctx, func(id string) bool { return h.networks.byID[id] != nil }); err != nil {
		h.log.Error("Networks without a record were not removed", "error", err)
	}
}

// startKeepers starts the goroutines that keep a part of the host up to date until its context ends.
func (h *Host) startKeepers() {
	for _, keep := range []func(context.Context){
		h.machines.keepImages, h.machines.keepContainerImages, h.machines.keepDevices, h.machines.keepVersions, h.machines.keepLinks,
		func(ctx context.Context) { h.box.GuardFirewalls(ctx, h.log) },
		func(ctx context.Context) { h.box.GuardLinks(ctx, h.log) },
		h.holdVirtualAddresses, h.holdServices, h.capProcessLogs, h.keepSysctls,
	} {
		h.running.Go(func() { keep(h.ctx) })
	}
}

// loadAll reads all objects; mu is held. An object that cannot be read does not prevent the others from running.
func (h *Host) loadAll() error {
	if err := h.store.removeTemporary(); err != nil {
		h.log.Error("Incomplete files were not removed", "error", err)
	}
	networks, badNetworks, err1 := load(h.store, networksDir, func() *hostpb.Network { return &hostpb.Network{} },
		func(_ string, n *hostpb.Network) error { return admission.CheckNetwork(n) })
	machines, badMachines, err2 := load(h.store, machinesDir, func() *hostpb.MachineSpec { return &hostpb.MachineSpec{} }, checkRecord)
	balancers, badBalancers, err3 := load(h.store, balancersDir, func() *hostpb.LoadBalancer { return &hostpb.LoadBalancer{} },
		func(_ string, lb *hostpb.LoadBalancer) error { return owner.Given("load balancer", lb.Id, lb) })
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	if err := h.volumes.load(); err != nil {
		return err
	}
	for _, n := range networks {
		h.networks.byID[n.Id] = n
	}
	for _, spec := range machines {
		m := h.machines.add(spec)
		if m.state.bootstrapped() {
			m.eraseBootstrapData()
		}
		if m.update.Ended() {
			m.eraseUpdateData()
		}
	}
	h.machines.loadDoubts()
	h.machines.loadUnreadable(badMachines)
	h.mendNetworks(badNetworks)
	h.balancers.loadUnreadable(badBalancers)
	for _, spec := range balancers {
		listen, err := h.networks.listenAddresses(spec)
		if err != nil { // Its network has no readable record.
			h.balancers.addUndescribed(spec.Id, spec.NetworkId, spec.Namespace, spec.Name, fmt.Errorf("capstand cannot continue the load balancer: %w", err))
			continue
		}
		h.balancers.add(spec, listen)
	}
	return nil
}

// recoverNetwork repairs a network and the reservations of its addresses, before a request can ask for one of them. An
// error is logged: each machine repairs its network again before it starts.
func (h *Host) recoverNetwork(n *hostpb.Network) {
	log := h.log.With("network", n.Namespace+"/"+n.Name, "id", n.Id)
	_ = h.networks.fitsRoutes(h.ctx, n) // It is known: the overlap is logged.
	if err := h.box.Ensure(h.ctx, boxNetwork(n)); err != nil {
		log.Error("Network was not repaired", "error", err)
		return
	}
	if err := h.networks.restorePeers(n); err != nil {
		log.Error("The machines on other hosts were not restored: the owner of the network sets them again", "error", err)
	}
	holders := slices.AppendSeq(slices.Collect(maps.Keys(h.machines.byID)), maps.Keys(h.balancers.byID))
	if err := h.box.KeepLeases(n.Id, holders); err != nil {
		log.Error("Address leases without an owner were not removed", "error", err)
	}
	if err := h.box.KeepRedirect(h.ctx, n.Id, holders); err != nil {
		log.Error("Redirection to a load balancer that does not exist was not removed", "error", err)
	}
	for _, lb := range h.balancers.byID {
		if lb.spec.NetworkId != n.Id || lb.described != nil {
			continue
		}
		if err := h.networks.serveAgain(lb.spec, lb.listen); err != nil {
			log.Error("Bridge did not get the addresses of the load balancer", "error", err)
		}
	}
	for _, m := range h.machines.byID {
		if m.spec.Network.Id != n.Id {
			continue
		}
		if err := h.renewLease(m.spec); err != nil {
			log.Error("Address lease was not renewed", "machine", m.spec.Name, "error", err)
		}
	}
}

// removed removes the folders and, with the last object, the cgroup of this host; mu is held.
func (h *Host) removed() {
	if len(h.machines.byID)+len(h.balancers.byID) == 0 {
		h.cgroup("").RemoveEmpty()
		cgroup.Group("/capstan").RemoveEmpty()
	}
	h.emptyTrash()
}

// GetInfo returns the properties and the free capacity of the host.
func (h *Host) GetInfo(context.Context, *hostpb.GetInfoRequest) (*hostpb.HostInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.machines.info(), nil
}

// Watch streams all objects, then changes.
func (h *Host) Watch(req *hostpb.WatchRequest, stream hostpb.Host_WatchServer) error {
	w, end := h.broadcaster.Subscribe()
	defer end()
	for _, event := range h.everything() {
		if err := stream.Send(event); err != nil {
			return err
		}
	}
	if err := stream.Send(&hostpb.Event{Type: hostpb.Event_SYNCED}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	defer context.AfterFunc(h.ctx, cancel)()
	if req.ManagementCluster != "" {
		// The leases of machines end after the connection, also while the record of the contact waits for a disk that hangs.
		defer h.fence.Connected(req.ManagementCluster)()
		h.running.Go(func() { h.contacts.follow(ctx, req.ManagementCluster) })
	}
	for {
		newest, err := w.Take(ctx)
		if err != nil {
			return status.Error(codes.Unavailable, "capstand or the client is ending")
		}
		for _, event := range newest {
			if err := stream.Send(event); err != nil {
				return err
			}
		}
	}
}

func (h *Host) everything() []*hostpb.Event {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := []*hostpb.Event{events.Host(h.machines.info())}
	for _, lb := range h.balancers.byID {
		all = append(all, events.LoadBalancer(hostpb.Event_CHANGED, lb.snapshot()))
	}
	for _, m := range h.machines.byID {
		all = append(all, events.Machine(hostpb.Event_CHANGED, m.snapshot()))
	}
	return all
}

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machinedisk"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/machineapi"
)

// bootstrapDataFile is the file with the bootstrap data in the folder of a machine's state.
const bootstrapDataFile = "bootstrap-data"

func (m *machine) bootstrapFile() string { return filepath.Join(m.dir, bootstrapDataFile) }

func (m *machine) rootfs() string { return filepath.Join(m.dir, "rootfs") }

func (m *machine) initLog() string { return filepath.Join(m.dir, "init.log") }

func (m *machine) viewsDir() string { return filepath.Join(m.dir, "views") }

// diskSize returns the size of the machine's own disk, 0 if it has none.
func (m *machine) diskSize(spec *hostpb.MachineSpec) int64 {
	if m.disk().Exists() {
		return admission.DiskBytes(spec)
	}
	return 0
}

func (m *machine) runDir() string { return m.host.store.path(runDir, m.spec.Id) }

// Values of HostInfo.disk_backend.
const (
	diskImage = "Image"
	diskNone  = "None"
)

// diskBackend returns how this host limits the disks of machines.
func diskBackend(log *slog.Logger) string {
	if err := machinedisk.Probe(); err != nil {
		log.Warn("The disks of new machines have no limit: each machine can fill the disk of the host", "error", err)
		return diskNone
	}
	return diskImage
}

// Values of HostInfo.local_volume_sizes.
const (
	sizesEnforced    = "Enforced"
	sizesNotEnforced = "NotEnforced"
)

// localVolumeSizes returns whether the disks of new machines have project quotas, with which their nodes enforce the sizes of local
// volumes.
func localVolumeSizes(ctx context.Context, log *slog.Logger, backend, root string) string {
	if backend != diskImage {
		return sizesNotEnforced
	}
	if err := machinedisk.ProbeQuotas(ctx, root); err != nil {
		log.Info("The sizes of local volumes are not enforced: the disks of new machines get no project quotas", "error", err)
		return sizesNotEnforced
	}
	return sizesEnforced
}

// disk of the machine. Machines of earlier versions, and of hosts without a backend, have none: their rootfs is a folder of
// the host.
func (m *machine) disk() machinedisk.Disk {
	return machinedisk.Disk{
		Image: filepath.Join(m.dir, "disk.img"), Dir: m.rootfs(), Preallocate: m.host.config.PreallocateDisks,
		Quotas: m.host.localVolumeSizes == sizesEnforced,
	}
}

// preallocates returns whether new disks occupy their full size at once.
func (p *platform) preallocates() bool {
	return p.config.PreallocateDisks && p.diskBackend == diskImage
}

// fresh returns whether the machine has never started.
func (m *machine) fresh() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state.StartedAt.IsZero()
}

// ensureDisk creates the machine's disk before its first start and attaches it before each start. If an existing disk is
// lost, the machine fails: with an empty disk it would be another machine.
func (m *machine) ensureDisk(ctx context.Context, system runc.System) error {
	fresh := m.fresh()
	if fresh && m.host.diskBackend == diskImage {
		if err := m.disk().Create(ctx, admission.DiskBytes(m.current.Load())); err != nil {
			return fmt.Errorf("creating the machine's disk: %w", err)
		}
	}
	if err := m.attachDisk(ctx); err != nil {
		return err
	}
	if fresh {
		if err := makeDisk(m.rootfs(), m.spec, system); err != nil {
			return fmt.Errorf("creating the machine's disk: %w", err)
		}
		return m.syncDisk() // The disk must be durable before noteStart records that it exists.
	}
	if atomicfile.Exists(filepath.Join(m.rootfs(), "etc")) {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.DiskLost = true
	return m.fail(fmt.Sprintf("the disk of the machine is lost: %s does not exist", m.rootfs()))
}

// attachDisk mounts the machine's disk, if it has one.
func (m *machine) attachDisk(ctx context.Context) error {
	if d := m.disk(); d.Exists() {
		d.Releasing = m.endReads
		return m.attach(ctx, d)
	}
	return nil
}

// attach mounts a disk or a volume of the machine. The status shows a check of its file system that takes long.
func (m *machine) attach(ctx context.Context, d machinedisk.Disk) error {
	d.Checking = func() {
		m.log.Warn("The check of a file system of the machine takes long: the machine starts after it", "disk", d.Image)
		m.setStatus(func(s *hostpb.MachineStatus) { s.Message = "checking the file system of " + d.Image })
	}
	return d.Attach(ctx)
}

// attachAdoptedDisk mounts the disk of a running machine if this process cannot see it, because the machine may have been
// started from another mount namespace.
func (m *machine) attachAdoptedDisk(ctx context.Context) {
	if mounted, err := m.disk().Mounted(); mounted || err == nil && m.attachDisk(ctx) == nil {
		return
	}
	m.log.Error("The disk of the running machine is not visible to capstand: its logs cannot be read")
}

// restartOnDiskError ends PID 1 after the file system of the machine's disk or of a volume met an error and became read-only. The next start
// repairs the file system and attaches it again; its error is in the status of the machine until it succeeds.
func (m *machine) restartOnDiskError(ctx context.Context, d machinedisk.Disk, pid1 *proc.Handle) {
	if !d.Exists() {
		return
	}
	if err := d.AwaitError(ctx); err != nil {
		if ctx.Err() == nil {
			m.log.Error("The disk of the machine is not observed", "error", err)
		}
		return
	}
	m.log.Error("The file system of a disk of the machine met an error and is read-only; the machine is restarted to repair it", "disk", d.Image)
	if err := pid1.Signal(unix.SIGKILL); err != nil {
		m.log.Error("PID 1 was not ended", "error", err)
	}
}

// syncDisk flushes the machine's disk.
func (m *machine) syncDisk() error {
	root, err := os.Open(m.rootfs())
	if err != nil {
		return err
	}
	err = unix.Syncfs(int(root.Fd()))
	if err = errors.Join(err, root.Close()); err != nil {
		return fmt.Errorf("syncing the machine's disk: %w", err)
	}
	return nil
}

// prepare writes the files that PID 1 reads at its start. mounts are those of the host.
func (m *machine) prepare(system runc.System, mounts []runc.HostMount) (bundle string, err error) {
	var data []byte
	m.mu.Lock()
	if !m.state.bootstrapped() {
		data, err = os.ReadFile(m.bootstrapFile())
	}
	m.mu.Unlock()
	if err != nil {
		return "", err
	}
	spec := m.current.Load()
	if err := m.host.store.makeRunDir(m.spec.Id, m.metadata(spec), data, resolvConf(hostResolvConf)); err != nil {
		return "", err
	}
	m.host.emptyTrash()
	if err := m.describeDevices(system); err != nil {
		return "", err
	}
	backups, err := m.host.backups(m.spec)
	if err != nil {
		return "", err
	}
	nodes, err := deviceNodes(spec, system.Devices)
	if err != nil {
		return "", err
	}
	p, err := m.limits(spec)
	if err != nil {
		return "", err
	}
	if p.ContainerImages, err = m.containerImages(); err != nil {
		return "", err
	}
	p.HostMounts, p.Devices, p.Volumes = mounts, nodes, m.volumeMounts()
	p.Backups, p.BackupsIn = backups, filepath.Join(backupsIn, m.spec.Namespace, m.spec.Cluster)
	p.Namespace, p.NetworkID, p.NetNS = m.spec.Namespace, m.spec.Network.Id, m.host.box.NetNS(m.spec.Id)
	p.Hostname, p.Rootfs, p.Assets, p.Run = m.spec.Name, m.rootfs(), m.host.config.Assets, m.runDir()
	p.Capabilities, p.System = m.host.capabilities, system
	bundle = m.bundle()
	return bundle, writeBundle(bundle, func(s *oci.Spec) error { return m.host.cdi.Inject(s, m.cdiDevices()) }, p)
}

// noteStart records the start before it happens.
func (m *machine) noteStart() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.state.StartedAt.IsZero() {
		m.state.Restarts++
	}
	m.state.StartedAt = time.Now()
	return m.save()
}

// recordBootstrap records on disk that the bootstrap data was used, and erases the data (IM-08). It retries until it
// succeeds. If life ends before, the machine's init reports the end of the bootstrap again to the next capstand.
func (m *machine) recordBootstrap(life context.Context) {
	for attempt := 0; ; attempt++ {
		err := m.tryRecordBootstrap()
		if err == nil {
			return
		}
		m.log.Error("Cannot record the end of the bootstrap", "error", err)
		if !rest(life, nil, pauseAfter(attempt)) {
			return
		}
	}
}

// tryRecordBootstrap syncs the disk first: after a power failure, a machine must still have the data or its complete result.
func (m *machine) tryRecordBootstrap() error {
	if err := m.syncDisk(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unsynced = false
	if err := m.save(); err != nil {
		return err
	}
	m.eraseBootstrapData()
	return nil
}

// eraseBootstrapData removes both copies of the data if it was used.
func (m *machine) eraseBootstrapData() {
	for _, path := range []string{m.bootstrapFile(), filepath.Join(m.runDir(), machineapi.BootstrapDataFile)} {
		if err := atomicfile.Remove(path); err != nil {
			m.log.Error("Cannot erase the bootstrap data", "error", err)
		}
	}
}

// save writes state.json, without the end of a bootstrap whose result is not on disk yet; m.mu is held. A machine that is
// being removed has no folder any more.
func (m *machine) save() error {
	if m.deleted.Err() != nil || m.broken != "" {
		return nil
	}
	state := m.state
	if m.unsynced {
		state.Bootstrap, state.BootstrapMessage = hostpb.MachineStatus_BOOTSTRAP_UNSPECIFIED, ""
	}
	return atomicfile.WriteJSON(filepath.Join(m.dir, "state.json"), state, 0o600)
}

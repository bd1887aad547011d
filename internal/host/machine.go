package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/hub"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/machineapi"
)

// machine is a machine and the goroutine (run) that makes, watches, restarts and removes it. All
// that run does can be done again from the start: it is what happens after a crash of capstand.
type machine struct {
	host *platform
	// forget removes the machine from the registry.
	forget func(context.Context, *machine) error
	spec   *hostpb.MachineSpec
	dir    string
	log    *slog.Logger

	// deleted is done once the machine is to go.
	deleted context.Context
	delete  context.CancelFunc
	// wake makes run look again at what to do.
	wake chan struct{}
	// gone is closed when nothing of the machine is left.
	gone chan struct{}

	// broken says why the record of the machine cannot be read.
	broken string

	mu    sync.Mutex
	state machineState
	// unsynced says that the bootstrap has ended and what it made may not be on disk yet.
	unsynced bool
	status   *hostpb.MachineStatus
}

// machineState is what must be remembered beside the spec, in state.json.
type machineState struct {
	// Bootstrap is SUCCEEDED or BOOTSTRAP_FAILED once that is known; the bootstrap data is not passed
	// again then.
	Bootstrap        hostpb.MachineStatus_Bootstrap `json:"bootstrap,omitempty"`
	BootstrapMessage string                         `json:"bootstrapMessage,omitempty"`
	// StartedAt is when PID 1 was started last. From the first start on the disk is the machine's own: capstand does not write
	// there any more, and if it is not there it is lost.
	StartedAt time.Time `json:"startedAt,omitzero"`
	Restarts  int32     `json:"restarts,omitempty"`
	// Deaths of PID 1 that count against the restart budget.
	Deaths []time.Time `json:"deaths,omitempty"`
	// Failed says why the machine is not started.
	Failed string `json:"failed,omitempty"`
	// ManagementCluster is that of MachineStatus.
	ManagementCluster string `json:"managementCluster,omitempty"`
	// RestartAt is when a failed machine is started again; zero: only on request.
	RestartAt time.Time `json:"restartAt,omitzero"`
}

func (s machineState) bootstrapped() bool {
	return s.Bootstrap == hostpb.MachineStatus_SUCCEEDED || s.Bootstrap == hostpb.MachineStatus_BOOTSTRAP_FAILED
}

// newMachine returns a machine that is recorded on disk.
func newMachine(h *platform, spec *hostpb.MachineSpec, forget func(context.Context, *machine) error) *machine {
	m := &machine{
		host: h, forget: forget, spec: spec, dir: h.store.path(machinesDir, spec.Id),
		log:  h.log.With("machine", spec.Namespace+"/"+spec.Name, "id", spec.Id),
		wake: make(chan struct{}, 1), gone: make(chan struct{}),
		status: &hostpb.MachineStatus{Phase: hostpb.MachineStatus_PENDING},
	}
	m.deleted, m.delete = context.WithCancel(context.Background())
	err := atomicfile.ReadJSON(filepath.Join(m.dir, "state.json"), &m.state)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.broken = fmt.Sprintf("capstand cannot read the state of the machine: %v. It is neither watched nor started: delete it, or repair the file and restart capstand", err)
	}
	m.status.Restarts, m.status.ManagementCluster = m.state.Restarts, m.state.ManagementCluster
	m.status.Bootstrap, m.status.BootstrapMessage = m.state.Bootstrap, m.state.BootstrapMessage
	if !m.state.bootstrapped() {
		m.status.Bootstrap = hostpb.MachineStatus_WAITING
	}
	if atomicfile.Exists(h.store.path(tombstonesDir, spec.Id)) {
		m.status.Phase = hostpb.MachineStatus_DELETING
		m.delete()
	}
	return m
}

// forever is a pause that only wake ends.
const forever = time.Duration(-1)

// run looks after the machine until it is gone or capstand ends.
func (m *machine) run(ctx context.Context) {
	life, end := context.WithCancel(ctx) // of the machine, as far as this capstand sees it
	defer end()
	defer context.AfterFunc(m.deleted, end)()
	var pause time.Duration
	for attempt := 0; rest(life, m.wake, pause); {
		pause = m.live(life, &attempt)
	}
	pause = 0
	for attempt := 0; m.deleted.Err() != nil && rest(ctx, nil, pause); attempt++ {
		if err := m.remove(ctx); err != nil {
			m.log.Error("removal", "error", err)
			m.setStatus(func(s *hostpb.MachineStatus) { s.Message = "removal: " + err.Error() })
			pause = pauseAfter(attempt)
			continue
		}
		m.log.Info("machine is gone")
		close(m.gone)
		return
	}
}

// rest waits, for at most pause, until woken. It returns false when ctx is done.
func rest(ctx context.Context, wake <-chan struct{}, pause time.Duration) bool {
	var over <-chan time.Time
	if pause != forever {
		over = time.After(pause)
	}
	select {
	case <-ctx.Done():
	case <-wake:
	case <-over:
	}
	return ctx.Err() == nil
}

// live adopts or starts the machine, if it is to run, and watches it until PID 1 ends or life does. It
// returns for how long to wait before the next call; attempt counts starts that failed in a row.
func (m *machine) live(life context.Context, attempt *int) time.Duration {
	if run, pause := m.toRun(); !run {
		return pause
	}
	pid1, err := m.adoptOrStart(life)
	if err != nil {
		if life.Err() != nil || m.failed() {
			return forever
		}
		m.log.Error("start", "error", err)
		m.setStatus(func(s *hostpb.MachineStatus) { s.Message = err.Error() })
		*attempt++
		return pauseAfter(*attempt - 1)
	}
	*attempt = 0
	defer func() { _ = pid1.Close() }()
	m.watch(life, pid1)
	if life.Err() != nil {
		return forever
	}
	return m.died()
}

// toRun says whether PID 1 is to run now, and otherwise when to ask again.
func (m *machine) toRun() (run bool, pause time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.broken != "" {
		m.publish(func(s *hostpb.MachineStatus) { s.Phase, s.Message = hostpb.MachineStatus_FAILED, m.broken })
		return false, forever
	}
	if pause := stillFailed(m.state.Failed, m.state.RestartAt, time.Now()); pause != 0 {
		m.publish(func(s *hostpb.MachineStatus) { s.Phase, s.Message = hostpb.MachineStatus_FAILED, m.state.Failed })
		return false, pause
	}
	if m.state.Failed != "" {
		if err := m.absolve(); err != nil {
			m.log.Error("state cannot be saved", "error", err)
			return false, maxRestartDelay
		}
	}
	if !m.state.bootstrapped() && !atomicfile.Exists(m.bootstrapFile()) {
		m.publish(func(s *hostpb.MachineStatus) { s.Message = "waits for its bootstrap data" })
		return false, forever
	}
	return true, 0
}

// absolve gives the machine all of its restarts again; m.mu is held.
func (m *machine) absolve() error {
	m.state.Failed, m.state.RestartAt, m.state.Deaths = "", time.Time{}, nil
	m.publish(func(s *hostpb.MachineStatus) {
		s.Phase, s.Message = hostpb.MachineStatus_RESTARTING, "is started again"
	})
	return m.save()
}

// startAgain starts a machine that has failed, or that waits to be started again.
func (m *machine) startAgain() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.deleted.Err() != nil {
		return refusal.Errorf(hostpb.Refusal_DELETED, "machine %s is being deleted", m.spec.Id)
	}
	if m.broken != "" {
		return refusal.Errorf(hostpb.Refusal_DAMAGED, "machine %s: %s", m.spec.Id, m.broken)
	}
	if m.state.Failed == "" && m.status.Phase != hostpb.MachineStatus_RESTARTING {
		return nil
	}
	if err := m.absolve(); err != nil {
		return status.Errorf(codes.Internal, "recording that machine %s is to start: %v", m.spec.Id, err)
	}
	m.wakeUp()
	return nil
}

// claim records the management cluster that has the machine's object.
func (m *machine) claim(managementCluster string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.broken != "" {
		return refusal.Errorf(hostpb.Refusal_DAMAGED, "machine %s: %s", m.spec.Id, m.broken)
	}
	before := m.state.ManagementCluster
	if before == managementCluster {
		return nil
	}
	m.state.ManagementCluster = managementCluster
	if err := m.save(); err != nil {
		m.state.ManagementCluster = before
		return status.Errorf(codes.Internal, "recording the management cluster of machine %s: %v", m.spec.Id, err)
	}
	m.publish(func(s *hostpb.MachineStatus) { s.ManagementCluster = managementCluster })
	return nil
}

// owner returns the spec, which has the namespace and name of the owner; empty without a machine.
func (m *machine) owner() *hostpb.MachineSpec {
	if m == nil {
		return nil
	}
	return m.spec
}

func (m *machine) failed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state.Failed != ""
}

func (m *machine) cgroup() cgroup.Group { return m.host.cgroup(m.spec.Id) }

// adoptOrStart returns the PID 1 that runs, or that of a new start.
func (m *machine) adoptOrStart(life context.Context) (*proc.Handle, error) {
	pid1, err := m.find(life)
	if err != nil {
		return nil, err
	}
	if pid1 == nil {
		if pid1, err = m.start(life); err != nil {
			return nil, err
		}
	} else {
		m.attachAdoptedDisk(life)
		m.log.Info("adopted", "pid", pid1.PID)
	}
	m.setStatus(func(s *hostpb.MachineStatus) {
		s.Phase, s.Message, s.Pid = hostpb.MachineStatus_RUNNING, "", int32(pid1.PID)
		s.StartedAt, s.Restarts = timestamppb.New(m.state.StartedAt), m.state.Restarts
	})
	return pid1, nil
}

// find returns the PID 1 that runs, nil when there is none.
func (m *machine) find(ctx context.Context) (*proc.Handle, error) {
	state, err := m.host.runc.State(ctx, m.spec.Id)
	if err != nil || state.Status != "running" {
		return nil, err
	}
	ref, err := proc.Find(state.PID)
	if errors.Is(err, proc.ErrGone) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	pid1, err := ref.Open()
	if errors.Is(err, proc.ErrGone) {
		return nil, nil
	}
	return pid1, err
}

// startTimeout bounds a start: runc takes some tens of milliseconds.
const startTimeout = time.Minute

// start makes all that the machine needs, whatever of it is there already, and starts PID 1.
func (m *machine) start(life context.Context) (*proc.Handle, error) {
	// A start that has begun is not interrupted when capstand ends.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(life), startTimeout)
	defer cancel()
	if err := m.clear(ctx); err != nil {
		return nil, err
	}
	if err := m.ensureDisk(ctx); err != nil {
		return nil, err
	}
	if err := m.ensureNetwork(ctx); err != nil {
		return nil, err
	}
	bundle, err := m.prepare()
	if err != nil {
		return nil, err
	}
	log, err := openLog(m.initLog())
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	if err := m.noteStart(); err != nil {
		return nil, err
	}
	if err := m.host.runc.Start(ctx, m.spec.Id, bundle, log); err != nil {
		return nil, err
	}
	pid1, err := m.find(ctx)
	if err == nil && pid1 == nil {
		err = errors.New("PID 1 ended at once; see the machine's init log")
	}
	if err == nil {
		m.log.Info("started", "pid", pid1.PID)
	}
	return pid1, err
}

// clear removes what is left of an earlier PID 1.
func (m *machine) clear(ctx context.Context) error {
	if err := m.cgroup().Remove(ctx); err != nil {
		return err
	}
	state := filepath.Join(m.host.runc.Root, m.spec.Id)
	if !atomicfile.Exists(state) {
		return nil
	}
	if err := m.host.runc.Delete(ctx, m.spec.Id); err != nil {
		// A state that runc cannot read, from a runc that was killed: no process is left to care for.
		m.log.Warn("runc's state is dropped", "error", err)
		return os.RemoveAll(state)
	}
	return nil
}

// fail gives the machine up; m.mu is held.
func (m *machine) fail(why string) error {
	m.log.Error("machine failed", "why", why)
	m.state.Failed = why
	m.publish(func(s *hostpb.MachineStatus) { s.Phase, s.Message, s.Pid = hostpb.MachineStatus_FAILED, why, 0 })
	return errors.Join(errors.New(why), m.save())
}

// watch follows PID 1 and what it tells until it ends or life does.
func (m *machine) watch(life context.Context, pid1 *proc.Handle) {
	ctx, stop := context.WithCancel(life)
	var all sync.WaitGroup
	all.Go(func() { watchInit(ctx, m.runDir(), func(s machineapi.Status) { m.heard(life, s) }) })
	all.Go(func() { capLog(ctx, m.initLog(), m.log) })
	all.Go(func() { m.keepConnected(ctx) })
	all.Go(func() { m.restartOnDiskError(ctx, pid1) })
	if err := pid1.Wait(life); err != nil && life.Err() == nil {
		m.log.Error("waiting for PID 1", "error", err)
	}
	stop()
	all.Wait()
}

// died notes that PID 1 ended, and returns for how long to wait before the next start.
func (m *machine) died() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	var delay time.Duration
	var usedUp bool
	m.state.Deaths, delay, usedUp = afterDeath(m.state.Deaths, time.Now())
	if usedUp {
		m.state.RestartAt = time.Now().Add(failedDelay)
		_ = m.fail(fmt.Sprintf("PID 1 ended %d times within %s; its init log has the cause. The machine is started again at %s",
			len(m.state.Deaths), restartWindow, m.state.RestartAt.UTC().Format(time.RFC3339)))
		return 0 // toRun has the pause
	}
	m.log.Warn("PID 1 ended", "deaths", len(m.state.Deaths), "restart in", delay)
	if err := m.save(); err != nil {
		m.log.Error("state cannot be saved", "error", err)
	}
	m.publish(func(s *hostpb.MachineStatus) {
		s.Phase, s.Pid, s.Services = hostpb.MachineStatus_RESTARTING, 0, nil
		s.Message = fmt.Sprintf("PID 1 ended; started again after %s", delay)
	})
	return delay
}

// heard takes a state of the machine's init. What it has to record goes on after PID 1, as long as life.
func (m *machine) heard(life context.Context, s machineapi.Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	state := bootstrapStates[s.Bootstrap]
	m.publish(func(status *hostpb.MachineStatus) {
		status.Services, status.Certificates = serviceStatuses(s), certificateStatuses(s)
		if !m.state.bootstrapped() { // later starts have no bootstrap data, and nothing to say about it
			status.Bootstrap, status.BootstrapMessage = state, s.BootstrapMessage
		}
	})
	final := state == hostpb.MachineStatus_SUCCEEDED || state == hostpb.MachineStatus_BOOTSTRAP_FAILED
	if final && !m.state.bootstrapped() {
		m.state.Bootstrap, m.state.BootstrapMessage, m.unsynced = state, s.BootstrapMessage, true
		m.host.running.Go(func() { m.recordBootstrap(life) })
	}
}

// remove removes all of the machine. It can be called again after an error or a crash.
func (m *machine) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := m.clear(ctx); err != nil {
		return err
	}
	err := errors.Join(
		m.disk().Detach(ctx),
		os.RemoveAll(m.runDir()),
		m.host.box.Unplug(m.spec.Id),
		m.host.box.UnleaseAll(m.spec.Id),
	)
	if err != nil {
		return err
	}
	if err := m.host.store.discard(m.dir); err != nil {
		return err
	}
	return m.forget(ctx, m)
}

// setStatus changes the status and tells watchers.
func (m *machine) setStatus(change func(*hostpb.MachineStatus)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.publish(change)
}

// publish is setStatus with m.mu held.
func (m *machine) publish(change func(*hostpb.MachineStatus)) {
	before := proto.CloneOf(m.status)
	change(m.status)
	if m.deleted.Err() != nil {
		m.status.Phase = hostpb.MachineStatus_DELETING
	}
	if !proto.Equal(before, m.status) {
		m.host.hub.Publish(hub.Machine(hostpb.Event_CHANGED, m.snapshotLocked()))
	}
}

// snapshot is the machine as clients see it.
func (m *machine) snapshot() *hostpb.Machine {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.snapshotLocked()
}

func (m *machine) snapshotLocked() *hostpb.Machine {
	spec := proto.CloneOf(m.spec)
	fillNetwork(spec.Network)
	return &hostpb.Machine{Spec: spec, Status: proto.CloneOf(m.status)}
}

// wakeUp makes run look again.
func (m *machine) wakeUp() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

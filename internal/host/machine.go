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
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostmount"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/host/updaterecord"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/wakeup"
)

// machine is a machine and the goroutine (run) that creates, watches, restarts and removes it. run can repeat each of its
// steps from the start, as it does after a crash of capstand.
type machine struct {
	host *platform
	// forget removes the machine from the registry.
	forget func(context.Context, *machine) error
	// resized publishes the resources of the host after the end of an update.
	resized func()
	// spec identifies the machine. Updates in place change other fields than those of its identity: they are in current.
	spec *hostpb.MachineSpec
	// current is the spec with the changes of updates. Nobody changes the value, an update replaces it.
	current atomic.Pointer[hostpb.MachineSpec]
	dir     string
	log     *slog.Logger

	// deleted is done when the machine must be removed.
	deleted context.Context
	delete  context.CancelFunc
	// wake makes run decide again.
	wake wakeup.Signal
	// updates wakes the goroutine that carries out updates.
	updates wakeup.Signal
	// gone is closed when the machine is removed completely.
	gone chan struct{}

	// broken explains why the record of the machine cannot be read.
	broken string

	// trace is that of the call that created the machine, until the end of its bootstrap.
	trace trace.SpanContext

	mu    sync.Mutex
	state machineState
	// unconfirmed: the machine may have been replaced before a capstand started. See contacts and loadDoubt.
	unconfirmed bool
	// fenced: the machine was stopped, or must stop, because the host had no contact. It is unconfirmed too. See package fencing.
	fenced bool
	// unsynced is true while the bootstrap has ended and its result may not be on disk yet.
	unsynced bool
	// reads is done when the logs on the disk must be closed, because the machine is deleted or its disk is repaired.
	reads     context.Context
	stopReads context.CancelFunc
	status    *hostpb.MachineStatus
	// update is the last update in place, or nil. It is replaced, not changed.
	update   *updaterecord.Record
	reported report
	// forgotten: its deletion is published. A later event would show it again.
	forgotten bool
}

// machineState is the state of a machine that must survive capstand, in state.json.
type machineState struct {
	// Bootstrap is SUCCEEDED or BOOTSTRAP_FAILED after the end of the bootstrap. The machine gets its bootstrap data only
	// before that.
	Bootstrap        hostpb.MachineStatus_Bootstrap `json:"bootstrap,omitempty"`
	BootstrapMessage string                         `json:"bootstrapMessage,omitempty"`
	// StartedAt is the time of the last start of PID 1. From the first start on, the disk belongs to the machine: capstand
	// does not write to it any more, and a missing disk is lost.
	StartedAt time.Time `json:"startedAt,omitzero"`
	Restarts  int32     `json:"restarts,omitempty"`
	// Deaths of PID 1 that count against the restart budget.
	Deaths []time.Time `json:"deaths,omitempty"`
	// Failed explains why the machine is not started.
	Failed string `json:"failed,omitempty"`
	// DiskLost is true if it is not started because its disk is lost.
	DiskLost bool `json:"diskLost,omitempty"`
	// ManagementCluster is the field of MachineStatus.
	ManagementCluster string `json:"managementCluster,omitempty"`
	// ImageDigest is that of the image with which the machine was made; empty for the image of the host.
	ImageDigest string `json:"imageDigest,omitempty"`
	// Devices are the qualified names of the CDI devices of the machine, chosen when it was recorded.
	Devices []string `json:"devices,omitempty"`
	// RestartAt is the time when a failed machine is started again; zero means only on request.
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
		wake: wakeup.New(), updates: wakeup.New(), resized: func() {}, gone: make(chan struct{}),
		status:   &hostpb.MachineStatus{Phase: hostpb.MachineStatus_PENDING},
		reported: report{changedAt: time.Now()},
	}
	m.deleted, m.delete = context.WithCancel(context.Background())
	m.reads, m.stopReads = context.WithCancel(m.deleted)
	err := atomicfile.ReadJSON(filepath.Join(m.dir, "state.json"), &m.state)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.broken = fmt.Sprintf("capstand cannot read the state of the machine: %v. It is neither watched nor started: delete it, or repair the file and restart capstand", err)
	}
	m.current.Store(spec)
	m.fenced = h.fence.Marked(spec.Id)
	update, err := loadUpdate(m.dir)
	switch {
	case err != nil && m.broken == "":
		m.broken = fmt.Sprintf("capstand cannot read the update of the machine: %v. It is neither watched nor started: delete it, or repair the file and restart capstand", err)
	case update != nil && err == nil:
		m.update, m.status.Update = update, update.Status()
		m.current.Store(update.Spec())
	}
	m.status.Restarts, m.status.ManagementCluster = m.state.Restarts, m.state.ManagementCluster
	m.status.Bootstrap, m.status.BootstrapMessage = m.state.Bootstrap, m.state.BootstrapMessage
	if !m.state.bootstrapped() {
		m.status.Bootstrap = hostpb.MachineStatus_WAITING
	}
	if atomicfile.Exists(h.store.path(tombstonesDir, machineTombstone(spec.Id))) {
		m.status.Phase = hostpb.MachineStatus_DELETING
		m.delete()
	}
	return m
}

// forever is a pause that only wake can end.
const forever = time.Duration(-1)

// run manages the machine until it is removed or capstand ends.
func (m *machine) run(ctx context.Context) {
	life, end := context.WithCancel(ctx) // life ends when the machine is removed or capstand stops watching it.
	defer end()
	defer context.AfterFunc(m.deleted, end)()
	var pause time.Duration
	for attempt := 0; rest(life, m.wake, pause); {
		pause = m.live(life, &attempt)
	}
	if m.deleted.Err() == nil {
		return
	}
	m.stopPods(ctx)
	if removed := removeFinally(ctx, m.remove, func(err error) {
		m.log.Error("Cannot remove the machine; capstand tries again", "error", err)
		m.setStatus(func(s *hostpb.MachineStatus) { s.Message = "removal: " + err.Error() })
	}); removed {
		m.log.Info("Machine removed")
		close(m.gone)
	}
}

// removeFinally calls remove until it succeeds or ctx ends, with pauses that grow, and reports whether it has succeeded. show shows an error.
func removeFinally(ctx context.Context, remove func(context.Context) error, show func(error)) bool {
	var pause time.Duration
	for attempt := 0; rest(ctx, nil, pause); attempt++ {
		err := remove(ctx)
		if err == nil {
			return true
		}
		show(err)
		pause = pauseAfter(attempt)
	}
	return false
}

// rest waits until woken, at most for pause. It returns false when ctx is done.
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

// live adopts or starts the machine if it must run, and watches it until PID 1 or life ends. It returns the pause before the
// next call; attempt counts consecutive failed starts.
func (m *machine) live(life context.Context, attempt *int) time.Duration {
	if run, pause := m.toRun(); !run {
		return pause
	}
	m.settle(life)
	if pause := m.awaitConfirmation(life); pause != 0 {
		return pause
	}
	pid1, err := m.adoptOrStart(life)
	if err != nil {
		if life.Err() != nil || m.failed() {
			return forever
		}
		m.log.Error("Cannot start the machine", "error", err)
		m.setStatus(func(s *hostpb.MachineStatus) { s.Message = err.Error() })
		*attempt++
		return pauseAfter(*attempt - 1)
	}
	*attempt = 0
	defer func() { _ = pid1.Close() }()
	// A lease that ended during the start found no process to kill. Fencing sets the mark before it kills, so one side sees the other.
	if m.noticeMark() {
		return 0 // awaitConfirmation stops the machine.
	}
	m.watch(life, pid1)
	if life.Err() != nil {
		return forever
	}
	return m.died()
}

// toRun returns whether PID 1 must run now, or else when to ask again.
func (m *machine) toRun() (run bool, pause time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	// The life of a deleted machine ends in another goroutine, which may not have run yet.
	if m.deleted.Err() != nil {
		return false, forever
	}
	if m.broken != "" {
		m.publish(func(s *hostpb.MachineStatus) { s.Phase, s.Message = hostpb.MachineStatus_FAILED, m.broken })
		return false, forever
	}
	if pause := stillFailed(m.state.Failed, m.state.RestartAt, time.Now()); pause != 0 {
		m.publishFailed()
		return false, pause
	}
	if m.state.Failed != "" {
		if err := m.absolve(); err != nil {
			m.log.Error("Cannot save the state of the machine", "error", err)
			return false, maxRestartDelay
		}
	}
	if !m.state.bootstrapped() && !atomicfile.Exists(m.bootstrapFile()) {
		m.publish(func(s *hostpb.MachineStatus) { s.Message = "the machine waits for its bootstrap data" })
		return false, forever
	}
	return true, 0
}

// awaitConfirmation returns how long a machine that may have been replaced must still not start; 0 if it may. A machine that
// runs continues.
func (m *machine) awaitConfirmation(life context.Context) time.Duration {
	m.noticeMark()
	m.mu.Lock()
	unconfirmed, fenced, of := m.unconfirmed, m.fenced, m.state.ManagementCluster
	m.mu.Unlock()
	if fenced {
		return m.stayFenced(life)
	}
	deadline, bound := m.host.fence.Deadline(m.leased())
	d := doubt{unconfirmed: unconfirmed, bound: bound, expired: bound && boottime.Now() >= deadline}
	if !d.any() {
		return 0
	}
	var err error
	if d.running, err = m.hasProcess(life); err != nil {
		if life.Err() == nil {
			m.log.Error("Cannot find out whether the machine runs, so it does not start without a confirmation; capstand tries again", "error", err)
			m.setStatus(func(s *hostpb.MachineStatus) { s.Message = err.Error() })
		}
		return maxRestartDelay
	}
	pause, message := d.confirmation(m.host.contacts.patience(of, time.Now()))
	if pause != 0 {
		m.setStatus(func(s *hostpb.MachineStatus) {
			s.Phase, s.Message = hostpb.MachineStatus_PENDING, message
			s.Unconfirmed = s.Unconfirmed || unconfirmed
		})
		return pause
	}
	if !d.running {
		m.log.Warn("No manager has confirmed the machine in time; capstand starts it")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.confirm()
	return 0
}

// hasProcess returns whether the machine's PID 1 runs.
func (m *machine) hasProcess(life context.Context) (bool, error) {
	pid1, err := m.find(life)
	if err != nil || pid1 == nil {
		return false, err
	}
	_ = pid1.Close()
	return true, nil
}

// confirm lets the machine start; m.mu is held.
func (m *machine) confirm() {
	if m.unconfirmed {
		if err := errors.Join(m.host.fence.Unmark(m.spec.Id), atomicfile.Remove(m.unconfirmedPath())); err != nil {
			m.log.Error("The next capstand asks again before it starts the machine", "error", err)
		}
		m.unconfirmed, m.fenced = false, false
		m.publish(func(s *hostpb.MachineStatus) {
			if s.Unconfirmed {
				s.Unconfirmed, s.Fenced, s.Message = false, false, ""
			}
		})
		m.wake.Send()
	}
}

// absolve resets the restart budget of the machine; m.mu is held.
func (m *machine) absolve() error {
	m.state.Failed, m.state.DiskLost, m.state.RestartAt, m.state.Deaths = "", false, time.Time{}, nil
	m.publish(func(s *hostpb.MachineStatus) {
		s.Phase, s.Message, s.DiskLost = hostpb.MachineStatus_RESTARTING, "the machine is being started again", false
	})
	return m.save()
}

// startAgain starts a machine that has failed, or that waits for its restart.
func (m *machine) startAgain() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.deleted.Err() != nil {
		return refusal.Errorf(hostpb.Refusal_DELETED, "machine %s is being deleted", m.spec.Id)
	}
	if m.broken != "" {
		return refusal.Errorf(hostpb.Refusal_DAMAGED, "machine %s: %s", m.spec.Id, m.broken)
	}
	m.confirm()
	if m.state.Failed == "" && m.status.Phase != hostpb.MachineStatus_RESTARTING {
		return nil
	}
	if err := m.absolve(); err != nil {
		return status.Errorf(codes.Internal, "recording the start of machine %s: %v", m.spec.Id, err)
	}
	m.wake.Send()
	return nil
}

// claim records the management cluster that has the machine's object, and confirms the machine.
func (m *machine) claim(managementCluster string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.broken != "" {
		return refusal.Errorf(hostpb.Refusal_DAMAGED, "machine %s: %s", m.spec.Id, m.broken)
	}
	before := m.state.ManagementCluster
	if before == managementCluster {
		m.confirm()
		return nil
	}
	m.state.ManagementCluster = managementCluster
	if err := m.save(); err != nil {
		m.state.ManagementCluster = before
		return status.Errorf(codes.Internal, "recording the management cluster of machine %s: %v", m.spec.Id, err)
	}
	m.publish(func(s *hostpb.MachineStatus) { s.ManagementCluster = managementCluster })
	m.confirm()
	return nil
}

// owner returns the spec, which contains the owner's namespace and name. It is empty if there is no machine.
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

// adoptOrStart returns the running PID 1, or starts a new one.
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
		m.unstage()
		m.log.Info("Running machine adopted", "pid", pid1.PID)
	}
	m.setStatus(func(s *hostpb.MachineStatus) {
		s.Phase, s.Message, s.Pid = hostpb.MachineStatus_RUNNING, "", int32(pid1.PID)
		s.StartedAt, s.Restarts = timestamppb.New(m.state.StartedAt), m.state.Restarts
	})
	return pid1, nil
}

// settle waits for the runc of a former capstand that was killed during a start. Before its end, nothing shows whether the machine runs.
func (m *machine) settle(life context.Context) {
	ctx, cancel := context.WithTimeout(life, startTimeout)
	defer cancel()
	if err := m.host.runc.Settle(ctx, m.bundle()); err != nil {
		m.log.Warn("A start of the machine has not ended", "error", err)
	}
}

func (m *machine) bundle() string { return filepath.Join(m.dir, "bundle") }

// find returns the running PID 1, or nil. Root in the machine can freeze the machine: runc calls it paused.
func (m *machine) find(ctx context.Context) (*proc.Handle, error) {
	state, err := m.host.runc.State(ctx, m.spec.Id)
	if err != nil || state.Status != "running" && state.Status != "paused" {
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

// startTimeout bounds each of the two parts of a start, without its disks. runc takes some tens of milliseconds.
const startTimeout = time.Minute

// start creates the missing parts of the machine and starts PID 1.
func (m *machine) start(life context.Context) (*proc.Handle, error) {
	begun := time.Now()
	_, span := m.span(hostScope, "Start machine")
	defer span.End()
	system, err := m.readyDisks(life)
	if err != nil {
		return nil, err
	}
	if err := life.Err(); err != nil {
		return nil, err
	}
	// The end of the machine or of capstand does not interrupt the rest of a start, except the look for host mounts: Wait waits for it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(life), startTimeout)
	defer cancel()
	if err := m.ensureNetwork(ctx); err != nil {
		return nil, err
	}
	defer m.unstage()
	mounts, err := m.stageHostMounts(life)
	if err != nil {
		return nil, err
	}
	bundle, err := m.prepare(system, mounts)
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
		err = errors.New("PID 1 ended right after its start; read the log `init` of the machine")
	}
	if err == nil {
		m.host.startSeconds.Observe(time.Since(begun).Seconds())
		m.log.Info("Machine started", "pid", pid1.PID)
	}
	return pid1, err
}

// readyDisks removes the remains of an earlier PID 1, and attaches the disk and the volumes of the machine. A check of a file system has
// no limit but life: a check that is killed begins again from zero.
func (m *machine) readyDisks(life context.Context) (runc.System, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(life), startTimeout)
	defer cancel()
	if err := m.clear(ctx); err != nil {
		return runc.System{}, err
	}
	system, err := m.chooseImage(life)
	if err != nil {
		return runc.System{}, err
	}
	if err := m.ensureDisk(life, system); err != nil {
		return runc.System{}, err
	}
	if err := m.attachVolumes(life); err != nil {
		return runc.System{}, err
	}
	if m.noticeMark() { // The lease can end during a long check.
		return runc.System{}, errors.New("fencing stopped the machine during its start")
	}
	return system, nil
}

// clear removes the remains of an earlier PID 1.
func (m *machine) clear(ctx context.Context) error {
	if err := m.endProcesses(ctx); err != nil {
		return err
	}
	if err := m.host.runc.Settle(ctx, m.bundle()); err != nil {
		return err
	}
	if err := m.endProcesses(ctx); err != nil { // Its runc may have begun them only now.
		return err
	}
	if err := hostmount.Unstage(m.stagingDir()); err != nil {
		return err
	}
	state := filepath.Join(m.host.runc.Root, m.spec.Id)
	if !atomicfile.Exists(state) {
		return nil
	}
	if err := m.host.runc.Delete(ctx, m.spec.Id); err != nil {
		// runc cannot read this state, because an earlier runc was killed. No process can be left.
		m.log.Warn("runc cannot read its state of the container; capstand removes the state", "error", err)
		return os.RemoveAll(state)
	}
	return nil
}

// endProcesses kills all processes of the machine, also those that wait for a file system which root in the machine has frozen.
func (m *machine) endProcesses(ctx context.Context) error {
	for _, d := range append(m.volumeDisks(), m.disk()) {
		if err := d.Thaw(); err != nil {
			m.log.Error("A file system of the machine may be frozen: processes that write to it do not end", "error", err)
		}
	}
	return m.cgroup().Remove(ctx)
}

// fail marks the machine as failed; m.mu is held.
func (m *machine) fail(why string) error {
	m.log.Error("Machine failed", "reason", why)
	m.state.Failed = why
	m.publishFailed()
	return errors.Join(errors.New(why), m.save())
}

// publishFailed publishes that the machine has failed; m.mu is held.
func (m *machine) publishFailed() {
	m.publish(func(s *hostpb.MachineStatus) {
		s.Phase, s.Message, s.DiskLost, s.Pid = hostpb.MachineStatus_FAILED, m.state.Failed, m.state.DiskLost, 0
	})
}

// watch follows PID 1 and the status of its init until PID 1 or life ends.
func (m *machine) watch(life context.Context, pid1 *proc.Handle) {
	ctx, stop := context.WithCancel(life)
	var all sync.WaitGroup
	all.Go(func() { watchInit(ctx, m.runDir(), func(s machineapi.Status) { m.heard(life, s) }) })
	all.Go(func() { capLog(ctx, m.initLog(), m.log) })
	all.Go(func() { m.keepConnected(ctx) })
	all.Go(func() { m.followUpdate(ctx) })
	for _, d := range append(m.volumeDisks(), m.disk()) {
		all.Go(func() { m.restartOnDiskError(ctx, d, pid1) })
	}
	if err := pid1.Wait(life); err != nil && life.Err() == nil {
		m.log.Error("Cannot watch PID 1", "error", err)
	}
	stop()
	all.Wait()
}

// died records that PID 1 ended, and returns the pause before the next start.
func (m *machine) died() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fenced {
		return 0 // The machine has not failed. awaitConfirmation reports the wait.
	}
	var delay time.Duration
	var usedUp bool
	m.state.Deaths, delay, usedUp = afterDeath(m.state.Deaths, time.Now())
	if usedUp {
		m.state.RestartAt = time.Now().Add(failedDelay)
		_ = m.fail(fmt.Sprintf("PID 1 ended %d times within %s; its init log has the cause. The machine is started again at %s",
			len(m.state.Deaths), restartWindow, m.state.RestartAt.UTC().Format(time.RFC3339)))
		return 0 // toRun returns the pause.
	}
	m.log.Warn("PID 1 ended", "deaths", len(m.state.Deaths), "restartIn", delay)
	if err := m.save(); err != nil {
		m.log.Error("Cannot save the state of the machine", "error", err)
	}
	m.reported = report{changedAt: time.Now()}
	m.publish(func(s *hostpb.MachineStatus) {
		s.Phase, s.Pid, s.Services = hostpb.MachineStatus_RESTARTING, 0, nil
		s.Message = fmt.Sprintf("PID 1 ended; started again after %s", delay)
	})
	return delay
}

// heard processes a status of the machine's init. Recording the end of the bootstrap continues after PID 1 has ended, as
// long as life.
func (m *machine) heard(life context.Context, s machineapi.Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	state, message := bootstrapStates[s.Bootstrap], oneLine(s.BootstrapMessage, maxMessage)
	m.hearUpdate(s)
	m.publish(func(status *hostpb.MachineStatus) {
		status.Services, status.Certificates = serviceStatuses(s), certificateStatuses(s)
		if !m.state.bootstrapped() { // Later starts have no bootstrap data and report no bootstrap.
			status.Bootstrap, status.BootstrapMessage = state, message
		}
	})
	final := state == hostpb.MachineStatus_SUCCEEDED || state == hostpb.MachineStatus_BOOTSTRAP_FAILED
	if final && !m.state.bootstrapped() {
		m.state.Bootstrap, m.state.BootstrapMessage, m.unsynced = state, message, true
		m.traceBootstrap(s.Times, m.state.StartedAt, time.Now(), state == hostpb.MachineStatus_BOOTSTRAP_FAILED)
		m.trace = trace.SpanContext{}
		m.host.running.Go(func() { m.recordBootstrap(life) })
	}
}

// remove removes the machine completely. It can be repeated after an error or a crash.
func (m *machine) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := m.clear(ctx); err != nil {
		return err
	}
	err := errors.Join(
		m.disk().Detach(ctx),
		m.detachVolumes(ctx),
		m.host.store.removeRunDir(m.spec.Id),
		m.host.box.Unplug(m.spec.Id),
		m.host.box.UnleaseAll(m.spec.Id),
	)
	if err != nil {
		return err
	}
	if err := m.host.store.discard(m.dir); err != nil {
		return err
	}
	if err := m.host.fence.Unmark(m.spec.Id); err != nil {
		return err
	}
	return m.forget(ctx, m)
}

// setStatus changes the status and informs watchers.
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
	if !m.forgotten && !proto.Equal(before, m.status) {
		m.host.broadcaster.Publish(events.Machine(hostpb.Event_CHANGED, m.snapshotLocked()))
	}
}

// publishDeletion publishes the last event of the machine.
func (m *machine) publishDeletion() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgotten = true
	m.host.broadcaster.Publish(events.Machine(hostpb.Event_DELETED, m.snapshotLocked()))
}

// snapshot returns the machine as clients see it.
func (m *machine) snapshot() *hostpb.Machine {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.snapshotLocked()
}

func (m *machine) snapshotLocked() *hostpb.Machine {
	spec := proto.CloneOf(m.current.Load())
	fillNetwork(spec.Network)
	return &hostpb.Machine{Spec: spec, Status: proto.CloneOf(m.status)}
}

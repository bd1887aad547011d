// Package pid1 is the first process of a machine. It prepares the machine, applies the bootstrap data, supervises the
// services, reaps orphaned processes, and reports the state of the machine to capstand. It ends only on request.
//
// Layer: node. Allowed imports: api, library, contract.
package pid1

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/blockvolume"
	"capstan.dev/capstan/internal/node/bootstrap"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/process"
	"capstan.dev/capstan/internal/node/provision"
	"capstan.dev/capstan/internal/node/supervisor"
	"capstan.dev/capstan/internal/node/update"
	"capstan.dev/capstan/internal/thread"
)

const (
	// shutdownTimeout bounds the orderly stop of all services.
	shutdownTimeout = 20 * time.Second
	// killTimeout is the time between SIGTERM and SIGKILL for all processes that are not services.
	killTimeout = 2 * time.Second
	// threads of PID 1, more than it uses at a time. The kernel can refuse it others later, while pods use up the processes of the machine.
	threads = 32
)

// poweroff is SIGRTMIN+3, which container managers send to an init to request a power-off.
const poweroff = syscall.Signal(34 + 3)

// Run is PID 1. It returns when all other processes have ended after a request to stop.
func Run(log *slog.Logger) {
	started := time.Now()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT, poweroff)
	// A closed log must not end PID 1.
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP)

	thread.Reserve(threads)
	complain(log, "protection of PID 1 from the out-of-memory killer", process.ProtectInit())
	reaper := process.NewReaper()
	metadata, err := machine.LoadOptional(machine.MetadataPath)
	complain(log, "metadata", err)
	for name, err := range prepare(metadata) {
		complain(log, name, err)
	}
	log.Info("Machine starts", "name", metadata.Name, "id", metadata.ID)

	m := &manager{
		log:        log,
		supervisor: supervisor.New(reaper, machine.LogDir, log),
		bootstrap:  initapi.Status{Bootstrap: initapi.Waiting, Updates: true, Times: machineapi.Times{Started: started}},
		changed:    make(chan struct{}),
		blocks:     blockvolume.OfMachine(),
	}
	complain(log, "block volumes", m.blocks.Prepare())
	ctx, cancel := context.WithCancel(context.Background())
	complain(log, "socket", m.serve(initapi.Socket))
	complain(log, "reservation of the kubelet", provision.RenewReservation(metadata))
	complain(log, "services", m.reload())
	go supervisor.RotateLogs(ctx, machine.LogDir)
	go m.followCertificates(ctx)
	go m.blocks.Follow(ctx, log)
	go update.NewFollower(reaper, log).Run(ctx, m.setUpdate)
	go bootstrap.New(reaper, log, metadata, setHostname).Run(ctx, m.setBootstrap)

	log.Info("Machine stops", "signal", (<-stop).String())
	cancel()
	m.shutdown()
	log.Info("Machine stopped")
}

// complain logs an error of the preparation. PID 1 continues, because a person can examine a machine that is up.
func complain(log *slog.Logger, step string, err error) {
	if err != nil {
		log.Error("Cannot prepare the machine", "step", step, "error", err)
	}
}

// manager contains the state that the socket serves.
type manager struct {
	log        *slog.Logger
	supervisor *supervisor.Supervisor
	blocks     *blockvolume.Devices

	// reloading serialises changes to the set of services.
	reloading sync.Mutex
	// stoppingPods lets the pods stop once.
	stoppingPods sync.Once

	mu        sync.Mutex
	bootstrap initapi.Status // without services
	changed   chan struct{}  // closed at the next change of bootstrap, certificates or update
}

func (m *manager) setUpdate(u *machineapi.Update) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bootstrap.Update = u
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *manager) setBootstrap(state initapi.Bootstrap, message string) {
	m.log.Info("Bootstrap", "state", string(state), "message", message)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bootstrap.Bootstrap, m.bootstrap.BootstrapMessage = state, message
	switch state {
	case initapi.Started:
		m.bootstrap.Times.Applied = time.Now()
	case initapi.Succeeded, initapi.Failed:
		m.bootstrap.Times.Ended = time.Now()
	}
	close(m.changed)
	m.changed = make(chan struct{})
}

// setStalled sets the reason why the bootstrap makes no progress. It can end at the same time: its result stays.
func (m *manager) setStalled(reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bootstrap.Bootstrap != initapi.Started || m.bootstrap.BootstrapMessage == reason {
		return
	}
	m.bootstrap.BootstrapMessage = reason
	close(m.changed)
	m.changed = make(chan struct{})
}

// reload makes the services those of their files. A service that runs stays as it is while its file cannot be used.
func (m *manager) reload() error {
	m.reloading.Lock()
	defer m.reloading.Unlock()
	services, unusable, err := supervisor.Load(supervisor.Dir)
	return errors.Join(err, m.supervisor.Apply(services, unusable...))
}

// serve listens on the socket. Only root can connect.
func (m *manager) serve(path string) error {
	if err := atomicfile.Remove(path); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	server := &http.Server{Handler: m.routes(), ReadHeaderTimeout: 10 * time.Second}
	go func() { complain(m.log, "socket", server.Serve(listener)) }()
	return nil
}

// shutdown ends all processes: first the pods, then the services in order, then the others.
func (m *manager) shutdown() {
	m.stopPods(machineapi.DefaultStopPods)
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	m.supervisor.Shutdown(ctx)
	_ = syscall.Kill(-1, syscall.SIGTERM)
	for deadline := time.Now().Add(killTimeout); anyLeft() && time.Now().Before(deadline); {
		// The reaper waits for the processes and reports no end of theirs, so shutdown asks the kernel.
		time.Sleep(20 * time.Millisecond)
	}
	_ = syscall.Kill(-1, syscall.SIGKILL)
}

// anyLeft returns whether other processes exist.
func anyLeft() bool { return syscall.Kill(-1, 0) == nil }

// setHostname changes the host name of the running machine and in /etc.
func setHostname(name string) error {
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("setting the host name: %w", err)
	}
	return atomicfile.WriteFile("/etc/hostname", []byte(name+"\n"), 0o644)
}

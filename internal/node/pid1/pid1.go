// Package pid1 is the first process of a machine: it prepares what little a machine needs, applies
// the bootstrap data, supervises the services, reaps what others leave behind, and tells capstand
// about all of it. It ends only when it is told to.
//
// Layer: node.
package pid1

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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
	"capstan.dev/capstan/internal/node/bootstrap"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/process"
	"capstan.dev/capstan/internal/node/supervisor"
)

const (
	// shutdownTimeout bounds the orderly stop of all services.
	shutdownTimeout = 20 * time.Second
	// killTimeout is what everything else gets between SIGTERM and SIGKILL.
	killTimeout = 2 * time.Second
)

// poweroff is SIGRTMIN+3, with which container managers ask an init to power off.
const poweroff = syscall.Signal(34 + 3)

// Run is PID 1. It returns when the machine was told to stop, with everything else ended.
func Run(log *slog.Logger) {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT, poweroff)
	// A closed log must not end PID 1.
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP)

	complain(log, "protection from lack of memory", process.ProtectInit())
	reaper := process.NewReaper()
	metadata, err := machine.LoadOptional(machine.MetadataPath)
	complain(log, "metadata", err)
	for name, err := range prepare(metadata) {
		complain(log, name, err)
	}
	log.Info("machine starts", "name", metadata.Name, "id", metadata.ID)

	m := &manager{
		log:        log,
		supervisor: supervisor.New(reaper, machine.LogDir, log),
		bootstrap:  initapi.Status{Bootstrap: initapi.Waiting},
		changed:    make(chan struct{}),
	}
	ctx, cancel := context.WithCancel(context.Background())
	complain(log, "socket", m.serve(initapi.Socket))
	complain(log, "services", m.reload())
	go supervisor.RotateLogs(ctx, machine.LogDir)
	go m.followCertificates(ctx)
	go bootstrap.New(reaper, log, metadata, setHostname).Run(ctx, m.setBootstrap)

	log.Info("machine stops", "signal", (<-stop).String())
	cancel()
	m.shutdown()
	log.Info("machine stopped")
}

// complain logs what could not be done. PID 1 goes on: a machine that is up can be looked at.
func complain(log *slog.Logger, what string, err error) {
	if err != nil {
		log.Error("cannot prepare the machine", "what", what, "error", err)
	}
}

// manager is what the socket shows.
type manager struct {
	log        *slog.Logger
	supervisor *supervisor.Supervisor

	// reloading serialises changes of the set of services.
	reloading sync.Mutex

	mu        sync.Mutex
	bootstrap initapi.Status // without services
	changed   chan struct{}  // closed at the next change of bootstrap or certificates
}

func (m *manager) setBootstrap(state initapi.Bootstrap, message string) {
	m.log.Info("bootstrap", "state", string(state), "message", message)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bootstrap.Bootstrap, m.bootstrap.BootstrapMessage = state, message
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *manager) reload() error {
	m.reloading.Lock()
	defer m.reloading.Unlock()
	services, err := supervisor.Load(supervisor.Dir)
	return errors.Join(err, m.supervisor.Apply(services))
}

// serve listens on the socket. Only root can connect.
func (m *manager) serve(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
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

// shutdown ends everything: services in order, then whatever is left.
func (m *manager) shutdown() {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	m.supervisor.Shutdown(ctx)
	_ = syscall.Kill(-1, syscall.SIGTERM)
	for deadline := time.Now().Add(killTimeout); anyLeft() && time.Now().Before(deadline); {
		// The reaper sees each end; who is still there is only known by asking.
		time.Sleep(20 * time.Millisecond)
	}
	_ = syscall.Kill(-1, syscall.SIGKILL)
}

// anyLeft says whether there are processes beside this one.
func anyLeft() bool { return syscall.Kill(-1, 0) == nil }

// setHostname changes the host name, now and in /etc.
func setHostname(name string) error {
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("setting the host name: %w", err)
	}
	return atomicfile.WriteFile("/etc/hostname", []byte(name+"\n"), 0o644)
}

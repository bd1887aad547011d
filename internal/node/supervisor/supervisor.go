// Package supervisor keeps the services of a machine running.
//
// Each service has a goroutine that starts the process, probes it until it is ready, and starts it again when it ends. The
// pause is 100 ms at first and doubles to 10 s; it is reset after the process has run for 10 s. Services start in the order
// of their After lists. A restart does not wait for other services.
//
// Layer: node. Allowed imports: api, library, contract.
package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/process"
)

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 10 * time.Second
	// healthyTime is the run time that resets the back-off.
	healthyTime = 10 * time.Second
	// probePeriod before a service is ready, because there is no event when a socket answers.
	probePeriod = 50 * time.Millisecond
	// healthPeriod is the period of the probe after a service was ready, for the same reason.
	healthPeriod = 10 * time.Second
)

// Supervisor runs services. Create it with New.
type Supervisor struct {
	starter process.Starter
	logs    string
	log     *slog.Logger

	mu    sync.Mutex
	units map[string]*unit
	// changed is closed and replaced at each change of a state.
	changed chan struct{}
	closed  bool
}

// unit is a service with its state. The Supervisor's mu guards the fields.
type unit struct {
	Service
	state  initapi.Service
	cancel context.CancelFunc
	done   chan struct{} // closed when the goroutine has ended; nil when none was started
	// replaced: Apply stops the unit, and removes it after that. It does not start again.
	replaced bool
}

// New returns a Supervisor that writes logs to the folder, as <service>.log.
func New(starter process.Starter, logs string, log *slog.Logger) *Supervisor {
	return &Supervisor{starter: starter, logs: logs, log: log, units: map[string]*unit{}, changed: make(chan struct{})}
}

// Apply replaces the set of services: it starts new ones, restarts changed ones and those that require them, and stops removed
// ones. The services in keep stay as they are. Its calls must not overlap.
func (s *Supervisor) Apply(services []Service, keep ...string) error {
	wanted := map[string]Service{}
	s.mu.Lock()
	for _, name := range keep {
		if u := s.units[name]; u != nil {
			wanted[name] = u.Service
		}
	}
	s.mu.Unlock()
	for _, service := range services {
		wanted[service.Name] = service
	}
	if names := cycle(wanted); names != nil {
		return fmt.Errorf("services wait for each other in a cycle: %s", strings.Join(names, " after "))
	}
	s.mu.Lock()
	stop := stopsAtReload(s.services(), wanted)
	for _, name := range stop {
		s.units[name].replaced = true
	}
	s.mu.Unlock()
	for _, name := range stop {
		if err := s.Stop(name); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range stop {
		delete(s.units, name)
	}
	for name, service := range wanted {
		if s.units[name] == nil {
			s.units[name] = &unit{Service: service}
			s.start(s.units[name])
		}
	}
	s.notify()
	return nil
}

// Start starts a service that was stopped. It does not affect a running service.
func (s *Supervisor) Start(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	u, err := s.unit(name)
	if err != nil {
		return err
	}
	s.start(u)
	return nil
}

// Stop stops a service and returns when its process has ended.
func (s *Supervisor) Stop(name string) error {
	s.mu.Lock()
	u, err := s.unit(name)
	if err != nil || u.done == nil {
		s.mu.Unlock()
		return err
	}
	cancel, done := u.cancel, u.done
	s.mu.Unlock()
	cancel()
	<-done
	return nil
}

// Restart stops and starts a service.
func (s *Supervisor) Restart(name string) error {
	if err := s.Stop(name); err != nil {
		return err
	}
	return s.Start(name)
}

// Reload sends SIGHUP to the main process of a service.
func (s *Supervisor) Reload(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	u, err := s.unit(name)
	if err != nil {
		return err
	}
	if u.state.PID == 0 {
		return fmt.Errorf("service %s does not run", name)
	}
	return syscall.Kill(int(u.state.PID), syscall.SIGHUP)
}

// Shutdown stops services permanently: those with the names, or all. Each one stops before the services that it starts after.
// From now on no service starts any more. When ctx ends, the caller must end the remaining processes.
func (s *Supervisor) Shutdown(ctx context.Context, names ...string) {
	s.mu.Lock()
	s.closed = true
	order := stopOrder(s.services())
	s.mu.Unlock()
	if len(names) > 0 {
		order = slices.DeleteFunc(order, func(name string) bool { return !slices.Contains(names, name) })
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, name := range order {
			_ = s.Stop(name)
		}
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// Services returns the state of all services by name, and a channel that is closed at the next change.
func (s *Supervisor) Services() ([]initapi.Service, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	states := make([]initapi.Service, 0, len(s.units))
	for _, u := range s.units {
		states = append(states, u.state)
	}
	slices.SortFunc(states, func(a, b initapi.Service) int { return strings.Compare(a.Name, b.Name) })
	return states, s.changed
}

// services returns the services by name. mu is held.
func (s *Supervisor) services() map[string]Service {
	services := map[string]Service{}
	for name, u := range s.units {
		services[name] = u.Service
	}
	return services
}

func (s *Supervisor) unit(name string) (*unit, error) {
	if u := s.units[name]; u != nil {
		return u, nil
	}
	return nil, fmt.Errorf("no service %q in %s", name, Dir)
}

// start runs the unit's goroutine if it does not run yet. mu is held.
func (s *Supervisor) start(u *unit) {
	if s.closed || u.replaced {
		return
	}
	if u.done != nil {
		select {
		case <-u.done:
		default:
			return
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	u.cancel, u.done = cancel, make(chan struct{})
	u.state = initapi.Service{Name: u.Name, State: initapi.StateWaiting}
	go func(done chan struct{}) {
		defer close(done)
		defer cancel()
		s.run(ctx, u)
		s.set(u, func(state *initapi.Service) { state.State, state.PID, state.Message = initapi.StateStopped, 0, "" })
	}(u.done)
}

// notify informs watchers of a change. mu is held.
func (s *Supervisor) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// set changes the state of a unit and informs watchers, if it differs.
func (s *Supervisor) set(u *unit, change func(*initapi.Service)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := u.state
	change(&u.state)
	if u.state != before {
		s.notify()
	}
}

// run starts and restarts a service until it is stopped.
func (s *Supervisor) run(ctx context.Context, u *unit) {
	if !s.waitAfter(ctx, u) {
		return
	}
	pauses := backoff.Doubling(minBackoff, maxBackoff)
	for {
		started := time.Now()
		err := s.runOnce(ctx, u)
		if ctx.Err() != nil {
			return
		}
		if time.Since(started) >= healthyTime {
			pauses = backoff.Doubling(minBackoff, maxBackoff)
		}
		pause := pauses.Step()
		s.log.Warn("Service ended", "service", u.Name, "reason", err, "restartIn", pause)
		s.set(u, func(state *initapi.Service) {
			state.State, state.PID, state.Restarts = initapi.StateBackoff, 0, state.Restarts+1
			state.Message = err.Error() + "; see " + s.logPath(u.Name)
		})
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// waitAfter waits until all services in After are ready.
func (s *Supervisor) waitAfter(ctx context.Context, u *unit) bool {
	for {
		states, changed := s.Services()
		missing := initapi.Status{Services: states}.NotReady(u.After)
		if len(missing) == 0 {
			return true
		}
		var names []string
		for _, m := range missing {
			name, _, _ := strings.Cut(m, ":")
			names = append(names, name)
		}
		s.set(u, func(state *initapi.Service) { state.Message = "waits for " + strings.Join(names, ", ") })
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

// runOnce starts the process and returns when it has ended, with the reason as the error.
func (s *Supervisor) runOnce(ctx context.Context, u *unit) error {
	cmd, done, err := s.spawn(u)
	if err != nil {
		return err
	}
	pid := cmd.Process.Pid
	s.set(u, func(state *initapi.Service) {
		state.State, state.PID, state.Message = initapi.StateStarting, int32(pid), ""
	})
	probing, cancel := context.WithCancel(ctx)
	probed := make(chan struct{})
	go func() {
		defer close(probed)
		s.probe(probing, u)
	}()
	exit := s.wait(ctx, u, pid, done)
	cancel()
	<-probed
	if u.killsGroup() {
		_ = syscall.Kill(-pid, syscall.SIGKILL)
	}
	if err := exit.Err(); err != nil {
		return err
	}
	return errors.New("the process ended with exit code 0 without a request")
}

func (s *Supervisor) spawn(u *unit) (*exec.Cmd, <-chan process.Exit, error) {
	if err := os.MkdirAll(s.logs, 0o750); err != nil {
		return nil, nil, err
	}
	log, err := os.OpenFile(s.logPath(u.Name), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, nil, err
	}
	defer log.Close()
	cmd := exec.Command(u.Command[0], u.Command[1:]...)
	home := "/root"
	if u.User != "" {
		home = "/"
	}
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + home}, u.Env...)
	cmd.Dir = u.Dir
	if cmd.Dir == "" {
		cmd.Dir = "/"
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	done, err := u.start(s.starter, cmd)
	if err != nil {
		return nil, nil, err
	}
	// This fails for a process that has ended, and without CAP_SYS_RESOURCE, which lowering needs.
	_ = process.SetOOMScore(cmd.Process.Pid, u.oomScore())
	return cmd, done, nil
}

// wait waits for the end of the process. When ctx ends, it sends the stop signal, and SIGKILL after the timeout.
func (s *Supervisor) wait(ctx context.Context, u *unit, pid int, done <-chan process.Exit) process.Exit {
	select {
	case exit := <-done:
		return exit
	case <-ctx.Done():
	}
	_ = syscall.Kill(pid, u.stopSignal())
	select {
	case exit := <-done:
		return exit
	case <-time.After(u.stopTimeout()):
		s.log.Warn("Service did not stop and is killed", "service", u.Name, "after", u.stopTimeout())
		_ = kill(pid)
		return <-done
	}
}

// probe updates the state of a running process.
func (s *Supervisor) probe(ctx context.Context, u *unit) {
	if u.Ready == nil {
		s.set(u, func(state *initapi.Service) { state.State = initapi.StateReady })
		return
	}
	prober := &prober{Probe: u.Ready, starter: s.starter}
	defer prober.close()
	ready := false
	for period := probePeriod; ; {
		err := prober.try(ctx)
		if ctx.Err() != nil {
			return
		}
		switch {
		case err == nil:
			ready, period = true, healthPeriod
			s.set(u, func(state *initapi.Service) { state.State, state.Message = initapi.StateReady, "" })
		case ready:
			s.set(u, func(state *initapi.Service) { state.State, state.Message = initapi.StateRunning, err.Error() })
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(period):
		}
	}
}

func (s *Supervisor) logPath(name string) string { return filepath.Join(s.logs, name+".log") }

func kill(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) }

package embedded

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"capstan.dev/capstan/internal/backoff"
)

const (
	// firstBackoff doubles with each quick end of a process, up to lastBackoff.
	firstBackoff = 200 * time.Millisecond
	lastBackoff  = 10 * time.Second
	// stableAfter is how long a process must have run for its next end to be the first one again.
	stableAfter = 30 * time.Second
	// probeInterval: no component tells when it serves, so it is asked.
	probeInterval = 50 * time.Millisecond
	// watchInterval: one that serves may stop to, while what it needs is away.
	watchInterval = 3 * time.Second
	// stopGrace is how long a process may take to end before it is killed.
	stopGrace = 15 * time.Second
)

// ProcessState is the state of a component's process.
type ProcessState string

// States of a component's process.
const (
	// ProcessWaiting: the process was not started, because a component that it needs does not serve yet.
	ProcessWaiting ProcessState = "Waiting"
	// ProcessStarting: the process runs and does not answer its probe. It may have answered before.
	ProcessStarting ProcessState = "Starting"
	// ProcessReady: the process runs and answers its probe.
	ProcessReady ProcessState = "Ready"
	// ProcessBackoff: the process ended and will be started again.
	ProcessBackoff ProcessState = "Backoff"
	// ProcessStopped: the process ended because the management plane stopped it.
	ProcessStopped ProcessState = "Stopped"
)

// ProcessStatus is what is known of a component.
type ProcessStatus struct {
	Name     string       `json:"name"`
	State    ProcessState `json:"state"`
	PID      int          `json:"pid,omitempty"`
	Restarts int          `json:"restarts"`
	// Message is the reason why it is not ready.
	Message string `json:"message,omitempty"`
}

// spawner starts processes from one thread that lives as long as this one does. The kernel kills
// the children when the thread that made them ends, however it ends: no component outlives its
// supervisor, so that none is ever there twice.
type spawner struct {
	requests chan spawnRequest
}

type spawnRequest struct {
	cmd    *exec.Cmd
	result chan error
}

func newSpawner() *spawner {
	s := &spawner{requests: make(chan spawnRequest)}
	go func() {
		runtime.LockOSThread()
		for r := range s.requests {
			r.result <- r.cmd.Start()
		}
	}()
	return s
}

func (s *spawner) start(cmd *exec.Cmd) error {
	r := spawnRequest{cmd, make(chan error, 1)}
	s.requests <- r
	return <-r.result
}

// process supervises one component.
type process struct {
	component
	log     string
	owner   user
	spawner *spawner
	// changed is called with each new status.
	changed func(ProcessStatus)

	stop, stopped chan struct{}
	begun         sync.Once
	stopOnce      sync.Once
	ready         chan struct{} // closed when it was ready for the first time
	readyOnce     sync.Once

	mu     sync.Mutex
	status ProcessStatus
}

func newProcess(c component, log string, owner user, spawner *spawner, changed func(ProcessStatus)) *process {
	return &process{
		component: c, log: log, owner: owner, spawner: spawner, changed: changed,
		stop: make(chan struct{}), stopped: make(chan struct{}), ready: make(chan struct{}),
		status: ProcessStatus{Name: c.name, State: ProcessWaiting},
	}
}

func (p *process) update(change func(*ProcessStatus)) {
	p.mu.Lock()
	change(&p.status)
	status := p.status
	p.mu.Unlock()
	p.changed(status)
}

// begin starts to keep the component running.
func (p *process) begin() { p.begun.Do(func() { go p.run() }) }

// run keeps the component running until Stop.
func (p *process) run() {
	defer close(p.stopped)
	for failures := 0; ; {
		began := time.Now()
		err := p.runOnce()
		select {
		case <-p.stop:
			p.update(func(s *ProcessStatus) { s.State, s.PID, s.Message = ProcessStopped, 0, "" })
			return
		default:
		}
		if time.Since(began) > stableAfter {
			failures = 0
		}
		wait := backoff.After(failures, firstBackoff, lastBackoff)
		failures++
		p.update(func(s *ProcessStatus) {
			s.State, s.PID, s.Restarts = ProcessBackoff, 0, s.Restarts+1
			s.Message = fmt.Sprintf("%v (starts again in %s; log: %s)", err, wait, p.log)
		})
		select {
		case <-p.stop:
			p.update(func(s *ProcessStatus) { s.State = ProcessStopped })
			return
		case <-time.After(wait):
		}
	}
}

// runOnce starts the component and waits for its end.
func (p *process) runOnce() error {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := p.command(log)
	if err := p.spawner.start(cmd); err != nil {
		return fmt.Errorf("cannot start %s: %w", p.path, err)
	}
	p.update(func(s *ProcessStatus) { s.State, s.PID = ProcessStarting, cmd.Process.Pid })

	ended := make(chan struct{})
	var helpers sync.WaitGroup
	helpers.Go(func() { p.end(cmd.Process, ended) })
	helpers.Go(func() { p.probe(ended) })
	err = cmd.Wait()
	close(ended)
	helpers.Wait()
	if err == nil {
		err = errors.New("ended by itself")
	}
	if last := lastLine(log); last != "" {
		err = fmt.Errorf("%w: %s", err, last)
	}
	return err
}

func lastLineOf(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	return lastLine(f)
}

// lastLine of a log: what a component says before it ends is why.
func lastLine(log *os.File) string {
	const most = 400
	info, err := log.Stat()
	if err != nil {
		return ""
	}
	data := make([]byte, 4096)
	n, _ := log.ReadAt(data, max(0, info.Size()-int64(len(data))))
	lines := strings.Split(strings.TrimSpace(string(data[:n])), "\n")
	last := lines[len(lines)-1]
	return last[:min(most, len(last))]
}

func (p *process) command(log *os.File) *exec.Cmd {
	cmd := exec.Command(p.path, p.args...) // Stop ends it, with grace
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, p.env...)
	// A group of its own: an interrupt at the terminal reaches only the supervisor, which ends
	// the components in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if !p.asRoot {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(p.owner.uid), Gid: uint32(p.owner.gid)}
	}
	return cmd
}

// end asks the process to end once Stop is called, and kills it if it does not.
func (p *process) end(process *os.Process, ended <-chan struct{}) {
	select {
	case <-ended:
		return
	case <-p.stop:
	}
	_ = process.Signal(syscall.SIGTERM)
	select {
	case <-ended:
	case <-time.After(stopGrace):
		_ = process.Kill()
	}
}

// probe asks the component until it serves, and then now and then whether it still does.
func (p *process) probe(ended <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	for serves := false; ; {
		err := p.component.ready(ctx)
		switch {
		case err == nil && !serves:
			serves = true
			p.update(func(s *ProcessStatus) { s.State, s.Message = ProcessReady, "" })
			p.readyOnce.Do(func() { close(p.ready) })
		case err != nil && serves && ctx.Err() == nil:
			serves = false
			p.update(func(s *ProcessStatus) { s.State, s.Message = ProcessStarting, "does not serve: "+err.Error() })
		}
		pause := probeInterval
		if serves {
			pause = watchInterval
		}
		select {
		case <-ended:
			return
		case <-p.stop:
			return
		case <-time.After(pause):
		}
	}
}

// Stop ends the component and waits for it.
func (p *process) Stop() {
	p.stopOnce.Do(func() { close(p.stop) })
	p.begun.Do(func() { close(p.stopped) }) // never begun: there is nothing to wait for
	<-p.stopped
}

// waitReady returns when the component was ready once.
func (p *process) waitReady(ctx context.Context) error {
	select {
	case <-p.ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

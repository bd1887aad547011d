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
	"capstan.dev/capstan/internal/machineapi"
)

const (
	// firstBackoff is the delay of the first restart. It doubles with each further failure, up to lastBackoff.
	firstBackoff = 200 * time.Millisecond
	lastBackoff  = 10 * time.Second
	// stableAfter is the run time of a process after which the delay starts with firstBackoff again.
	stableAfter = 30 * time.Second
	// probeInterval is the interval between probes until the first success. Components send no event when they are ready.
	probeInterval = 50 * time.Millisecond
	// watchInterval is the interval between probes afterwards. A component can fail when one that it needs has failed.
	watchInterval = 3 * time.Second
	// stopGrace is the time after which a process that does not end is killed.
	stopGrace = 15 * time.Second
	// capstandGrace is stopGrace of capstand. When the box shuts down, capstand stops the pods and then the machines.
	capstandGrace = machineapi.DefaultStopPods + time.Minute
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

// ProcessStatus is the status of a component.
type ProcessStatus struct {
	Name     string       `json:"name"`
	State    ProcessState `json:"state"`
	PID      int          `json:"pid,omitempty"`
	Restarts int          `json:"restarts"`
	// Message is the reason why it is not ready.
	Message string `json:"message,omitempty"`
}

// spawner starts processes from a thread that lives as long as this process. The kernel kills the children when this thread
// ends for any reason. No component outlives its supervisor, so none ever runs twice.
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
	ready         chan struct{} // closed when the component is ready for the first time
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

// begin starts the supervision of the component.
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
			s.Message = fmt.Sprintf("%v (next start in %s; log: %s)", err, wait, p.log)
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
		err = errors.New("the process ended")
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

// lastLine returns the last line of a log. It usually contains the reason why a component ended.
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
	cmd := exec.Command(p.path, p.args...) // Stop ends it
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, p.env...)
	// Its own process group: only the supervisor receives an interrupt of the terminal, and ends the components in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if !p.asRoot {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(p.owner.uid), Gid: uint32(p.owner.gid)}
	}
	return cmd
}

// end terminates the process after Stop was called, and kills it after its grace period.
func (p *process) end(process *os.Process, ended <-chan struct{}) {
	select {
	case <-ended:
		return
	case <-p.stop:
	}
	_ = process.Signal(syscall.SIGTERM)
	select {
	case <-ended:
	case <-time.After(max(stopGrace, p.grace)):
		_ = process.Kill()
	}
}

// probe probes the component until it is ready, and every watchInterval afterwards.
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
			p.update(func(s *ProcessStatus) { s.State, s.Message = ProcessStarting, "does not answer: "+err.Error() })
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
	p.begun.Do(func() { close(p.stopped) }) // It was never started.
	<-p.stopped
}

// waitReady returns when the component is ready for the first time.
func (p *process) waitReady(ctx context.Context) error {
	select {
	case <-p.ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

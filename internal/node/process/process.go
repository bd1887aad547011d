// Package process starts child processes and reports their end.
//
// PID 1 must wait for every process of its machine: its children and orphaned processes. A second waiter for the same child
// would race with it, so capstan-init starts all processes through a Starter.
//
// Layer: node. Allowed imports: api, library, contract.
package process

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
)

// Exit describes the end of a process.
type Exit struct {
	// Code is the exit status, 128 + the signal's number when a signal ended the process.
	Code int
	// Signal that ended the process, 0 if none did.
	Signal syscall.Signal
}

// Err returns nil for a process that ended with status 0.
func (e Exit) Err() error {
	switch {
	case e.Signal != 0:
		return fmt.Errorf("killed by signal %d (%s)", int(e.Signal), e.Signal)
	case e.Code != 0:
		return fmt.Errorf("exit code %d", e.Code)
	}
	return nil
}

// Starter starts a command. The channel gets the Exit once and is not closed. Standard streams must
// be files or nil, because nobody calls cmd.Wait.
type Starter interface {
	Start(cmd *exec.Cmd) (<-chan Exit, error)
}

// Reaper is the Starter of PID 1. It waits for all processes.
type Reaper struct {
	// mu is held while a child is started and added to children, and while the reaper waits for a process, so no child ends
	// unnoticed in between.
	mu       sync.Mutex
	children map[int]chan Exit
	signals  chan os.Signal
}

// NewReaper returns a Reaper that reaps until this process ends.
func NewReaper() *Reaper {
	r := &Reaper{children: map[int]chan Exit{}, signals: make(chan os.Signal, 1)}
	signal.Notify(r.signals, syscall.SIGCHLD)
	go func() {
		for range r.signals {
			r.reap()
		}
	}()
	return r
}

// Start implements Starter.
func (r *Reaper) Start(cmd *exec.Cmd) (<-chan Exit, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	// The child must not inherit the protection of PID 1. The error of a child that has ended does not matter.
	_ = SetOOMScore(cmd.Process.Pid, 0)
	done := make(chan Exit, 1)
	r.children[cmd.Process.Pid] = done
	return done, nil
}

// reap collects all processes that have ended, because one signal can stand for several.
func (r *Reaper) reap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if done, ours := r.children[pid]; ours {
			delete(r.children, pid)
			done <- ExitOf(status)
		}
	}
}

// ExitOf returns the end of a process from its wait status.
func ExitOf(status syscall.WaitStatus) Exit {
	if status.Signaled() {
		return Exit{Code: 128 + int(status.Signal()), Signal: status.Signal()}
	}
	return Exit{Code: status.ExitStatus()}
}

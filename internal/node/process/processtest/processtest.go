// Package processtest starts processes in tests, which do not run as PID 1.
package processtest

import (
	"os/exec"
	"syscall"

	"capstan.dev/capstan/internal/node/process"
)

// Starter is the process.Starter of a test. It waits only for its own children.
type Starter struct{}

// Start implements process.Starter.
func (Starter) Start(cmd *exec.Cmd) (<-chan process.Exit, error) {
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	done := make(chan process.Exit, 1)
	go func() {
		_ = cmd.Wait()
		done <- process.ExitOf(cmd.ProcessState.Sys().(syscall.WaitStatus))
	}()
	return done, nil
}

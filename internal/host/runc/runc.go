package runc

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// Runc runs the runc of the assets with a state folder of its own.
type Runc struct {
	// Binary, for example <assets>/node/bin/runc.
	Binary string
	// Root holds runc's state of each container.
	Root string
}

// State of a container as runc sees it.
type State struct {
	// Status is created, running, stopped or paused; empty when there is no such container.
	Status string `json:"status"`
	// PID of the container's first process on the host; 0 when stopped.
	PID int `json:"pid"`
	// Annotations of the container's Spec.
	Annotations map[string]string `json:"annotations"`
}

// State asks for a container, the zero State when there is none.
func (r Runc) State(ctx context.Context, id string) (State, error) {
	if _, err := os.Stat(filepath.Join(r.Root, id)); os.IsNotExist(err) {
		return State{}, nil
	}
	out, err := r.run(ctx, nil, "state", id)
	if err != nil {
		if strings.Contains(err.Error(), "does not exist") {
			return State{}, nil
		}
		return State{}, err
	}
	var s State
	err = json.Unmarshal(out, &s)
	return s, err
}

// Start runs the container of a bundle in the background. Its output goes to log: to the file itself,
// not through a pipe, so it does not matter whether capstand lives.
func (r Runc) Start(ctx context.Context, id, bundle string, log *os.File) error {
	cmd := r.command(ctx, "run", "--detach", "--bundle", bundle, id)
	cmd.Stdout, cmd.Stderr = log, log
	start, _ := log.Seek(0, io.SeekEnd)
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("runc run: %w: %s", err, lastLine(log, start))
	}
	return nil
}

// Delete kills what is left of a container and forgets it. A container that does not exist is fine.
func (r Runc) Delete(ctx context.Context, id string) error {
	_, err := r.run(ctx, nil, "delete", "--force", id)
	return err
}

// Exec runs a program in a running container with stdin, and returns its output.
func (r Runc) Exec(ctx context.Context, id string, stdin *os.File, args ...string) ([]byte, error) {
	return r.run(ctx, stdin, append([]string{"exec", id}, args...)...)
}

func (r Runc) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, r.Binary, append([]string{"--root", r.Root}, args...)...)
	// A session of its own: a terminal's interrupt of capstand does not reach the machine.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

func (r Runc) run(ctx context.Context, stdin *os.File, args ...string) ([]byte, error) {
	cmd := r.command(ctx, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if stdin != nil {
		cmd.Stdin = stdin
	}
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("runc %s: %w: %s", args[0], err, strings.TrimSpace(errs.String()))
	}
	return out.Bytes(), nil
}

// lastLine returns the last line that was written to log after start, for an error message.
func lastLine(log *os.File, start int64) string {
	data := make([]byte, 4096)
	n, _ := log.ReadAt(data, start)
	lines := strings.Split(strings.TrimSpace(string(data[:n])), "\n")
	return lines[len(lines)-1]
}

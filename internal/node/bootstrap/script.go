package bootstrap

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"capstan.dev/capstan/internal/node/cloudconfig"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// script is the step that runs a list of commands. They run in one shell, as with cloud-init: one may change folder or
// set variables for the next. Unlike with cloud-init, the first command that fails ends the script.
//
// The shell reads the commands from a pipe, so they are neither arguments nor a file. It writes the number of each
// successful command to another pipe, so no command runs again after a crash.
func (r *Runner) script(name string, commands []cloudconfig.Command) step {
	return step{name: name, do: func(ctx context.Context) error {
		if r.firstMissing(name, commands) == len(commands) {
			return nil
		}
		code, err := r.runScript(ctx, name, commands)
		if err != nil {
			return err
		}
		missing := r.firstMissing(name, commands)
		switch {
		case missing == len(commands):
			return nil
		case code == 0:
			return fmt.Errorf("[%d]: ended the script with exit code 0 before the remaining commands; see %s", missing, r.LogPath)
		}
		return fmt.Errorf("[%d]: exit code %d; see %s on the machine", missing, code, r.LogPath)
	}}
}

func commandStep(name string, i int) string { return fmt.Sprintf("%s[%d]", name, i) }

// firstMissing returns the index of the first command that is not in the record.
func (r *Runner) firstMissing(name string, commands []cloudconfig.Command) int {
	for i := range commands {
		if !slices.Contains(r.record.Done, commandStep(name, i)) {
			return i
		}
	}
	return len(commands)
}

// runScript runs the missing commands and records each successful one.
func (r *Runner) runScript(ctx context.Context, name string, commands []cloudconfig.Command) (int, error) {
	if err := os.MkdirAll(filepath.Dir(r.LogPath), 0o750); err != nil {
		return 0, err
	}
	log, err := os.OpenFile(r.LogPath, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	scriptOut, scriptIn, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	progressOut, progressIn, err := os.Pipe()
	if err != nil {
		return 0, errors.Join(err, scriptOut.Close(), scriptIn.Close())
	}
	defer progressOut.Close()
	defer progressIn.Close()

	cmd := exec.Command("/bin/sh", "/dev/fd/3")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "INSTANCE_ID="+r.Metadata.ID)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{scriptOut, progressIn}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	exit, err := r.Starter.Start(cmd)
	closeErr := scriptOut.Close()
	if err != nil {
		return 0, errors.Join(err, scriptIn.Close())
	}
	go func() {
		_, _ = scriptIn.WriteString(scriptText(commands, r.firstMissing(name, commands)))
		_ = scriptIn.Close()
	}()
	progress := make(chan error, 1)
	go func() { progress <- r.recordProgress(name, bufio.NewScanner(progressOut)) }()

	select {
	case <-ctx.Done():
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		return 0, ctx.Err()
	case e := <-exit:
		// Daemons that commands started may keep the pipe open. The runner therefore writes an end mark, which follows
		// all output of the script.
		_, err := progressIn.WriteString(endOfProgress + "\n")
		return e.Code, errors.Join(closeErr, err, <-progress)
	}
}

// endOfProgress follows the last number.
const endOfProgress = "end"

func (r *Runner) recordProgress(name string, lines *bufio.Scanner) error {
	for lines.Scan() && lines.Text() != endOfProgress {
		if err := r.done(name + "[" + lines.Text() + "]"); err != nil {
			return err
		}
	}
	return nil
}

// scriptText returns the shell's input from the command with the index first. It closes the descriptor of the script for the
// commands. Each success is written to descriptor 4, and a failure ends the script.
func scriptText(commands []cloudconfig.Command, first int) string {
	var b strings.Builder
	b.WriteString("exec 3<&-\n")
	if first > 0 && commands[0].Shell == nodeconfig.EndOnFailure {
		// A script that continues runs in a new shell.
		b.WriteString(nodeconfig.EndOnFailure + "\n")
	}
	for i := first; i < len(commands); i++ {
		fmt.Fprintf(&b, "%s\n__status=$?; [ $__status = 0 ] || exit $__status; echo %d >&4\n", commands[i], i)
	}
	return b.String()
}

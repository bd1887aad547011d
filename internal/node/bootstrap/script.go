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
)

// script is the step that runs a list of commands. They run in one shell, as with cloud-init: one
// may change folder or set variables for the next. Unlike there, the first that fails ends it.
//
// The shell reads the commands from a pipe, so they are neither arguments nor a file, and it writes
// the number of each one that succeeded to another, so they are not run again after a crash.
func (r *Runner) script(name string, commands []cloudconfig.Command) step {
	return step{name, func(ctx context.Context) error {
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
			return fmt.Errorf("[%d]: ended the script with exit code 0 before the commands after it; see %s", missing, r.LogPath)
		}
		return fmt.Errorf("[%d]: exit code %d; see %s on the machine", missing, code, r.LogPath)
	}}
}

func commandStep(name string, i int) string { return fmt.Sprintf("%s[%d]", name, i) }

// firstMissing is the first command that the record does not have.
func (r *Runner) firstMissing(name string, commands []cloudconfig.Command) int {
	for i := range commands {
		if !slices.Contains(r.record.Done, commandStep(name, i)) {
			return i
		}
	}
	return len(commands)
}

// runScript runs the commands that are missing and records each that succeeds.
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
		// Daemons that commands left behind may hold the pipe open, so its end is written by us: all that
		// the script has written comes before.
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

// scriptText is the shell's input. It closes the script's own descriptor for the commands; each
// command's success is written to descriptor 4, its failure ends the script.
func scriptText(commands []cloudconfig.Command, first int) string {
	var b strings.Builder
	b.WriteString("exec 3<&-\n")
	for i := first; i < len(commands); i++ {
		fmt.Fprintf(&b, "%s\n__status=$?; [ $__status = 0 ] || exit $__status; echo %d >&4\n", commands[i], i)
	}
	return b.String()
}

package runc

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/machineapi"
)

// Command is a command for a person in a container.
type Command struct {
	// Args are the program and its arguments; a login shell if they are empty.
	Args []string
	// Term is the type of the person's terminal.
	Term string
	// TTY gives the command a terminal.
	TTY bool
	// KubernetesVersion selects the programs in the PATH of the command.
	KubernetesVersion string
}

// ExecArgs returns the arguments of runc exec for a command.
func (c Command) ExecArgs(id string, options ...string) []string {
	args := append([]string{"exec", "--cwd", "/",
		"--env", "PATH=" + machineapi.AssetsFolder + "/kubernetes/" + c.KubernetesVersion + ":" + machineapi.SearchPath,
		"--env", "HOME=/root", "--env", "TERM=" + c.Term}, options...)
	if c.TTY {
		args = append(args, "--tty")
	}
	command := c.Args
	if len(command) == 0 {
		command = []string{"/bin/sh", "-c", "exec $(command -v bash || echo sh) -l"}
	}
	return append(append(args, id), command...)
}

// Session is a running Command.
type Session struct {
	// Stdin is the standard input, and Stdout the output. With a terminal they are one file, and Stderr is nil.
	Stdin          io.WriteCloser
	Stdout, Stderr io.ReadCloser

	cmd    *exec.Cmd
	tty    *os.File
	folder string
}

// killDelay is the time in which the end of a killed command must reach runc.
const killDelay = 5 * time.Second

// Session starts a command. When ctx ends, the command is killed, and its output ends.
func (r Runc) Session(ctx context.Context, id string, c Command) (*Session, error) {
	if err := os.MkdirAll(r.Sessions, 0o700); err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp(r.Sessions, "")
	if err != nil {
		return nil, err
	}
	pidFile := filepath.Join(folder, "pid")
	s := &Session{folder: folder, cmd: r.command(ctx, c.ExecArgs(id, "--pid-file", pidFile)...)}
	// runc cannot pass SIGKILL on.
	s.cmd.Cancel = func() error { return killRecorded(pidFile, s.cmd.Process.Pid) }
	s.cmd.WaitDelay = killDelay
	if c.TTY {
		err = s.startTTY()
	} else {
		err = s.startPipes()
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(folder))
	}
	context.AfterFunc(ctx, func() { time.AfterFunc(killDelay, s.closeOutput) })
	return s, nil
}

// closeOutput ends the reads of the output. A process that the command has left can hold it open without end.
func (s *Session) closeOutput() {
	_ = s.Stdout.Close()
	if s.Stderr != nil {
		_ = s.Stderr.Close()
	}
}

// killRecorded kills the command of a runc. runc reaps it when it ends, and then waits for processes that it has left: another process can
// have the number meanwhile, but not the same parent.
func killRecorded(pidFile string, runc int) error {
	data, err := os.ReadFile(pidFile)
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || pid <= 1 {
		return errors.Join(err, os.ErrInvalid)
	}
	if parent, err := proc.Parent(pid); err != nil || parent != runc {
		return errors.Join(err, os.ErrProcessDone)
	}
	return unix.Kill(pid, unix.SIGKILL)
}

func (s *Session) startTTY() error {
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	tty, err := pty.StartWithAttrs(s.cmd, nil, s.cmd.SysProcAttr)
	if err != nil {
		return err
	}
	s.tty, s.Stdin, s.Stdout = tty, tty, tty
	return nil
}

func (s *Session) startPipes() error {
	var errs [3]error
	s.Stdin, errs[0] = s.cmd.StdinPipe()
	s.Stdout, errs[1] = s.cmd.StdoutPipe()
	s.Stderr, errs[2] = s.cmd.StderrPipe()
	return errors.Join(errors.Join(errs[:]...), s.cmd.Start())
}

// Resize sets the size of the terminal. runc passes it on.
func (s *Session) Resize(columns, rows uint16) error {
	if s.tty == nil {
		return nil
	}
	return pty.Setsize(s.tty, &pty.Winsize{Cols: columns, Rows: rows})
}

// CloseStdin ends the standard input. The end of file of a terminal is a character.
func (s *Session) CloseStdin() error {
	if s.tty != nil {
		_, err := s.tty.Write([]byte{4})
		return err
	}
	return s.Stdin.Close()
}

// Wait returns the exit code after the output was read.
func (s *Session) Wait() (int, error) {
	err := s.cmd.Wait()
	if s.tty != nil {
		_ = s.tty.Close()
	}
	_ = os.RemoveAll(s.folder)
	var exit *exec.ExitError
	if err == nil || errors.As(err, &exit) && exit.Exited() {
		return s.cmd.ProcessState.ExitCode(), nil
	}
	return 0, err
}

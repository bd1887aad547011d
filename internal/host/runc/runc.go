package runc

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
)

// Runc runs the runc of the assets with a state folder of its own.
type Runc struct {
	// Binary, for example <assets>/node/bin/runc.
	Binary string
	// Root holds runc's state of each container.
	Root string
	// Sessions holds a folder for each Session. Those of a former capstand are worthless.
	Sessions string
	// PipeTimeout bounds the wait for the rest of the output after the end of runc; 0 is pipeTimeout.
	PipeTimeout time.Duration
	// StateTimeout bounds State; 0 is stateTimeout.
	StateTimeout time.Duration
}

// stateTimeout is the default of StateTimeout. runc waits without an end for a freezer of cgroup v1 that does not reach its state, and root in
// a machine can bring about one.
const stateTimeout = 15 * time.Second

// State is runc's state of a container.
type State struct {
	// Status is created, running, stopped or paused; empty when there is no such container.
	Status string `json:"status"`
	// PID of the container's first process on the host; 0 when stopped.
	PID int `json:"pid"`
	// Annotations of the container's Spec.
	Annotations map[string]string `json:"annotations"`
}

// State returns the state of a container, or the zero State if there is none.
func (r Runc) State(ctx context.Context, id string) (State, error) {
	if !r.exists(id) {
		return State{}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(r.StateTimeout, stateTimeout))
	defer cancel()
	out, err := r.run(ctx, nil, "state", id)
	if err != nil {
		if !r.exists(id) { // It was deleted meanwhile.
			return State{}, nil
		}
		return State{}, err
	}
	var s State
	err = json.Unmarshal(out, &s)
	return s, err
}

// exists returns true if runc has stored the state of a container.
func (r Runc) exists(id string) bool {
	_, err := os.Stat(filepath.Join(r.Root, id, "state.json"))
	return !os.IsNotExist(err)
}

// Start runs the container of a bundle in the background. The container writes its output to the file directly, without a
// pipe, so it continues without capstand. runc holds a lock on a file of the bundle until it has ended; see Settle.
func (r Runc) Start(ctx context.Context, id, bundle string, log *os.File) error {
	lock, err := lockStart(ctx, bundle)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	cmd := r.command(ctx, "run", "--detach", "--bundle", bundle, id)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{lock}
	start, _ := log.Seek(0, io.SeekEnd)
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("runc run: %w: %s", err, lastLine(log, start))
	}
	return nil
}

// Settle waits until no runc starts the container of a bundle any more. A runc outlives a capstand that is killed during Start, and the state of
// the container says nothing before its end. A bundle that does not exist has none.
func (r Runc) Settle(ctx context.Context, bundle string) error {
	if _, err := os.Stat(bundle); os.IsNotExist(err) {
		return nil
	}
	lock, err := lockStart(ctx, bundle)
	if err != nil {
		return err
	}
	return lock.Close()
}

// lockStart takes the lock of a bundle. The lock lasts until the file is closed here and in the processes that inherit it.
func lockStart(ctx context.Context, bundle string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(bundle, "start.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for { // flock does not end with a context.
		err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return lock, nil
		}
		if errors.Is(err, unix.EWOULDBLOCK) {
			select {
			case <-time.After(20 * time.Millisecond):
				continue
			case <-ctx.Done():
				err = fmt.Errorf("the runc of a former capstand still starts the container, and has the file %s open: end it if it hangs: %w", lock.Name(), ctx.Err())
			}
		}
		_ = lock.Close()
		return nil, err
	}
}

// Delete kills and removes a container. A container that does not exist is no error.
func (r Runc) Delete(ctx context.Context, id string) error {
	_, err := r.run(ctx, nil, "delete", "--force", id)
	return err
}

// Exec runs a program in a running container with stdin, and returns its output. The end of ctx ends the program with SIGTERM,
// which runc passes on. The users of the container can replace the program: an output above maxOutput is an error, and a
// program that outlives ctx does not keep Exec waiting.
func (r Runc) Exec(ctx context.Context, id string, stdin io.Reader, args ...string) ([]byte, error) {
	return r.run(ctx, stdin, append([]string{"exec", id}, args...)...)
}

// pipeTimeout is the default of PipeTimeout. On a busy host the wait takes more than a second.
const pipeTimeout = 10 * time.Second

func (r Runc) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, r.Binary, append([]string{"--root", r.Root}, args...)...)
	// A session of its own: a terminal's interrupt of capstand does not reach the machine.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// A program of the machine can hold the pipes open after runc has ended.
	cmd.WaitDelay = cmp.Or(r.PipeTimeout, pipeTimeout)
	return cmd
}

func (r Runc) run(ctx context.Context, stdin io.Reader, args ...string) ([]byte, error) {
	cmd := r.command(ctx, args...)
	var out, errs limitedBuffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	err := start(cmd, stdin)
	if err == nil {
		err = cmd.Wait()
	}
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("runc %s: %w", args[0], ctx.Err())
	case err != nil:
		return nil, fmt.Errorf("runc %s: %w: %s", args[0], err, errs.message())
	case out.overflow:
		return nil, fmt.Errorf("runc %s: the output is longer than %d bytes", args[0], maxOutput)
	}
	return out.data, nil
}

// start starts a command. Its end does not wait for the next part of stdin, which may never come.
func start(cmd *exec.Cmd, stdin io.Reader) error {
	if stdin == nil {
		return cmd.Start()
	}
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(pipe, stdin) // A program may end before it has read everything.
		_ = pipe.Close()
	}()
	return nil
}

const (
	// maxOutput is the largest output of a command. runc's own documents have a few kilobytes.
	maxOutput = 256 << 10
	// maxMessage is the largest part of the error output that becomes part of an error.
	maxMessage = 2 << 10
)

// limitedBuffer keeps the first maxOutput bytes and drops the others. It never fails, so that the command can end.
type limitedBuffer struct {
	data     []byte
	overflow bool
}

func (b *limitedBuffer) Write(p []byte) (int, error) {
	n := min(len(p), maxOutput-len(b.data))
	b.data = append(b.data, p[:n]...)
	b.overflow = b.overflow || n < len(p)
	return len(p), nil
}

// message returns the end of the output as one line of printable text.
func (b *limitedBuffer) message() string {
	tail := b.data[max(0, len(b.data)-maxMessage):]
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(string(tail), " ")))
}

// lastLine returns the last line that was written to log after start, for an error message.
func lastLine(log *os.File, start int64) string {
	data := make([]byte, 4096)
	n, _ := log.ReadAt(data, start)
	lines := strings.Split(strings.TrimSpace(string(data[:n])), "\n")
	return lines[len(lines)-1]
}

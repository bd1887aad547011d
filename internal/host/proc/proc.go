// Package proc starts processes that can outlive capstand, and watches processes that need not be its children, because an earlier capstand
// started them.
//
// Layer: host. Allowed imports: api, library, contract.
package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrGone reports that the process has ended.
var ErrGone = errors.New("process has ended")

// Ref identifies a process permanently. The kernel can reuse a process id.
type Ref struct {
	PID int `json:"pid"`
	// StartTime is in clock ticks since boot.
	StartTime uint64 `json:"startTime"`
	// BootID distinguishes boots, because a process id and a start time can be equal in two boots.
	BootID string `json:"bootID"`
}

// Find returns the Ref of the process that has the id now, or ErrGone if there is none or it is a zombie.
func Find(pid int) (Ref, error) {
	state, start, err := stateAndStart(pid)
	if err != nil || state == 'Z' || state == 'X' {
		return Ref{}, ErrGone
	}
	return Ref{PID: pid, StartTime: start, BootID: BootID()}, nil
}

// Start starts a process that can outlive this one, and returns its Ref, or ErrGone if it has already ended. The order matters: until Wait
// reaps the process, the kernel does not give its id to another one, so that Find identifies this process.
func Start(cmd *exec.Cmd) (Ref, error) {
	if err := cmd.Start(); err != nil {
		return Ref{}, err
	}
	ref, err := Find(cmd.Process.Pid)
	go func() { _ = cmd.Wait() }() // Wait only reaps the process; a Handle reports its end.
	return ref, err
}

// Alive returns whether the process still runs.
func (r Ref) Alive() bool {
	now, err := Find(r.PID)
	return r.PID > 0 && err == nil && now == r
}

// Outdated returns whether the process runs another program than this process, as after an upgrade of capstand.
func (r Ref) Outdated() bool {
	theirs, err1 := os.Stat(fmt.Sprintf("/proc/%d/exe", r.PID))
	own, err2 := os.Stat("/proc/self/exe")
	return err1 == nil && err2 == nil && !os.SameFile(theirs, own)
}

// BootID of the running kernel.
func BootID() string {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id))
}

// Parent returns the parent of the process that has the id now.
func Parent(pid int) (int, error) {
	fields, err := stat(pid)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(fields[1])
}

// stateAndStart reads the state and start time.
func stateAndStart(pid int) (state byte, start uint64, err error) {
	fields, err := stat(pid)
	if err != nil {
		return 0, 0, err
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return fields[0][0], start, err
}

// stat reads the fields of /proc/<pid>/stat from the third one, the state.
func stat(pid int) ([]string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	// The command, in parentheses, can contain any character.
	text := string(data)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return nil, fmt.Errorf("/proc/%d/stat does not have the expected fields", pid)
	}
	return fields, nil
}

// Handle is an open pidfd, which always refers to the same process.
type Handle struct {
	Ref
	file *os.File
}

// Open returns a handle of the process, or ErrGone if it has ended.
func (r Ref) Open() (*Handle, error) {
	// With a nonblocking descriptor, Go's poller waits and no thread is blocked.
	fd, err := unix.PidfdOpen(r.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		if errors.Is(err, unix.ESRCH) {
			return nil, ErrGone
		}
		return nil, fmt.Errorf("pidfd of %d: %w", r.PID, err)
	}
	h := &Handle{Ref: r, file: os.NewFile(uintptr(fd), "pidfd")}
	if !r.Alive() { // Another process has got the id since Find.
		_ = h.Close()
		return nil, ErrGone
	}
	return h, nil
}

// Wait returns nil when the process has ended, or ctx's error.
func (h *Handle) Wait(ctx context.Context) error {
	if err := h.file.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = h.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	conn, err := h.file.SyscallConn()
	if err != nil {
		return err
	}
	err = conn.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		return err == nil && n == 1
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// Signal sends a signal to exactly this process. A process that has ended is no error.
func (h *Handle) Signal(sig unix.Signal) error {
	conn, err := h.file.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
	if errors.Is(sent, unix.ESRCH) {
		sent = nil
	}
	return errors.Join(err, sent)
}

// Close releases the handle, if there is one. The process continues.
func (h *Handle) Close() error {
	if h == nil {
		return nil
	}
	return h.file.Close()
}

// Package proc follows processes that need not be children of capstand's: what was started before
// capstand itself was restarted.
//
// Layer: host.
package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrGone says that the process has ended.
var ErrGone = errors.New("process has ended")

// Ref names a process for good: a process id alone may belong to another process tomorrow.
type Ref struct {
	PID int `json:"pid"`
	// StartTime is in clock ticks since boot.
	StartTime uint64 `json:"startTime"`
	// BootID tells apart two boots, where pid and start time might be equal by accident.
	BootID string `json:"bootID"`
}

// Find names the process that has pid now. ErrGone when there is none, or it is a zombie.
func Find(pid int) (Ref, error) {
	state, start, err := stat(pid)
	if err != nil || state == 'Z' || state == 'X' {
		return Ref{}, ErrGone
	}
	return Ref{PID: pid, StartTime: start, BootID: BootID()}, nil
}

// Alive says whether the process still runs.
func (r Ref) Alive() bool {
	now, err := Find(r.PID)
	return r.PID > 0 && err == nil && now == r
}

// BootID of the running kernel.
func BootID() string {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id))
}

// stat reads the state and start time, the third and 22nd fields of /proc/<pid>/stat.
func stat(pid int) (state byte, start uint64, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	// The command, in parentheses, may hold anything.
	text := string(data)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return 0, 0, fmt.Errorf("unexpected /proc/%d/stat", pid)
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return fields[0][0], start, err
}

// Handle is an open pidfd: the process it names cannot be mistaken.
type Handle struct {
	Ref
	file *os.File
}

// Open returns a handle of the process, ErrGone when it ended.
func (r Ref) Open() (*Handle, error) {
	// Nonblocking, so that Go's own poller waits for it and no thread is spent.
	fd, err := unix.PidfdOpen(r.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		if errors.Is(err, unix.ESRCH) {
			return nil, ErrGone
		}
		return nil, fmt.Errorf("pidfd of %d: %w", r.PID, err)
	}
	h := &Handle{Ref: r, file: os.NewFile(uintptr(fd), "pidfd")}
	if !r.Alive() { // the id was used again between Find and here
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

// Signal sends a signal to exactly this process; a process that ended is fine.
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

// Close releases the handle; the process goes on.
func (h *Handle) Close() error { return h.file.Close() }

package update

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/changes"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/process"
)

// Pauses between two starts of the engine, after it ended without a result.
const (
	firstPause   = 500 * time.Millisecond
	longestPause = 10 * time.Second
)

// Follower is the part of PID 1: it starts the engine for each request and reports the journal.
type Follower struct {
	Starter process.Starter
	Log     *slog.Logger
	// Paths of the request, the journal and the engine's output.
	Request, Journal, Output string
	// Engine is the command.
	Engine []string
}

// NewFollower returns the Follower of a machine.
func NewFollower(starter process.Starter, log *slog.Logger) *Follower {
	return &Follower{
		Starter: starter, Log: log, Request: machine.UpdateRequestPath, Journal: journalPath,
		Output: filepath.Join(machine.LogDir, "update.log"), Engine: strings.Fields(nodeconfig.UpdateCommand),
	}
}

// Run follows requests until ctx ends, and calls report with each state of the journal.
func (f *Follower) Run(ctx context.Context, report func(*machineapi.Update)) {
	if err := os.MkdirAll(filepath.Dir(f.Journal), 0o700); err != nil {
		f.Log.Error("Updates in place are not possible", "error", err)
		return
	}
	requested := changes.Of(ctx, f.Request)
	go f.reportJournal(ctx, report)
	pauses := backoff.Doubling(firstPause, longestPause)
	for {
		var pause <-chan time.Time
		if pending, before := f.pending(); pending {
			f.start(ctx)
			pending, after := f.pending()
			if after != before { // A process that was killed in the next step has not failed twice.
				pauses = backoff.Doubling(firstPause, longestPause)
			}
			if pending {
				pause = time.After(pauses.Step())
			}
		}
		f.removeCopies()
		select {
		case <-ctx.Done():
			return
		case <-requested:
		case <-pause:
		}
	}
}

// pending returns whether there is a request without a result, and the step that the journal has.
func (f *Follower) pending() (pending bool, step string) {
	var request machineapi.UpdateRequest
	if err := atomicfile.ReadJSON(f.Request, &request); err != nil || request.ID == "" {
		return false, ""
	}
	j, err := loadJournal(f.Journal, request.ID)
	if err != nil {
		return true, ""
	}
	return !j.ended(), j.Step
}

// removeCopies removes the copies of files of an update that has ended. The engine removes them itself, unless it is killed before;
// then no request may be left for another start.
func (f *Follower) removeCopies() {
	j := &journal{}
	if err := atomicfile.ReadJSON(f.Journal, j); err != nil || !j.ended() {
		return
	}
	if err := copiesBeside(f.Journal).remove(); err != nil {
		f.Log.Error("Cannot remove the copies of files of an update", "error", err)
	}
}

// start starts the engine and returns when it has ended.
func (f *Follower) start(ctx context.Context) {
	log, err := os.OpenFile(f.Output, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		f.Log.Error("Cannot open the log of updates", "error", err)
		return
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(f.Engine[0], f.Engine[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	done, err := f.Starter.Start(cmd)
	if err != nil {
		f.Log.Error("Cannot start the update", "error", err)
		return
	}
	select {
	case exit := <-done:
		if err := exit.Err(); err != nil {
			f.Log.Error("The update was interrupted", "error", err)
			endSession(cmd.Process.Pid)
		}
	case <-ctx.Done():
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
	}
}

// endSession kills the commands of an engine that was killed: the next engine repeats them. They have process groups of their own, but
// the session of the engine. A process that has left the session stays. The kernel has no event for the end of a session.
func endSession(session int) {
	for end := time.Now().Add(killDelay); killSession(session) && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
	}
}

// killSession returns whether the session had a process.
func killSession(session int) (found bool) {
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, path := range processes {
		pid, err := strconv.Atoi(filepath.Base(path))
		if err != nil {
			continue
		}
		if of, err := unix.Getsid(pid); err == nil && of == session {
			found = true
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	return found
}

// reportJournal reports the journal at once and after each change.
func (f *Follower) reportJournal(ctx context.Context, report func(*machineapi.Update)) {
	for changed := changes.Of(ctx, f.Journal); ; {
		j := &journal{}
		switch err := atomicfile.ReadJSON(f.Journal, j); {
		case err == nil:
			report(&j.Update)
		case !errors.Is(err, fs.ErrNotExist):
			f.Log.Error("Cannot read the journal of the update", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

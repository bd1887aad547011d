package embedded

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// Supervisor describes the process that started the daemon and waits until its status can be read.
type Supervisor struct {
	// NotifyFD is the descriptor of a file to which the daemon then writes one byte; 0 for none.
	NotifyFD int
	// Unit of systemd that runs the daemon; empty for none. `capstan up` restarts this unit instead of starting a daemon.
	Unit string
	// Logging contains the flags of the logs of Capstan's components; none for the defaults.
	Logging []string
}

// notify notifies the supervisor that the status can be read. It closes the file, so that no child process keeps it open.
func (s Supervisor) notify() error {
	if s.NotifyFD > 0 {
		f := os.NewFile(uintptr(s.NotifyFD), "notify")
		_, _ = f.Write([]byte{'\n'})
		_ = f.Close()
	}
	socket := os.Getenv("NOTIFY_SOCKET")
	if s.Unit == "" || socket == "" {
		return nil
	}
	// As sd_notify(3) does.
	conn, err := net.Dial("unixgram", socket)
	if err != nil {
		return err
	}
	_, err = conn.Write([]byte("READY=1"))
	return errors.Join(err, conn.Close())
}

// lock takes the lock of the plane. A systemd unit also takes the lock of the commands until unlock is called, so that commands
// find a plane with a status. Without a unit, `capstan up` has this lock.
func (s Supervisor) lock(ctx context.Context, l Layout) (lock *os.File, unlock func(), err error) {
	if s.Unit != "" {
		return takeOver(ctx, l)
	}
	lock, err = lockPlane(l)
	return lock, func() {}, err
}

// takeOver stops the daemon that runs, if any, and takes its lock. A systemd unit that starts while a plane of `capstan up` runs
// is then its supervisor. takeOver waits until no command works on the installation. Commands wait until unlock is called.
func takeOver(ctx context.Context, l Layout) (lock *os.File, unlock func(), err error) {
	command, err := lockCommand(ctx, l, func(holder string) {
		slog.Info("Waiting for another command", "holder", holder, "root", l.Root)
	})
	if err != nil {
		return nil, nil, err
	}
	unlock = func() { command.Close() }
	if err = stopPlane(ctx, l); err == nil {
		lock, err = lockPlane(l)
	}
	if err != nil {
		unlock()
		return nil, nil, err
	}
	return lock, unlock, nil
}

// becomeBuild replaces this process with the daemon of the build of the last `capstan up`, because a unit always starts the same
// program. It returns if this process is that build, or if that build no longer exists.
func becomeBuild(assets string) error {
	wanted := filepath.Join(assets, "capstan")
	executable, err := os.Executable()
	if err != nil {
		return err
	}
	own, err := os.Stat(executable)
	if err != nil {
		return err
	}
	if other, err := os.Stat(wanted); err != nil || os.SameFile(own, other) {
		return nil // The start of the components reports that the build no longer exists.
	}
	return fmt.Errorf("cannot run %s: %w", wanted, syscall.Exec(wanted, append([]string{wanted}, os.Args[1:]...), os.Environ())) //nolint:gosec // root wrote the state
}

// startUnit starts the daemon as a systemd unit, and returns when its status can be read.
func startUnit(ctx context.Context, unit string) error {
	if out, err := exec.CommandContext(ctx, "systemctl", "start", unit).CombinedOutput(); err != nil {
		return fmt.Errorf("expected systemd to start %s, the unit of the management plane: %w: %s; see `journalctl -u %s`. To start the plane without the unit, run `capstan down --keep-state` and `capstan up`", unit, err, strings.TrimSpace(string(out)), unit)
	}
	return nil
}

// stopUnit stops the unit of the plane through systemd, which would start it again if it is between two starts, or if its process has to
// be killed. It is the unit that runs the plane, or that `capstan up` has stopped, or else the given one: a unit can end before its plane
// has a status. A unit that does not exist is no error: stopPlane ends the process, if any.
func stopUnit(ctx context.Context, l Layout, otherwise string, step func(string)) {
	status, _ := GetStatus(ctx, l)
	state, _ := LoadState(l)
	unit := cmp.Or(status.Unit, state.StoppedUnit, otherwise)
	if unit == "" {
		return
	}
	out, err := exec.CommandContext(ctx, "systemctl", "stop", unit).CombinedOutput()
	if exit := (&exec.ExitError{}); errors.As(err, &exit) && exit.ExitCode() == unitNotLoaded {
		return
	}
	if err != nil {
		step(fmt.Sprintf("continue without systemd, which did not stop %s: %v: %s", unit, err, strings.TrimSpace(string(out))))
	}
}

// unitNotLoaded is the exit code of systemctl for a unit without a file.
const unitNotLoaded = 5

package embedded

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// Supervisor is who has started the daemon, and is told when its status is served.
type Supervisor struct {
	// NotifyFD is a file that a byte is written to then; none when 0.
	NotifyFD int
	// Unit of systemd that runs the daemon; none when empty. `capstan up` starts it again, instead of a daemon of its own.
	Unit string
}

// notify reports whether the status is served. The file is closed, so that no child keeps it open.
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

// lock takes the plane's lock. A unit has the commands' one, too, until unlock is called: they find a plane that tells its
// status. `capstan up`, which has started the daemon otherwise, has that lock itself.
func (s Supervisor) lock(ctx context.Context, l Layout) (lock *os.File, unlock func(), err error) {
	if s.Unit != "" {
		return takeOver(ctx, l)
	}
	lock, err = lockPlane(l)
	return lock, func() {}, err
}

// takeOver ends the daemon that runs, if any, and takes its lock: a unit that is started beside a plane of `capstan up`
// is its supervisor from then on. It waits until no other command works on the installation, and none does until
// unlock is called.
func takeOver(ctx context.Context, l Layout) (lock *os.File, unlock func(), err error) {
	if unlock, err = lockCommand(ctx, l); err != nil {
		return nil, nil, err
	}
	if err = stopPlane(ctx, l); err == nil {
		lock, err = lockPlane(l)
	}
	if err != nil {
		unlock()
		return nil, nil, err
	}
	return lock, unlock, nil
}

// becomeBuild goes on as the daemon of the build that `capstan up` was called with last: a unit names one program for
// ever. It returns when this is that one, or when that build has none.
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
		return nil // a build that is gone is told of when its programs are needed
	}
	return fmt.Errorf("cannot run %s: %w", wanted, syscall.Exec(wanted, append([]string{wanted}, os.Args[1:]...), os.Environ())) //nolint:gosec // root wrote the state
}

// startUnit starts the daemon as a unit of systemd, and returns when it serves its status.
func startUnit(ctx context.Context, unit string) error {
	if out, err := exec.CommandContext(ctx, "systemctl", "start", unit).CombinedOutput(); err != nil {
		return fmt.Errorf("wanted systemd to start %s, which ran the management plane: %w: %s; see `journalctl -u %s`", unit, err, strings.TrimSpace(string(out)), unit)
	}
	return nil
}

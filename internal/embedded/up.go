package embedded

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Options of `capstan up`.
type Options struct {
	// Root is the folder of all state; DefaultRoot when empty.
	Root string
	// Assets is the folder with the binaries; that of the running program when empty.
	Assets string
	// Hosts is how many CapstanHosts this box has; never less than there are. When 0, those that there
	// are, and one in a new installation; negative for none, when all hosts are elsewhere.
	Hosts int
	// Listen is the address, host:port, on which the only host of this box serves managers elsewhere, with the
	// certificates of `capstan host credentials`. Empty leaves it as it is, "none" ends it.
	Listen string
	// CoreFeatureGates are feature gates of Cluster API, for example "MachineTaintPropagation=true". Empty leaves them as
	// they are, "none" ends all settings.
	CoreFeatureGates string
	// Backup is the schedule of the plane's backups. What is empty stays as it is; To "none" ends the schedule.
	Backup BackupSchedule
}

// ErrNotRoot is the error for users other than root. capstand needs root to create namespaces, and the management plane needs
// root to run its components as other users.
var ErrNotRoot = errors.New("wanted to run as root, found another user: use sudo")

// Up starts the management plane, or waits for the one that runs, and returns when it is ready. It
// calls progress with each change of the status. A plane of an older build is replaced by this one.
func Up(ctx context.Context, o Options, progress func(Status)) (Status, error) {
	l, assets, err := o.complete()
	if err != nil {
		return Status{}, err
	}
	if err := prepareRoot(l); err != nil {
		return Status{}, err
	}
	unlock, err := lockCommand(ctx, l)
	if err != nil {
		return Status{}, err
	}
	defer unlock()
	if err := finishRestore(l); err != nil {
		return Status{}, err
	}
	status, notRunning := GetStatus(ctx, l)
	if notRunning == nil && o.served(status, assets, l) {
		return awaitReady(ctx, l, progress)
	}
	state, err := decideState(l, assets, o)
	if err != nil {
		return Status{}, err
	}
	if notRunning == nil {
		if err := stopPlane(ctx, l); err != nil {
			return Status{}, err
		}
	}
	if err := state.save(l); err != nil {
		return Status{}, err
	}
	if status.Unit != "" {
		unlock() // for the daemon of the unit
		err = startUnit(ctx, status.Unit)
	} else {
		err = startPlane(l)
	}
	if err != nil {
		return Status{}, err
	}
	return awaitReady(ctx, l, progress)
}

// served reports whether a plane is what was asked for, and of this build.
func (o Options) served(s Status, assets string, l Layout) bool {
	schedule, err := scheduleOf(s.Backup, o.Backup, l)
	gates, wrong := gatesOf(s.CoreFeatureGates, o.CoreFeatureGates)
	return err == nil && wrong == nil && maps.Equal(gates, s.CoreFeatureGates) && reflect.DeepEqual(schedule, s.Backup) && s.Error == "" && s.Assets == assets && s.Build == buildOf(stateOf(s)) &&
		len(s.Hosts) >= o.Hosts && s.Listen == listenOf(s.Listen, o.Listen)
}

func stateOf(s Status) State {
	return State{Assets: s.Assets, KubernetesVersion: s.KubernetesVersion}
}

func (o Options) complete() (Layout, string, error) {
	root, err := filepath.Abs(cmp.Or(o.Root, DefaultRoot))
	if err != nil {
		return Layout{}, "", err
	}
	assets, err := AssetsDir(o.Assets)
	return Layout{Root: root}, assets, err
}

// AssetsDir is the folder of the assets: the one given, or that of the running program.
func AssetsDir(given string) (string, error) {
	if given != "" {
		return filepath.Abs(given)
	}
	executable, err := os.Executable()
	return filepath.Dir(executable), err
}

// prepareRoot makes the root folder. A folder with files of others is left alone.
func prepareRoot(l Layout) error {
	if os.Getuid() != 0 {
		return ErrNotRoot
	}
	entries, err := os.ReadDir(l.Root)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if _, err := os.Stat(l.commandLock()); len(entries) > 0 && errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("wanted an empty folder or one of Capstan for --root, found other files in %s: choose another one", l.Root)
	}
	if err := Enterable(l.Root); err != nil {
		return err
	}
	if err := os.MkdirAll(l.Root, 0o711); err != nil {
		return err
	}
	return os.Chmod(l.Root, 0o711) // the system user must get to its own folders in it
}

// commandLock keeps two commands that change the installation apart. It is the first file of a root
// and the last one to go: it tells a folder of ours.
func (l Layout) commandLock() string { return filepath.Join(l.Root, ".capstan") }

func lockCommand(ctx context.Context, l Layout) (unlock func(), err error) {
	f, err := os.OpenFile(l.commandLock(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flock(ctx, f); err != nil {
		f.Close()
		return nil, fmt.Errorf("another command works on %s: %w", l.Root, err)
	}
	return func() { f.Close() }, nil
}

// flock waits for the lock until ctx ends.
func flock(ctx context.Context, f *os.File) error {
	locked := make(chan error, 1)
	go func() { locked <- unix.Flock(int(f.Fd()), unix.LOCK_EX) }()
	select {
	case err := <-locked:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// startPlane starts the daemon and returns when it serves its status.
func startPlane(l Layout) error {
	executable, err := os.Executable()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(l.Logs(), 0o700); err != nil {
		return err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	err = daemonize(l.Log("plane"), write, executable, "plane", "--root="+l.Root, "--notify-fd="+strconv.Itoa(notifyFD))
	write.Close()
	if err != nil {
		return err
	}
	// One byte when it serves; the end of the file when it ended before.
	if n, _ := read.Read(make([]byte, 1)); n == 0 {
		return fmt.Errorf("wanted the management plane to start, and it ended: %s (log: %s)", lastLineOf(l.Log("plane")), l.Log("plane"))
	}
	return nil
}

// awaitReady follows the status until the plane is ready.
func awaitReady(ctx context.Context, l Layout, progress func(Status)) (Status, error) {
	var last Status
	err := WatchStatus(ctx, l, func(s Status) bool {
		last = s
		progress(s)
		return !s.Ready && s.Error == ""
	})
	switch {
	case last.Error != "":
		return last, errors.New(last.Error)
	case err != nil && ctx.Err() != nil:
		return last, fmt.Errorf("the management plane is not ready: %s: %w", notReady(last, l), context.Cause(ctx))
	case err != nil:
		return last, fmt.Errorf("the management plane ended while it started: %w; see %s", err, l.Log("plane"))
	}
	return last, nil
}

// notReady names what a plane still waits for.
func notReady(s Status, l Layout) string {
	for _, c := range s.Components {
		if c.State != ProcessReady && c.State != ProcessWaiting {
			return fmt.Sprintf("%s is %s (log: %s) %s", c.Name, c.State, l.Log(c.Name), c.Message)
		}
	}
	return "see " + l.Log("plane")
}

// stopPlane ends the daemon, which ends its components, and waits until it is gone.
func stopPlane(ctx context.Context, l Layout) error {
	pid, err := planeProcess(l)
	if err != nil || pid == 0 {
		return err
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	f, err := os.OpenFile(l.Lock(), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	patient, cancel := context.WithTimeout(ctx, 4*stopGrace)
	defer cancel()
	if flock(patient, f) == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	// Its children die with it.
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return flock(ctx, f)
}

package embedded

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/tracing/collector"
)

// Options of `capstan up`. Settings.with applies them.
type Options struct {
	// Root is the folder of all state: an absolute path without symbolic links, because `capstan down` unmounts and removes this folder.
	Root string
	// Assets is the folder with the binaries. Default: the folder of the running program.
	Assets string
	// Hosts is the number of CapstanHosts on this box. It cannot decrease. 0: unchanged, and one in a new installation. Negative:
	// none, because all hosts are other boxes.
	Hosts int
	// KubernetesVersion of the management plane. Empty: unchanged, and the newest one in a new installation.
	KubernetesVersion string
	// Listen is the address, host:port, on which the only host of this box serves remote managers, with the certificates of
	// `capstan host credentials`. Empty: unchanged. "none": no address.
	Listen string
	// APIAddress is the address, host:port, at which other boxes reach the management API. The API server then listens on all
	// addresses of the box. Empty: unchanged. "none": loopback only.
	APIAddress string
	// HostListenAddress is the local address, host:port, on which the manager accepts hosts that dial it. Empty: unchanged. "none": no
	// address.
	HostListenAddress string
	// CoreFeatureGates are feature gates of Cluster API, for example "MachineTaintPropagation=true". Empty: unchanged. "none":
	// all defaults.
	CoreFeatureGates string
	// Tracing names the collector of spans. Without an endpoint: unchanged. The endpoint "none": no traces.
	Tracing collector.Flags
	// Logging contains the flags of the logs of a daemon that is started without systemd; none for the defaults.
	Logging []string
	// Backup is the schedule of the plane's backups. Empty fields are unchanged. To "none" ends the schedule.
	Backup BackupSchedule
	// Unit of systemd that can run the plane of Root, also if the plane has no status. Only Down uses it. Empty: none is known.
	Unit string
	// Wait is called with the holder of the lock if the command waits for another one; nil for no call.
	Wait func(holder string)
}

// wait calls Wait.
func (o Options) wait(holder string) {
	if o.Wait != nil {
		o.Wait(holder)
	}
}

// ErrNotRoot is the error for users other than root. capstand needs root to create namespaces, and the management plane needs
// root to run its components as other users.
var ErrNotRoot = errors.New("expected to run as root, found another user: use sudo")

// Up starts the management plane, or waits for a running one, and returns when it is ready. It calls progress with each change
// of the status. It restarts a plane of another build.
func Up(ctx context.Context, o Options, progress func(Status)) (Status, error) {
	l, assets, err := o.complete()
	if err != nil {
		return Status{}, err
	}
	lock, err := lockRoot(ctx, l, o.wait)
	if err != nil {
		return Status{}, err
	}
	defer lock.Close()
	if err := finishRestore(l); err != nil {
		return Status{}, err
	}
	status, notRunning := GetStatus(ctx, l)
	if notRunning == nil && o.served(status, assets, l) {
		return awaitReady(ctx, l, progress)
	}
	before, _ := LoadState(l) // decideState returns the error.
	state, err := decideState(l, assets, o)
	if err != nil {
		return Status{}, err
	}
	if err := errors.Join(checkAPIPort(ctx, state, status.Server, portFree), checkListens(ctx, state.Settings, status.Settings), checkCollector(state.Tracing)); err != nil {
		return Status{}, err
	}
	if notRunning == nil {
		state.StoppedUnit = status.Unit
	}
	// Before the stop: the plane continues if the disk is full, and after an interruption the next `capstan up` reads the unit.
	if err := state.save(l); err != nil {
		return Status{}, err
	}
	if notRunning == nil {
		if err := stopPlane(ctx, l); err != nil {
			return Status{}, errors.Join(err, before.notReplaced(l, status.Unit))
		}
	}
	if state.StoppedUnit != "" {
		lock.Close() // for the daemon of the unit
		err = startUnit(ctx, state.StoppedUnit)
	} else {
		err = startPlane(l, o.Logging)
	}
	if err == nil {
		status, err = awaitReady(ctx, l, progress)
	}
	return status, afterUpgrade(before.KubernetesVersion, state.KubernetesVersion, err)
}

// afterUpgrade adds the way back to the error of a start with another Kubernetes version.
func afterUpgrade(before, now string, err error) error {
	if err == nil || before == "" || before == now {
		return err
	}
	return fmt.Errorf("%w (this start changed Kubernetes from %s to %s. To return to %s, restore a backup of it: stop the plane with `capstan down --keep-state`, and run `capstan restore --replace` and `capstan up`)", err, before, now, before)
}

// served reports whether a plane has the stored settings, the requested options and this build. An interrupted `capstan up` can leave a
// plane that runs without the stored settings.
func (o Options) served(s Status, assets string, l Layout) bool {
	if stored, err := LoadState(l); err == nil && !reflect.DeepEqual(stored.Settings, s.Settings) {
		return false
	}
	next, err := s.with(o, l, Assets{assets})
	return err == nil && reflect.DeepEqual(next, s.Settings) && s.Error == "" && s.Assets == assets && s.Build == buildOf(State{Assets: assets, Settings: next})
}

func (o Options) complete() (Layout, string, error) {
	assets, err := AssetsDir(o.Assets)
	return Layout{Root: o.Root}, assets, err
}

// AssetsDir returns the folder of the assets: the argument, or else the folder of the running program.
func AssetsDir(given string) (string, error) {
	if given != "" {
		return filepath.Abs(given)
	}
	executable, err := os.Executable()
	return filepath.Dir(executable), err
}

// prepareRoot creates the root folder. A folder with other files is an error.
func prepareRoot(l Layout) error {
	if os.Getuid() != 0 {
		return ErrNotRoot
	}
	entries, err := os.ReadDir(l.Root)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	entries = slices.DeleteFunc(entries, func(e os.DirEntry) bool { return l.foreign(filepath.Join(l.Root, e.Name())) })
	if len(entries) > 0 && !Installed(l) {
		return fmt.Errorf("expected an empty folder or an installation of Capstan for --root, found other files in %s: choose another folder", l.Root)
	}
	if err := Enterable(l.Root); err != nil {
		return err
	}
	if err := makeEnterable(l.Root); err != nil {
		return err
	}
	return os.Chmod(l.Root, 0o711) // the system user must be able to reach its own folders
}

// makeEnterable makes a folder and its missing parents for the system user, with any umask.
func makeEnterable(dir string) error {
	if atomicfile.Exists(dir) {
		return nil
	}
	if err := makeEnterable(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return os.Chmod(dir, 0o711)
}

// commandLock is the lock file of commands that change the installation. It contains the process id of the command. It is the first file in a
// root folder and the last one to be removed, so it identifies a folder of Capstan.
func (l Layout) commandLock() string { return filepath.Join(l.Root, ".capstan") }

// lockAttempts bounds the attempts of lockRoot.
const lockAttempts = 10

// lockRoot prepares the root folder and takes its lock. It begins again if `capstan down` removes the folder meanwhile.
func lockRoot(ctx context.Context, l Layout, wait func(holder string)) (lock *os.File, err error) {
	for range lockAttempts {
		if err := prepareRoot(l); err != nil {
			return nil, err
		}
		if lock, err = lockCommand(ctx, l, wait); !errors.Is(err, fs.ErrNotExist) {
			return lock, err
		}
	}
	return nil, err
}

// lockCommand takes the lock, and keeps it until the file is closed. If another process has it, lockCommand calls wait and waits. The error
// is fs.ErrNotExist if `capstan down` has removed the folder meanwhile.
func lockCommand(ctx context.Context, l Layout, wait func(holder string)) (*os.File, error) {
	f, err := os.OpenFile(l.commandLock(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		wait(holderOf(f))
		err = flock(ctx, f)
	}
	if err == nil && !isAt(f, l.commandLock()) {
		err = fmt.Errorf("it has removed the folder: %w", fs.ErrNotExist)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("another command works on %s: %w", l.Root, err)
	}
	_, _ = f.WriteAt(fmt.Appendf(nil, "%10d\n", os.Getpid()), 0) // Only for commands that wait: a full disk prevents no command.
	return f, nil
}

// holderOf describes the process that has the lock of a file, which contains its id.
func holderOf(f *os.File) string {
	text := make([]byte, 16)
	n, _ := f.ReadAt(text, 0)
	id := strings.TrimSpace(string(text[:n]))
	line, err := os.ReadFile(filepath.Join("/proc", id, "cmdline"))
	if err != nil || id == "" {
		return "another command" // It has just ended, or it has not written its id yet.
	}
	return fmt.Sprintf("process %s (%s)", id, strings.TrimSpace(strings.ReplaceAll(string(line), "\x00", " ")))
}

// isAt returns whether a path leads to an open file.
func isAt(f *os.File, path string) bool {
	open, err1 := f.Stat()
	there, err2 := os.Stat(path)
	return err1 == nil && err2 == nil && os.SameFile(open, there)
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

// startPlane starts the daemon and returns when its status can be read.
func startPlane(l Layout, logging []string) error {
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
	args := append([]string{"plane", "--root=" + l.Root, "--notify-fd=" + strconv.Itoa(notifyFD)}, logging...)
	err = daemonize(l.Log("plane"), write, executable, args...)
	write.Close()
	if err != nil {
		return err
	}
	// The daemon writes one byte when its status can be read. The file ends without a byte if the daemon has ended.
	if n, _ := read.Read(make([]byte, 1)); n == 0 {
		return fmt.Errorf("expected the management plane to start, and it ended: %s (log: %s)", lastLineOf(l.Log("plane")), l.Log("plane"))
	}
	return nil
}

// awaitReady follows the status until the plane is ready.
func awaitReady(ctx context.Context, l Layout, progress func(Status)) (Status, error) {
	last := Status{Root: l.Root}
	err := watchStatus(ctx, l, func(s Status) bool {
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
		return last, fmt.Errorf("the management plane ended while it started: %w; see %s", err, last.Log())
	}
	return last, nil
}

// notReady describes the first component that is not ready.
func notReady(s Status, l Layout) string {
	for _, c := range s.Components {
		if c.State != ProcessReady && c.State != ProcessWaiting {
			return fmt.Sprintf("%s is %s (log: %s) %s", c.Name, c.State, l.Log(c.Name), c.Message)
		}
	}
	return "see " + s.Log()
}

// stopPlane stops the daemon, which stops its components, and waits for its end.
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
	patient, cancel := context.WithTimeout(ctx, 3*stopGrace+capstandGrace)
	defer cancel()
	if flock(patient, f) == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	// The kernel kills its children, too.
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return flock(ctx, f)
}

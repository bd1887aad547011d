package embedded

import (
	"bufio"
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
)

// otherDaemon is a process that holds the plane's lock like a daemon.
func otherDaemon(t *testing.T, l Layout) (ended <-chan struct{}) {
	t.Helper()
	return daemonThat(t, l, "exec sleep 1000")
}

// daemonThat is otherDaemon with the commands of a shell.
func daemonThat(t *testing.T, l Layout, commands string) (ended <-chan struct{}) {
	t.Helper()
	cmd := exec.Command("flock", "--no-fork", l.Lock(), "sh", "-c", `echo $$ >"$0"; echo locked; `+commands, l.Lock())
	out, err := cmd.StdoutPipe()
	if err := errors.Join(err, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "locked\n" {
		t.Fatalf("the output of the other daemon is %q, %v", line, err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-done })
	return done
}

// TestLogOfDaemon: systemd keeps the log of the daemon that it runs.
func TestLogOfDaemon(t *testing.T) {
	for want, s := range map[string]Status{"/root/logs/plane.log": {Root: "/root"}, "`journalctl -u own.service`": {Root: "/root", Unit: "own.service"}} {
		if notReady := notReady(s, Layout{Root: s.Root}); s.Log() != want || notReady != "see "+want {
			t.Errorf("%q and %q, want %s", s.Log(), notReady, want)
		}
	}
}

// TestUnitTakesOver: a unit takes over a plane that `capstan up` has started.
func TestUnitTakesOver(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	ended := otherDaemon(t, l)
	if _, err := lockPlane(l); !errors.Is(err, errRunning) {
		t.Fatalf("with `capstan up`: %v", err)
	}
	lock, unlock, err := Supervisor{Unit: "capstan.service"}.lock(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	<-ended
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := lockCommand(ctx, l, ignored); !errors.Is(err, context.Canceled) {
		t.Errorf("a command before the unit serves: %v", err)
	}
	unlock()
	if free, err := lockCommand(t.Context(), l, ignored); err != nil {
		t.Errorf("a command after the unit serves: %v", err)
	} else {
		free.Close()
	}
	if pid, err := planeProcess(l); pid != os.Getpid() || err != nil {
		t.Errorf("the process of the plane is %d, %v", pid, err)
	}
}

// TestUnitWaitsForCommands: a unit waits while `capstan up` or `capstan down` runs.
func TestUnitWaitsForCommands(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	command, err := lockCommand(t.Context(), l, ignored)
	if err != nil {
		t.Fatal(err)
	}
	defer command.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := takeOver(ctx, l); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// unitPlane is a plane of another build that a unit runs, with a systemctl that records its arguments.
type unitPlane struct {
	layout  Layout
	options Options
	tools   string          // the folder of systemctl
	ended   <-chan struct{} // the daemon
	status  *http.Server
}

func newUnitPlane(t *testing.T, root string) unitPlane {
	t.Helper()
	u := unitPlane{layout: Layout{Root: root}, options: Options{Root: root, Assets: testAssets(t, "v1.36.3")}, tools: t.TempDir()}
	expect.NoError(t, errors.Join(os.MkdirAll(root, 0o711), os.WriteFile(u.layout.commandLock(), nil, 0o600)))
	u.systemctl(t, "")
	t.Setenv("PATH", u.tools+":"+os.Getenv("PATH"))
	u.ended = otherDaemon(t, u.layout)
	server, err := newBoard(Status{Unit: "capstan.service", Assets: "/an/older/build", Ready: true}).serve(u.layout.StatusSocket())
	expect.NoError(t, err)
	t.Cleanup(func() { _ = server.Close() })
	u.status = server
	return u
}

// systemctl sets what systemctl does after it has taken the lock of the commands.
func (u unitPlane) systemctl(t *testing.T, then string) {
	t.Helper()
	script := "#!/bin/sh\nflock --nonblock " + u.layout.commandLock() + " echo \"$@\" >" + u.called() + "\n" + then
	expect.NoError(t, os.WriteFile(filepath.Join(u.tools, "systemctl"), []byte(script), 0o755))
}

// called is the file with the arguments of the last systemctl.
func (u unitPlane) called() string { return filepath.Join(u.tools, "called") }

func (u unitPlane) checkStarted(t *testing.T) {
	t.Helper()
	if called, err := os.ReadFile(u.called()); string(called) != "start capstan.service\n" {
		t.Errorf("systemctl was called with %q, %v", called, err)
	}
}

// TestUpOfUnit: `capstan up` of another build makes systemd restart the unit after it has the command lock.
func TestUpOfUnit(t *testing.T) {
	u := newUnitPlane(t, newRoot(t))
	_, err := Up(t.Context(), u.options, func(Status) {})
	expect.NoError(t, err)
	<-u.ended
	u.checkStarted(t)
	if state, err := LoadState(u.layout); state.Assets != u.options.Assets || err != nil {
		t.Errorf("the state is %+v, %v", state, err)
	}
}

// TestUpWithAForeignAddress: `capstan up` with an address on which no process of this box can listen leaves the plane and its settings.
func TestUpWithAForeignAddress(t *testing.T) {
	u := newUnitPlane(t, newRoot(t))
	u.options.HostListenAddress = "192.0.2.1:7444"
	if _, err := Up(t.Context(), u.options, func(Status) {}); !errors.As(err, &InvalidOptions{}) {
		t.Errorf("got %v", err)
	}
	if pid, err := planeProcess(u.layout); pid == 0 || err != nil {
		t.Errorf("the plane does not run: %v", err)
	}
	if state, err := LoadState(u.layout); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("expected no state, found %+v, %v", state, err)
	}
}

// TestInterruptedUpOfUnit: after a `capstan up` that has stopped the plane and did not start the unit, the next one starts the unit. A
// start of the plane ends this, and so does `capstan down --keep-state`, which is the way back if the unit no longer exists.
func TestInterruptedUpOfUnit(t *testing.T) {
	u := newUnitPlane(t, newRoot(t))
	expect.NoError(t, os.WriteFile(u.layout.Logs(), nil, 0o600)) // A daemon without a unit cannot start.
	u.systemctl(t, "echo no such unit >&2; exit 5")
	up := func() error {
		_, err := Up(t.Context(), u.options, func(Status) {})
		return err
	}
	err := up()
	for _, part := range []string{"no such unit", "journalctl -u capstan.service", "capstan down --keep-state"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("a unit that does not start: %v", err)
		}
	}
	<-u.ended
	expect.NoError(t, errors.Join(u.status.Close(), os.Remove(u.called())))
	if err := up(); err == nil || !strings.Contains(err.Error(), "no such unit") {
		t.Errorf("the next `capstan up`: %v", err)
	}
	u.checkStarted(t)

	stored, err := LoadState(u.layout)
	expect.NoError(t, err)
	expect.NoError(t, Down(t.Context(), u.options, true, func(string) {}))
	if err := up(); err == nil || !strings.Contains(err.Error(), u.layout.Logs()) {
		t.Errorf("after `capstan down --keep-state`: %v", err)
	}
	expect.NoError(t, errors.Join(os.Remove(u.layout.Logs()), stored.save(u.layout)))
	ended, end := context.WithCancel(t.Context())
	end()
	expect.NoError(t, Run(ended, u.layout, Supervisor{}))
	if state, err := LoadState(u.layout); state.StoppedUnit != "" || err != nil {
		t.Errorf("after a start of the plane: %+v, %v", state, err)
	}
}

// TestDownOfUnit: `capstan down` stops the unit through systemd, so that systemd does not start the plane again: the unit that runs the
// plane, and the unit between two starts, whose plane does not run.
func TestDownOfUnit(t *testing.T) {
	u := newUnitPlane(t, newRoot(t))
	expect.NoError(t, os.WriteFile(filepath.Join(u.tools, "systemctl"), []byte("#!/bin/sh\necho \"$@\" >>"+u.called()), 0o755))
	expect.NoError(t, Down(t.Context(), u.options, true, func(string) {}))
	<-u.ended
	expect.NoError(t, u.status.Close())
	expect.NoError(t, State{ID: "abcd1234", StoppedUnit: "own.service"}.save(u.layout))
	expect.NoError(t, Down(t.Context(), u.options, true, func(string) {}))
	expect.NoError(t, Down(t.Context(), u.options, true, func(string) {})) // No unit is known now.
	u.options.Unit = "default.service"
	expect.NoError(t, Down(t.Context(), u.options, true, func(string) {}))
	if called, err := os.ReadFile(u.called()); string(called) != "stop capstan.service\nstop own.service\nstop default.service\n" {
		t.Errorf("systemctl was called with %q, %v", called, err)
	}
}

// TestUpThatStopsWaiting: `capstan up` whose plane does not stop in time, or that the user ends meanwhile, leaves the settings of this plane,
// and the unit for the next `capstan up`.
func TestUpThatStopsWaiting(t *testing.T) {
	l := Layout{Root: newRoot(t)}
	stopping := filepath.Join(t.TempDir(), "stopping")
	expect.NoError(t, errors.Join(os.MkdirAll(l.Root, 0o711), os.WriteFile(l.commandLock(), nil, 0o600), unix.Mkfifo(stopping, 0o600)))
	daemonThat(t, l, "trap 'echo >"+stopping+"' TERM; while :; do sleep 0.1; done")
	server, err := newBoard(Status{Unit: "capstan.service", Assets: "/an/older/build", Ready: true}).serve(l.StatusSocket())
	expect.NoError(t, err)
	t.Cleanup(func() { _ = server.Close() })
	before := State{ID: "abcd1234", Assets: "/an/older/build", Settings: Settings{KubernetesVersion: "v1.35.4", Hosts: []string{"local"}}}
	expect.NoError(t, before.save(l))
	ctx, interrupt := context.WithCancel(t.Context())
	go func() {
		defer interrupt()
		_, _ = os.ReadFile(stopping) // A signal has come when it returns.
	}()
	_, err = Up(ctx, Options{Root: l.Root, Assets: testAssets(t, "v1.35.4", "v1.36.3"), KubernetesVersion: "v1.36.3"}, func(Status) {})
	before.StoppedUnit = "capstan.service"
	if stored, loaded := LoadState(l); !errors.Is(err, context.Canceled) || loaded != nil || !reflect.DeepEqual(stored, before) {
		t.Errorf("got %v; the state is %+v, %v, expected %+v", err, stored, loaded, before)
	}
}

// TestUpOnAFullDisk: `capstan up` that cannot store its decisions leaves the plane running.
func TestUpOnAFullDisk(t *testing.T) {
	root := newRoot(t)
	expect.NoError(t, errors.Join(os.Mkdir(root, 0o711), unix.Mount("tmpfs", root, "tmpfs", 0, "size=64k")))
	t.Cleanup(func() { expect.NoError(t, unix.Unmount(root, unix.MNT_DETACH)) })
	u := newUnitPlane(t, root)
	if err := os.WriteFile(filepath.Join(root, "full"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if _, err := Up(t.Context(), u.options, func(Status) {}); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("got %v", err)
	}
	if pid, err := planeProcess(u.layout); pid == 0 || err != nil {
		t.Errorf("the plane does not run: %v", err)
	}
}

func TestUnitIsNotified(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	listener, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	t.Setenv("NOTIFY_SOCKET", socket)
	if err := (Supervisor{Unit: "capstan.service"}).notify(); err != nil {
		t.Fatal(err)
	}
	message := make([]byte, 100)
	if n, err := listener.Read(message); string(message[:n]) != "READY=1" {
		t.Errorf("got %q, %v", message[:n], err)
	}
}

// TestBecomeBuild: the unit file names one program permanently. The unit runs the build that is installed.
func TestBecomeBuild(t *testing.T) {
	const variable = "CAPSTAN_TEST_BUILD"
	if dir := os.Getenv(variable); dir != "" {
		t.Fatal(becomeBuild(dir)) // This part runs in the started process.
	}
	assets := t.TempDir()
	if err := becomeBuild(assets); err != nil {
		t.Errorf("a missing build: %v", err)
	}
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(own, filepath.Join(assets, "capstan")); err != nil {
		t.Fatal(err)
	}
	if err := becomeBuild(assets); err != nil {
		t.Errorf("the same build: %v", err)
	}
	other := t.TempDir()
	if err := os.WriteFile(filepath.Join(other, "capstan"), []byte("#!/bin/sh\necho became \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), own, "-test.run=^TestBecomeBuild$")
	cmd.Env = append(os.Environ(), variable+"="+other)
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "became -test.run=^TestBecomeBuild$\n" {
		t.Errorf("another build: %q, %v", out, err)
	}
}

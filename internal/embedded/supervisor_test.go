package embedded

import (
	"bufio"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// otherDaemon is a process that holds the plane's lock like a daemon.
func otherDaemon(t *testing.T, l Layout) (ended <-chan struct{}) {
	t.Helper()
	cmd := exec.Command("flock", "--no-fork", l.Lock(), "sh", "-c", `echo $$ >"$0"; echo locked; exec sleep 1000`, l.Lock())
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
	if _, err := lockCommand(ctx, l); !errors.Is(err, context.Canceled) {
		t.Errorf("a command before the unit serves: %v", err)
	}
	unlock()
	if free, err := lockCommand(t.Context(), l); err != nil {
		t.Errorf("a command after the unit serves: %v", err)
	} else {
		free()
	}
	if pid, err := planeProcess(l); pid != os.Getpid() || err != nil {
		t.Errorf("the process of the plane is %d, %v", pid, err)
	}
}

// TestUnitWaitsForCommands: a unit waits while `capstan up` or `capstan down` runs.
func TestUnitWaitsForCommands(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	unlock, err := lockCommand(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := takeOver(ctx, l); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// TestUpOfUnit: `capstan up` of another build makes systemd restart the unit after it has the command lock.
func TestUpOfUnit(t *testing.T) {
	root, assets, tools := filepath.Join(t.TempDir(), "root"), t.TempDir(), t.TempDir()
	l := Layout{Root: root}
	if err := os.Chmod(filepath.Dir(filepath.Dir(root)), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(path, content string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	for _, program := range []string{apiServer, controllerManager, etcd} {
		write(filepath.Join(assets, "kubernetes", "v1.36.3", program), "")
	}
	write(filepath.Join(tools, "systemctl"), "#!/bin/sh\nflock --nonblock "+l.commandLock()+" echo \"$@\" >"+filepath.Join(tools, "called"))
	t.Setenv("PATH", tools+":"+os.Getenv("PATH"))
	write(l.commandLock(), "")
	ended := otherDaemon(t, l)
	server, err := newBoard(Status{Unit: "capstan.service", Assets: "/an/older/build", Ready: true}).serve(l.StatusSocket())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = server.Close() }()

	if _, err := Up(t.Context(), Options{Root: root, Assets: assets}, func(Status) {}); err != nil {
		t.Fatal(err)
	}
	<-ended
	if called, err := os.ReadFile(filepath.Join(tools, "called")); string(called) != "start capstan.service\n" {
		t.Errorf("systemctl was called with %q, %v", called, err)
	}
	if state, err := LoadState(l); state.Assets != assets || err != nil {
		t.Errorf("the state is %+v, %v", state, err)
	}

	write(filepath.Join(tools, "systemctl"), "#!/bin/sh\necho no such unit >&2; exit 5")
	if err := startUnit(t.Context(), "capstan.service"); err == nil || !strings.Contains(err.Error(), "no such unit") || !strings.Contains(err.Error(), "journalctl -u capstan.service") {
		t.Errorf("a unit that does not start: %v", err)
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

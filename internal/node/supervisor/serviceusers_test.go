package supervisor

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/node/accounts"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/process"
	"capstan.dev/capstan/internal/node/process/processtest"
	"capstan.dev/capstan/internal/testenv/expect"
)

// A service has only its user and its capabilities. It can use its own files, but not those of other services.
// Row CP-23.
func TestConfined(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root: services change their user")
	}
	f := newFixture(t)
	for dir := f.dir; dir != "/"; dir = filepath.Dir(dir) { // Only the owner has access to t.TempDir.
		if info, err := os.Stat(dir); err == nil && info.Mode().Perm()&0o001 == 0 {
			expect.NoError(t, os.Chmod(dir, info.Mode()|0o011))
		}
	}
	data, key, other, shared := f.path("data"), f.path("key"), f.path("other"), f.path("shared")
	expect.NoError(t, os.MkdirAll(filepath.Join(data, "member"), 0o700))
	for _, path := range []string{key, other, shared, filepath.Join(data, "member", "db"), f.path("elsewhere")} {
		expect.NoError(t, os.WriteFile(path, nil, 0o600))
	}
	expect.NoError(t, os.Link(f.path("elsewhere"), filepath.Join(data, "linked")))
	expect.NoError(t, os.Symlink(other, filepath.Join(data, "led-out")))
	out := f.path("data/out")
	script := "cat " + key + " " + shared + " && ! cat " + other + " && cat /proc/self/status >" + out + ".new && mv " + out + ".new " + out + " && sleep 1000"
	s := shell("etcd", script)
	s.User, s.Capabilities, s.Owns, s.Reads = accounts.Etcd, []string{"NET_BIND_SERVICE"}, []string{data, key, f.path("missing")}, []string{shared, filepath.Join(data, "led-out"), filepath.Join(data, "linked"), f.path("missing")}
	s.Ready = &Probe{File: out}
	f.apply(s)
	f.untilState("etcd", initapi.StateReady)
	status, err := os.ReadFile(out)
	expect.NoError(t, err)
	for _, want := range []string{
		"Uid:\t60700\t60700\t60700\t60700", "Gid:\t60700\t60700\t60700\t60700", "Groups:\t60706 \n", "NoNewPrivs:\t1",
		"CapInh:\t0000000000000400", "CapPrm:\t0000000000000400", "CapEff:\t0000000000000400", "CapBnd:\t0000000000000400", "CapAmb:\t0000000000000400",
	} {
		if !strings.Contains(string(status), want) {
			t.Errorf("no %q in\n%s", want, status)
		}
	}
	for path, want := range map[string]uint32{key: 60700, data + "/member/db": 60700, other: 0, f.path("elsewhere"): 0, shared: 0} {
		info, err := os.Stat(path)
		expect.NoError(t, err)
		if got := info.Sys().(*syscall.Stat_t).Uid; got != want {
			t.Errorf("%s belongs to %d, want %d", path, got, want)
		}
	}
	for path, want := range map[string]os.FileMode{shared: 0o640, other: 0o600, f.path("elsewhere"): 0o600} {
		if info, _ := os.Stat(path); info.Mode().Perm() != want {
			t.Errorf("%s has mode %s, want %s", path, info.Mode(), want)
		}
	}
}

// A root service with a list of capabilities has only these. A service without a user and a list is not confined.
func TestConfinedRoot(t *testing.T) {
	f := newFixture(t)
	for name, want := range map[string]string{"limited": "CapBnd:\t0000000000001000", "full": "NoNewPrivs:\t0"} {
		out := f.path(name)
		s := shell(name, "cat /proc/self/status >"+out+".new && mv "+out+".new "+out+" && sleep 1000")
		if name == "limited" {
			s.Capabilities = []string{"NET_ADMIN"}
		}
		s.Ready = &Probe{File: out}
		f.apply(s)
		f.untilState(name, initapi.StateReady)
		status, err := os.ReadFile(out)
		expect.NoError(t, err)
		if !strings.Contains(string(status), want) {
			t.Errorf("%s: no %q in\n%s", name, want, status)
		}
		expect.NoError(t, f.Apply(nil))
	}
}

// refusing is a Starter that fails at first, as it does while the machine has no further process, and notes the threads of its calls.
type refusing struct {
	processtest.Starter
	threads chan int
}

func (r refusing) Start(cmd *exec.Cmd) (<-chan process.Exit, error) {
	if r.threads <- unix.Gettid(); len(r.threads) == 1 {
		return nil, syscall.EAGAIN
	}
	return r.Starter.Start(cmd)
}

// A start that the kernel refuses is repeated on the same thread: PID 1 would end if it had to replace the thread.
func TestRefusedStart(t *testing.T) {
	f := newFixture(t)
	starter := refusing{threads: make(chan int, 2)}
	f.starter = starter
	s := shell("a", "exec sleep 1000")
	s.Capabilities = []string{"NET_ADMIN"}
	f.apply(s)
	f.untilState("a", initapi.StateReady)
	if first, second := <-starter.threads, <-starter.threads; first != second {
		t.Errorf("the starts ran on the threads %d and %d", first, second)
	}
}

func TestRightsAreValidated(t *testing.T) {
	for want, s := range map[string]Service{
		`user "mallory"`:                  {User: "mallory"},
		`capability "SYS_ADMIN"`:          {User: accounts.Etcd, Capabilities: []string{"SYS_ADMIN"}},
		"owns and reads: expected a user": {Owns: []string{"/a"}},
	} {
		s.Name, s.Command = "a", []string{"/bin/true"}
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", s, err, want)
		}
	}
}

// A running service can remove files while its folder changes owner. This is not an error.
func TestHandOverOfRunning(t *testing.T) {
	dir := t.TempDir()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			path := filepath.Join(dir, strconv.Itoa(i%50))
			_ = os.MkdirAll(filepath.Join(path, "in"), 0o700)
			_ = os.RemoveAll(path)
		}
	}()
	defer func() { close(stop); <-done }()
	s := Service{User: accounts.Etcd, Owns: []string{dir}}
	for range 2000 {
		if err := s.HandOver(); err != nil {
			t.Fatal(err)
		}
	}
}

package supervisor

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/process/processtest"
)

// patience limits each wait of a test. Only failing tests wait that long.
const patience = 2 * time.Minute

type fixture struct {
	*testing.T
	*Supervisor
	dir string
}

func newFixture(t *testing.T) *fixture {
	dir := t.TempDir()
	f := &fixture{t, New(processtest.Starter{}, filepath.Join(dir, "logs"), slog.New(slog.NewTextHandler(io.Discard, nil))), dir}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		f.Shutdown(ctx)
	})
	return f
}

func (f *fixture) path(name string) string { return filepath.Join(f.dir, name) }

// shell returns a service that runs a script.
func shell(name, script string) Service {
	return Service{Name: name, Command: []string{"/bin/sh", "-c", script}, StopTimeoutSeconds: 60}
}

func (f *fixture) apply(services ...Service) {
	f.Helper()
	if err := f.Apply(services); err != nil {
		f.Fatal(err)
	}
}

// until waits until ok accepts the state of a service.
func (f *fixture) until(name string, ok func(initapi.Service) bool) initapi.Service {
	f.Helper()
	timeout := time.After(patience)
	for {
		states, changed := f.Services()
		i := slices.IndexFunc(states, func(s initapi.Service) bool { return s.Name == name })
		if i >= 0 && ok(states[i]) {
			return states[i]
		}
		select {
		case <-changed:
		case <-timeout:
			f.Fatalf("%s did not reach the state: %+v", name, states)
		}
	}
}

func (f *fixture) untilState(name string, state initapi.State) initapi.Service {
	f.Helper()
	return f.until(name, func(s initapi.Service) bool { return s.State == state })
}

func (f *fixture) read(name string) string {
	data, _ := os.ReadFile(f.path(name))
	return string(data)
}

func TestKilledServiceIsBack(t *testing.T) {
	f := newFixture(t)
	f.apply(shell("a", "exec sleep 1000"))
	first := f.untilState("a", initapi.StateReady)
	if err := syscall.Kill(int(first.PID), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	second := f.until("a", func(s initapi.Service) bool { return s.State == initapi.StateReady && s.PID != first.PID })
	if second.Restarts != 1 {
		t.Errorf("restarts: %d", second.Restarts)
	}
}

func TestBackoff(t *testing.T) {
	f := newFixture(t)
	f.apply(shell("a", "date +%s%N >> "+f.path("starts")+"; exit 3"))
	s := f.until("a", func(s initapi.Service) bool { return s.State == initapi.StateBackoff && s.Restarts >= 4 })
	if !strings.Contains(s.Message, "exit code 3") || !strings.Contains(s.Message, "a.log") {
		t.Errorf("message: %s", s.Message)
	}
	var starts []int64
	for _, field := range strings.Fields(f.read("starts")) {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		starts = append(starts, n)
	}
	for i, least := range []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond} {
		if pause := time.Duration(starts[i+1] - starts[i]); pause < least {
			t.Errorf("pause %d is %s, want %s at least", i, pause, least)
		}
	}
}

func TestOrder(t *testing.T) {
	f := newFixture(t)
	a, b := shell("a", "exec sleep 1000"), shell("b", "exec sleep 1000")
	a.Ready = &Probe{File: f.path("ready")}
	b.After = []string{"a"}
	f.apply(b, a)
	f.untilState("a", initapi.StateStarting)
	if s := f.untilState("b", initapi.StateWaiting); s.PID != 0 {
		t.Error("b did not wait")
	}
	f.until("b", func(s initapi.Service) bool { return s.Message == "waits for a" })
	if err := os.WriteFile(f.path("ready"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f.untilState("b", initapi.StateReady)
	// A restart does not wait for other services.
	if err := f.Stop("a"); err != nil {
		t.Fatal(err)
	}
	old := f.untilState("b", initapi.StateReady)
	_ = syscall.Kill(int(old.PID), syscall.SIGKILL)
	f.until("b", func(s initapi.Service) bool { return s.State == initapi.StateReady && s.PID != old.PID })
}

func TestApplyChangesOnlyWhatDiffers(t *testing.T) {
	f := newFixture(t)
	a, b, c := shell("a", "exec sleep 1000"), shell("b", "exec sleep 1000"), shell("c", "exec sleep 1000")
	f.apply(a, b)
	oldA, oldB := f.untilState("a", initapi.StateReady), f.untilState("b", initapi.StateReady)
	b.Revision = "2"
	f.apply(a, b, c)
	newB, newC := f.untilState("b", initapi.StateReady), f.untilState("c", initapi.StateReady)
	if now := f.untilState("a", initapi.StateReady); now.PID != oldA.PID {
		t.Error("a was restarted")
	}
	if newB.PID == oldB.PID {
		t.Error("b was not restarted")
	}
	f.apply(a)
	states, _ := f.Services()
	if len(states) != 1 {
		t.Errorf("services after the change: %+v", states)
	}
	for _, removed := range []initapi.Service{newB, newC} {
		if running(int(removed.PID)) {
			t.Errorf("%s still runs", removed.Name)
		}
	}
}

// A service whose file cannot be used stays as it is. It restarts with a service that it requires.
func TestApplyKeeps(t *testing.T) {
	f := newFixture(t)
	a, b, c := shell("a", "exec sleep 1000"), shell("b", "exec sleep 1000"), shell("c", "exec sleep 1000")
	c.Requires = []string{"b"}
	f.apply(a, b, c)
	old := map[string]int32{}
	for _, name := range []string{"a", "b", "c"} {
		old[name] = f.untilState(name, initapi.StateReady).PID
	}
	b.Revision = "2"
	if err := f.Apply([]Service{b}, "a", "c", "none"); err != nil {
		t.Fatal(err)
	}
	for name, restarts := range map[string]bool{"a": false, "b": true, "c": true} {
		if now := f.untilState(name, initapi.StateReady).PID; (now != old[name]) != restarts {
			t.Errorf("%s had process %d and has %d", name, old[name], now)
		}
	}
	if states, _ := f.Services(); len(states) != 3 {
		t.Errorf("services: %+v", states)
	}
}

// A start or restart while Apply stops the services does not start the old service again: Apply would not find its process any more.
func TestNoStartDuringApply(t *testing.T) {
	f := newFixture(t)
	first := shell("first", fmt.Sprintf("trap 'until [ -e %s ]; do sleep 0.02; done; exit' TERM; touch %s; while :; do sleep 0.02; done", f.path("release"), f.path("up")))
	first.Ready = &Probe{File: f.path("up")}
	second := shell("second", "exec sleep 1000")
	second.After = []string{"first"} // It stops before the first one.
	f.apply(first, second)
	f.untilState("second", initapi.StateReady)
	first.Revision, second.Revision = "2", "2"
	applied := make(chan error)
	go func() { applied <- f.Apply([]Service{first, second}) }()
	f.untilState("second", initapi.StateStopped)
	for name, start := range map[string]func(string) error{"start": f.Start, "restart": f.Restart} {
		if err := start("second"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if now := f.until("second", func(initapi.Service) bool { return true }); now.State != initapi.StateStopped {
			t.Errorf("%s: the old service is %s", name, now.State)
		}
	}
	if err := os.WriteFile(f.path("release"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := <-applied; err != nil {
		t.Fatal(err)
	}
	f.untilState("second", initapi.StateReady)
}

// A service that requires another one stops before it, and starts with it. A crash of the other service does not affect it.
func TestRequires(t *testing.T) {
	f := newFixture(t)
	logged := func(name, revision string) Service {
		ready := f.path("ready-" + name + revision)
		script := fmt.Sprintf("trap 'echo stop %s >> %s; exit' TERM; touch %s; while :; do sleep 0.05; done", name, f.path("log"), ready)
		service := shell(name, script)
		service.Revision = revision
		service.Ready = &Probe{File: ready}
		return service
	}
	server := func(revision string) Service {
		s := logged("server", revision)
		s.Requires = []string{"database"}
		return s
	}
	f.apply(logged("database", "1"), server("1"), logged("other", "1"))
	pids := map[string]int32{}
	for _, name := range []string{"database", "server", "other"} {
		pids[name] = f.untilState(name, initapi.StateReady).PID
	}

	// The next process makes the file again after its trap, so that it logs its end.
	if err := errors.Join(os.Remove(f.path("ready-database1")), syscall.Kill(int(pids["database"]), syscall.SIGKILL)); err != nil {
		t.Fatal(err)
	}
	f.until("database", func(s initapi.Service) bool { return s.State == initapi.StateReady && s.PID != pids["database"] })
	if s := f.untilState("server", initapi.StateReady); s.PID != pids["server"] {
		t.Error("a crash of the required service restarted the server")
	}

	f.apply(logged("database", "2"), server("1"), logged("other", "1"))
	f.until("server", func(s initapi.Service) bool { return s.State == initapi.StateReady && s.PID != pids["server"] })
	if s := f.untilState("other", initapi.StateReady); s.PID != pids["other"] {
		t.Error("an unrelated service restarted")
	}
	log := f.read("log")
	if stop := strings.Index(log, "stop server"); stop < 0 || stop > strings.Index(log, "stop database") {
		t.Errorf("want the server to stop before the database, got:\n%s", log)
	}
}

func TestStopsAtReload(t *testing.T) {
	service := func(name, revision string, requires ...string) Service {
		return Service{Name: name, Revision: revision, Requires: requires}
	}
	of := func(services ...Service) map[string]Service {
		out := map[string]Service{}
		for _, s := range services {
			out[s.Name] = s
		}
		return out
	}
	current := of(service("a", "1"), service("b", "1", "a"), service("c", "1", "b"), service("d", "1"))
	for name, test := range map[string]struct {
		wanted map[string]Service
		want   []string
	}{
		"nothing changes":               {current, nil},
		"a chain of requirements":       {of(service("a", "2"), service("b", "1", "a"), service("c", "1", "b"), service("d", "1")), []string{"c", "b", "a"}},
		"only the last one changes":     {of(service("a", "1"), service("b", "1", "a"), service("c", "2", "b"), service("d", "1")), []string{"c"}},
		"a required service is removed": {of(service("c", "1", "b"), service("b", "1", "a"), service("d", "1")), []string{"c", "b", "a"}},
		"another service is added":      {of(service("a", "1"), service("b", "1", "a"), service("c", "1", "b"), service("d", "1"), service("e", "1")), nil},
	} {
		t.Run(name, func(t *testing.T) {
			if got := stopsAtReload(current, test.wanted); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestCircle(t *testing.T) {
	f := newFixture(t)
	a, b := shell("a", "true"), shell("b", "true")
	a.After, b.After = []string{"b"}, []string{"a"}
	if err := f.Apply([]Service{a, b}); err == nil || !strings.Contains(err.Error(), "cycle") {
		t.Errorf("got %v", err)
	}
}

func TestProcessGroup(t *testing.T) {
	for _, kills := range []bool{true, false} {
		t.Run(fmt.Sprint(kills), func(t *testing.T) {
			f := newFixture(t)
			// The service is ready when the file exists, so it gets its name when it is complete.
			s := shell("a", "sleep 1000 & echo $! > "+f.path("new")+"; mv "+f.path("new")+" "+f.path("child")+"; exec sleep 1000")
			s.KillProcessGroup = &kills
			s.Ready = &Probe{File: f.path("child")}
			f.apply(s)
			f.untilState("a", initapi.StateReady)
			child, err := strconv.Atoi(strings.TrimSpace(f.read("child")))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = syscall.Kill(child, syscall.SIGKILL) })
			if err := f.Stop("a"); err != nil {
				t.Fatal(err)
			}
			deadline := time.Now().Add(patience)
			for kills && running(child) && time.Now().Before(deadline) {
				time.Sleep(5 * time.Millisecond)
			}
			if running(child) == kills {
				t.Errorf("child runs: %v", running(child))
			}
		})
	}
}

// running returns false for a zombie, which waits for its parent.
func running(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(data), ") Z ")
}

func TestStop(t *testing.T) {
	f := newFixture(t)
	stubborn := shell("stubborn", "trap '' TERM; touch "+f.path("up")+"; while :; do sleep 1; done")
	stubborn.StopTimeoutSeconds, stubborn.Ready = 1, &Probe{File: f.path("up")}
	polite := shell("polite", "trap 'echo bye > "+f.path("bye")+"; exit' INT; touch "+f.path("up2")+"; while :; do sleep 0.05; done")
	polite.StopSignal, polite.Ready = "SIGINT", &Probe{File: f.path("up2")}
	f.apply(stubborn, polite)
	f.untilState("stubborn", initapi.StateReady)
	f.untilState("polite", initapi.StateReady)
	for _, name := range []string{"stubborn", "polite"} {
		if err := f.Stop(name); err != nil {
			t.Fatal(err)
		}
		if s := f.untilState(name, initapi.StateStopped); s.PID != 0 {
			t.Errorf("%s: pid %d", name, s.PID)
		}
	}
	if f.read("bye") != "bye\n" {
		t.Error("the service polite did not get its signal")
	}
	if err := f.Start("polite"); err != nil {
		t.Fatal(err)
	}
	f.untilState("polite", initapi.StateReady)
	if f.Stop("nobody") == nil || f.Reload("stubborn") == nil {
		t.Error("an unknown and a stopped service were accepted")
	}
}

func TestShutdownReversesTheOrder(t *testing.T) {
	f := newFixture(t)
	service := func(name string, after ...string) Service {
		s := shell(name, "trap 'echo "+name+" >> "+f.path("order")+"; exit' TERM; touch "+f.path(name)+"; while :; do sleep 0.02; done")
		s.Ready, s.After = &Probe{File: f.path(name)}, after
		return s
	}
	f.apply(service("etcd"), service("api", "etcd"), service("kubelet", "api"))
	f.untilState("kubelet", initapi.StateReady)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	f.Shutdown(ctx, "kubelet")
	if got := f.read("order"); got != "kubelet\n" || f.untilState("api", initapi.StateReady).PID == 0 {
		t.Errorf("order of the shutdown of one service: %q", got)
	}
	if err := f.Start("kubelet"); err != nil || f.untilState("kubelet", initapi.StateStopped).PID != 0 {
		t.Error("a service was started after its shutdown")
	}
	f.Shutdown(ctx)
	if got := f.read("order"); got != "kubelet\napi\netcd\n" {
		t.Errorf("order: %q", got)
	}
	if err := f.Start("etcd"); err != nil || f.untilState("etcd", initapi.StateStopped).PID != 0 {
		t.Error("a service was started after the shutdown")
	}
}

func TestProbes(t *testing.T) {
	dir := t.TempDir()
	ok := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/ok" {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	defer ok.Close()
	ca := filepath.Join(dir, "ca.crt")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ok.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	tests := map[string]struct {
		probe Probe
		ready bool
	}{
		"https":             {Probe{URL: ok.URL + "/ok", CAFile: ca}, true},
		"https answers 500": {Probe{URL: ok.URL + "/", CAFile: ca}, false},
		"https, unknown CA": {Probe{URL: ok.URL + "/ok"}, false},
		"https, no CA file": {Probe{URL: ok.URL + "/ok", CAFile: ca + "x"}, false},
		"tcp":               {Probe{TCP: ok.Listener.Addr().String()}, true},
		"tcp, refused":      {Probe{TCP: "127.0.0.1:1"}, false},
		"unix":              {Probe{Unix: socket}, true},
		"unix, no socket":   {Probe{Unix: socket + "x"}, false},
		"file":              {Probe{File: ca}, true},
		"file, none":        {Probe{File: ca + "x"}, false},
		"exec":              {Probe{Exec: []string{"/bin/true"}}, true},
		"exec fails":        {Probe{Exec: []string{"/bin/false"}}, false},
		"exec, timeout":     {Probe{Exec: []string{"/bin/sleep", "1000"}, TimeoutSeconds: 1}, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if tt.probe.TimeoutSeconds == 0 {
				tt.probe.TimeoutSeconds = 60
			}
			p := &prober{Probe: &tt.probe, starter: processtest.Starter{}}
			defer p.close()
			if err := p.try(context.Background()); (err == nil) != tt.ready {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestServiceFiles(t *testing.T) {
	dir := t.TempDir()
	want := Service{Name: "a", Command: []string{"/bin/a", "--x"}, After: []string{"b"}, Ready: &Probe{TCP: "127.0.0.1:1"}}
	if err := want.Write(dir); err != nil {
		t.Fatal(err)
	}
	bad := map[string]string{
		"unknown.yaml": "name: unknown\ncommand: [/bin/a]\nrestart: always\n",
		"name.yaml":    "name: other\ncommand: [/bin/a]\n",
		"path.yaml":    "name: path\ncommand: [a]\n",
		"probe.yaml":   "name: probe\ncommand: [/a]\nready: {tcp: a, file: b}\n",
		"signal.yaml":  "name: signal\ncommand: [/a]\nstopSignal: SIGNOPE\n",
	}
	for name, text := range bad {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	services, unusable, err := Load(dir)
	if slices.Sort(unusable); !slices.Equal(unusable, []string{"name", "path", "probe", "signal", "unknown"}) {
		t.Errorf("unusable: %v", unusable)
	}
	if len(services) != 1 || services[0].Name != "a" || services[0].Ready.TCP != want.Ready.TCP {
		t.Errorf("services: %+v", services)
	}
	for name := range bad {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is not in: %v", name, err)
		}
	}
	if services, _, err := Load(filepath.Join(dir, "none")); len(services) != 0 || err != nil {
		t.Errorf("a folder that does not exist: %v, %v", services, err)
	}
}

func TestRotate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.log")
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	write := func(text string) {
		if _, err := log.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	check := func(name, want string) {
		t.Helper()
		if got, _ := os.ReadFile(name); string(got) != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	write("0123456789")
	if err := rotate(path, 10); err != nil {
		t.Fatal(err)
	}
	check(path, "0123456789")
	write("a")
	if err := rotate(path, 10); err != nil {
		t.Fatal(err)
	}
	check(path+".1", "0123456789a")
	write("b") // the service continues at the beginning of the file
	check(path, "b")
}

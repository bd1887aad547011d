package embedded

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
)

// TestStartIsRepeated: a plane whose start fails shows the cause and tries again, after longer pauses, until it runs.
func TestStartIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithTimeout(t.Context(), time.Hour)
		defer end()
		var attempts []time.Duration
		begin, lasts := time.Now(), 10
		p := &plane{board: newBoard(Status{}), start: func(context.Context) error {
			attempts = append(attempts, time.Since(begin))
			if len(attempts) <= lasts {
				return errors.New("no space left on device")
			}
			return nil
		}}
		ended := make(chan struct{})
		go func() { p.work(ctx); close(ended) }()
		synctest.Wait()
		if s, _ := p.board.get(); s.Ready || s.Error != "no space left on device (next attempt in 1s)" {
			t.Errorf("after a failed start: %+v", s)
		}
		if !p.board.await(ctx, func(s Status) bool { return s.Ready }) {
			t.Error("the plane does not start")
		}
		if s, _ := p.board.get(); s.Error != "" {
			t.Errorf("the error remains: %s", s.Error)
		}
		want := []time.Duration{0}
		for i := range lasts {
			want = append(want, want[i]+min(time.Second<<i, time.Minute))
		}
		if !slices.Equal(attempts, want) {
			t.Errorf("attempts after %v, want %v", attempts, want)
		}
		end()
		<-ended
	})
}

// TestMaintenanceDuringStart: while a start waits for a component, logs stay small and certificates are renewed, the status has the cause
// of the last failure, and the plane can be stopped.
func TestMaintenanceDuringStart(t *testing.T) {
	for name, test := range map[string]struct {
		fails int
		shown string
	}{
		"first attempt":  {0, ""},
		"second attempt": {1, "no space left on device (another attempt is in progress)"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { checkMaintenance(t, test.fails, test.shown) })
		})
	}
}

func checkMaintenance(t *testing.T, fails int, shown string) {
	l, s, owner := testPKI(t)
	expect.NoError(t, ensurePKI(l, s, owner, time.Now().Add(-leafValidity))) // They expire now.
	log := l.Log(etcd)
	expect.NoError(t, errors.Join(os.MkdirAll(l.Logs(), 0o700), os.WriteFile(log, nil, 0o600), os.Truncate(log, logLimit+1)))

	p := &plane{layout: l, state: s, board: newBoard(Status{})}
	attempts := 0
	p.start = func(ctx context.Context) error {
		p.owner = owner
		p.board.component(ProcessStatus{Name: etcd, State: ProcessBackoff})
		if attempts++; attempts <= fails {
			return errors.New("no space left on device")
		}
		<-ctx.Done() // waits for etcd
		return ctx.Err()
	}
	begin, lasts := time.Now(), renewalInterval+time.Hour
	ctx, end := context.WithTimeout(t.Context(), lasts)
	defer end()
	p.work(ctx)
	if took := time.Since(begin); took != lasts {
		t.Errorf("the plane ended after %s, want %s", took, lasts)
	}
	if status, _ := p.board.get(); status.Error != shown {
		t.Errorf("the status shows %q, want %q", status.Error, shown)
	}
	if info, err := os.Stat(log); err != nil || info.Size() > 0 {
		t.Errorf("the log was not trimmed: %v, %v", info, err)
	}
	if c := loadCert(t, filepath.Join(l.Component(apiServer), "server.crt")); !pki.ValidAt(c, time.Now()) {
		t.Errorf("the certificate was not renewed: valid until %s", c.NotAfter)
	}
}

// TestExpiryAtTheStart: the status shows an old authority when the components exist, and not only after the first renewal.
func TestExpiryAtTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, s, owner := testPKI(t)
		time.Sleep(pki.AuthorityValidity) // in the time of the bubble
		p := &plane{layout: l, state: s, owner: owner, board: newBoard(Status{})}
		p.board.component(ProcessStatus{Name: etcd})
		ctx, end := context.WithTimeout(t.Context(), time.Minute)
		defer end()
		p.renew(ctx)
		if status, _ := p.board.get(); len(status.AuthoritiesExpiring) != len(authorities) {
			t.Errorf("the status shows %v", status.AuthoritiesExpiring)
		}
	})
}

// TestMaintenanceAfterAPause: the task follows the clock of the box, and not the timers, which stop while the box is paused.
func TestMaintenanceAfterAPause(t *testing.T) {
	begin := time.Now()
	ctx, end := context.WithCancel(t.Context())
	defer end()
	ticks, ended := make(chan time.Time), make(chan struct{})
	var done []time.Duration
	go func() {
		defer close(ended)
		maintainAt(ctx, ticks, 12*time.Hour, func(now time.Time) error {
			if strings.Contains(now.String(), " m=") {
				t.Errorf("%s has a monotonic reading", now)
			}
			done = append(done, now.Sub(begin.Round(0)))
			return errors.New("failed")
		})
	}()
	const day = 24 * time.Hour
	for _, at := range []time.Duration{
		time.Minute, 11 * time.Hour, 13 * time.Hour, // The third has passed the interval.
		13*time.Hour + time.Minute, 400 * day, 400*day + time.Minute, // The box was paused until the second one.
		20 * day, 20*day + time.Minute, 21 * day, // The clock was set back before the first one.
	} {
		ticks <- begin.Add(at)
	}
	end()
	<-ended
	if want := []time.Duration{13 * time.Hour, 400 * day, 20 * day, 21 * day}; !slices.Equal(done, want) {
		t.Errorf("the task was done after %v, want %v", done, want)
	}
}

// TestPartsAfterAnError: a plane that cannot prepare its files has no components, and makes each of them once afterwards. Incomplete files of
// a killed plane are removed.
func TestPartsAfterAnError(t *testing.T) {
	assets := t.TempDir()
	state := State{ID: "abcd1234", Assets: assets, Settings: Settings{KubernetesVersion: "v1.36.3", Hosts: []string{"local", "local-2"}}, PortBase: 30000}
	p := newPlane(Layout{Root: newRoot(t)}, state, Supervisor{})
	expect.NoError(t, prepareRoot(p.layout))
	for _, program := range staged(state) {
		expect.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(program), 0o755), os.WriteFile(program, nil, 0o755)))
	}
	left := []string{filepath.Join(p.layout.Root, ".new-1"), filepath.Join(p.layout.PKI(), ".new-2"), filepath.Join(p.layout.Component(apiServer), ".new-3")}
	for _, path := range left {
		expect.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o711), os.WriteFile(path, []byte("a key"), 0o600)))
	}
	for _, obstacle := range []string{p.layout.Bin(), filepath.Join(p.layout.Root, "hosts")} {
		expect.NoError(t, os.WriteFile(obstacle, nil, 0o600)) // in place of a folder
		if err := p.makeComponents(t.Context()); err == nil || !strings.Contains(err.Error(), "not a directory") {
			t.Errorf("with a file %s: %v", obstacle, err)
		}
		if len(p.processes) > 0 {
			t.Errorf("%d components in spite of the error", len(p.processes))
		}
		expect.NoError(t, os.Remove(obstacle))
	}
	for range 2 {
		expect.NoError(t, p.makeComponents(t.Context()))
		if s, _ := p.board.get(); len(p.processes) != 7 || len(s.Components) != 7 || len(p.parts.hosts) != 2 {
			t.Errorf("%d processes, %d components, %d hosts", len(p.processes), len(s.Components), len(p.parts.hosts))
		}
	}
	for _, path := range left {
		if atomicfile.Exists(path) {
			t.Errorf("%s remains", path)
		}
	}
}

func TestProblem(t *testing.T) {
	waiting, failed := ProcessStatus{Name: "manager", State: ProcessWaiting, Message: "m"}, ProcessStatus{Name: "etcd", State: ProcessBackoff, Message: "e"}
	for name, test := range map[string]struct {
		status Status
		want   string
	}{
		"ready":              {Status{Ready: true}, ""},
		"starts":             {Status{Components: []ProcessStatus{waiting}}, ""},
		"a component ends":   {Status{Components: []ProcessStatus{waiting, failed}}, "etcd: e"},
		"a start has failed": {Status{Error: "full", Components: []ProcessStatus{waiting}}, "full"},
		"both":               {Status{Error: "full", Components: []ProcessStatus{failed}}, "full; etcd: e"},
	} {
		if got := test.status.Problem(); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}

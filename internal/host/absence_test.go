package host

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/fencing"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/testenv/expect"
)

// afterAbsence returns the record of a capstand whose last contact with the manager of the management cluster "plane" was at
// the given time.
func afterAbsence(t *testing.T, last time.Time, timeout time.Duration) *contacts {
	t.Helper()
	path := filepath.Join(t.TempDir(), "contacts.json")
	if err := atomicfile.WriteJSON(path, map[string]time.Time{"plane": last}, 0o600); err != nil {
		t.Fatal(err)
	}
	return openContacts(path, time.Minute, timeout, slog.New(slog.DiscardHandler))
}

func TestMayBeReplaced(t *testing.T) {
	for name, tc := range map[string]struct {
		last time.Time
		of   string
		want bool
	}{
		"a short absence":            {time.Now().Add(-30 * time.Second), "plane", false},
		"a long absence":             {time.Now().Add(-2 * time.Minute), "plane", true},
		"a clock that was set back":  {time.Now().Add(time.Hour), "plane", true},
		"another management cluster": {time.Now().Add(-2 * time.Minute), "other", false},
		"none is recorded":           {time.Now().Add(-2 * time.Minute), "", false},
	} {
		if got := afterAbsence(t, tc.last, 0).mayBeReplaced(tc.of); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// The record survives a restart of capstand, so the absence of managers is measured across restarts.
func TestContactIsRecorded(t *testing.T) {
	c := afterAbsence(t, time.Now().Add(-time.Hour), 0)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c.follow(ctx, "plane")
	if next := openContacts(c.path, time.Minute, 0, c.log); next.mayBeReplaced("plane") {
		t.Error("the contact was not recorded")
	}
}

// A disk that hangs delays the record of a contact, which contains the time of the contact.
func TestContactEndsBeforeItsRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := afterAbsence(t, time.Now().Add(-time.Hour), 0)
		ctx, cancel := context.WithCancel(t.Context())
		c.connected = func(string) {
			cancel()
			time.Sleep(time.Hour) // As a write to a disk that hangs.
		}
		c.follow(ctx, "plane")
		if age := time.Since(c.last["plane"]); age != time.Hour {
			t.Errorf("the last contact was %s ago, want an hour", age)
		}
		if c.note("plane", time.Now().Add(-2*time.Hour)); time.Since(c.last["plane"]) != time.Hour {
			t.Error("the end of an earlier contact replaces a later one")
		}
	})
}

// watcher is the stream of a manager.
type watcher struct {
	hostpb.Host_WatchServer
	ctx context.Context
}

func (w watcher) Context() context.Context { return w.ctx }

func (watcher) Send(*hostpb.Event) error { return nil }

// The leases of machines end after the connection of the manager, although its record waits for a disk that hangs.
func TestConnectionEndsWhileTheDiskHangs(t *testing.T) {
	h := recorded(t)
	openFence(t, h)
	h.contacts = afterAbsence(t, time.Now(), 0)
	h.contacts.mu.Lock() // As a record that is being written.
	defer h.running.Wait()
	defer h.contacts.mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		ended <- h.Watch(&hostpb.WatchRequest{ManagementCluster: "plane"}, watcher{ctx: ctx})
	}()
	expect.True(t, "the manager is connected", h.fence.Watched)
	cancel()
	if err := <-ended; h.fence.Watched() {
		t.Errorf("the manager is still connected after %v", err)
	}
}

// A machine that may have been replaced waits for a manager, for a limited time if none connects.
func TestUnconfirmedMachine(t *testing.T) {
	made := func(t *testing.T, timeout time.Duration) (*Host, *machine) {
		h := recorded(t)
		h.runc = runc.Runc{Binary: "/bin/false", Root: t.TempDir()}
		h.contacts = afterAbsence(t, time.Now().Add(-time.Hour), timeout)
		m := h.machines.byID["m-1"]
		m.state.ManagementCluster = "plane"
		m.unconfirmed = h.contacts.mayBeReplaced("plane")
		return h, m
	}
	t.Run("no manager connects", func(t *testing.T) {
		_, m := made(t, time.Hour)
		if pause := m.awaitConfirmation(t.Context()); pause < 59*time.Minute || !m.status.Unconfirmed {
			t.Errorf("the machine waits %s: %v", pause, m.status)
		}
		m.host.contacts.started = time.Now().Add(-2 * time.Hour)
		if pause := m.awaitConfirmation(t.Context()); pause != 0 || m.status.Unconfirmed {
			t.Errorf("after the timeout the machine waits %s: %v", pause, m.status)
		}
	})
	t.Run("a manager connects and confirms", func(t *testing.T) {
		h, m := made(t, time.Millisecond)
		h.contacts.note("plane", time.Now())
		if pause := m.awaitConfirmation(t.Context()); pause != forever {
			t.Errorf("the machine waits %s", pause)
		}
		if _, err := h.ClaimMachine(t.Context(), &hostpb.ClaimMachineRequest{Id: "m-1", Namespace: "default", Name: "one", ManagementCluster: "plane"}); err != nil {
			t.Fatal(err)
		}
		select {
		case <-m.wake:
		default:
			t.Error("the confirmation does not wake the machine")
		}
		if pause := m.awaitConfirmation(t.Context()); pause != 0 || m.status.Unconfirmed || m.status.Message != "" {
			t.Errorf("after the confirmation the machine waits %s: %v", pause, m.status)
		}
	})
	t.Run("runc fails", func(t *testing.T) { // The machine may run, here or elsewhere.
		h, m := made(t, time.Hour)
		state := filepath.Join(h.runc.Root, m.spec.Id, "state.json")
		if err := errors.Join(os.Mkdir(filepath.Dir(state), 0o700), os.WriteFile(state, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		if pause := m.awaitConfirmation(t.Context()); pause != maxRestartDelay || !m.unconfirmed || m.status.Message == "" {
			t.Errorf("the machine waits %s, unconfirmed %v: %v", pause, m.unconfirmed, m.status)
		}
		if err := os.Remove(state); err != nil {
			t.Fatal(err)
		}
		if pause := m.awaitConfirmation(t.Context()); pause < 59*time.Minute || !m.status.Unconfirmed {
			t.Errorf("after that the machine waits %s: %v", pause, m.status)
		}
	})
	t.Run("the manager of another management cluster connects", func(t *testing.T) {
		h, m := made(t, time.Hour)
		h.contacts.note("other", time.Now())
		if pause := m.awaitConfirmation(t.Context()); pause == forever || pause == 0 {
			t.Errorf("the machine waits %s", pause)
		}
	})
}

// A machine that may have been replaced still waits after a restart of capstand, although a manager was connected meanwhile. Its
// confirmation ends this.
func TestUnconfirmedAfterRestart(t *testing.T) {
	h := recorded(t)
	h.runc = runc.Runc{Binary: "/bin/false", Root: t.TempDir()}
	h.contacts = afterAbsence(t, time.Now().Add(-time.Hour), time.Hour)
	m := onDisk(t, h)
	m.state.ManagementCluster = "plane"
	if err := m.save(); err != nil {
		t.Fatal(err)
	}
	restart := func() *machine {
		t.Helper()
		h.contacts = openContacts(h.contacts.path, time.Minute, time.Hour, h.log)
		clear(h.machines.byID)
		if err := h.loadAll(); err != nil {
			t.Fatal(err)
		}
		return h.machines.byID["m-1"]
	}
	restart()
	h.contacts.note("plane", time.Now())
	m = restart()
	if pause := m.awaitConfirmation(t.Context()); pause < 59*time.Minute || !m.status.Unconfirmed {
		t.Errorf("after a restart the machine waits %s: %v", pause, m.status)
	}
	if err := m.claim("plane"); err != nil {
		t.Fatal(err)
	}
	m = restart()
	if pause := m.awaitConfirmation(t.Context()); pause != 0 {
		t.Errorf("after its confirmation and a restart the machine waits %s: %v", pause, m.status)
	}
}

// A machine that runs continues, and one with a doubt waits as long as the doubt demands.
func TestConfirmation(t *testing.T) {
	for name, test := range map[string]struct {
		doubt    doubt
		patience time.Duration
		want     time.Duration
		message  string
	}{
		"runs":                             {doubt{unconfirmed: true, bound: true, expired: true, running: true}, time.Hour, 0, ""},
		"no contact yet":                   {doubt{bound: true, expired: true}, 0, fencing.Pause, "reached neither"},
		"no contact yet, but runs":         {doubt{bound: true, expired: true, running: true}, 0, 0, ""},
		"unconfirmed":                      {doubt{unconfirmed: true}, time.Minute, time.Minute, "replaced"},
		"unconfirmed, a manager connected": {doubt{unconfirmed: true}, forever, forever, "replaced"},
		"unconfirmed for too long":         {doubt{unconfirmed: true}, 0, 0, ""},
		"unconfirmed and bound":            {doubt{unconfirmed: true, bound: true}, 0, forever, "replaced"},
		"unconfirmed and expired":          {doubt{unconfirmed: true, bound: true, expired: true}, time.Minute, forever, "replaced"},
	} {
		if pause, message := test.doubt.confirmation(test.patience); pause != test.want || !strings.Contains(message, test.message) || (pause == 0) != (message == "") {
			t.Errorf("%s: %s %q, want %s %q", name, pause, message, test.want, test.message)
		}
	}
}

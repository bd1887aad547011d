package embedded

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// TestPurgeAssets: the build that created the machines removes them. If that build is missing, another one does.
func TestPurgeAssets(t *testing.T) {
	there, gone := t.TempDir(), filepath.Join(t.TempDir(), "gone")
	if err := os.WriteFile(Assets{there}.Capstand(), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	other := t.TempDir()
	if err := os.WriteFile(Assets{other}.Capstand(), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct{ recorded, own, want string }{
		"both exist":                    {there, other, there},
		"the recorded build is missing": {gone, other, other},
	} {
		if got, err := purgeAssets(test.recorded, test.own); got != test.want || err != nil {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
	if _, err := purgeAssets(gone, gone+"-too"); err == nil || !strings.Contains(err.Error(), gone+"-too") || !strings.Contains(err.Error(), "--assets") {
		t.Errorf("both builds are missing: %v", err)
	}
}

// TestDownGivesUp: `capstan down` reports each failed start of capstand and ends after some attempts.
func TestDownGivesUp(t *testing.T) {
	var steps atomic.Int32
	log := filepath.Join(t.TempDir(), "log")
	c := component{name: capstand, path: filepath.Join(t.TempDir(), "capstand"), asRoot: true, ready: alwaysReady}
	err := withCapstand(context.Background(), c, log, newSpawner(), func(string) { steps.Add(1) }, func(context.Context) error {
		t.Error("`capstan down` succeeded without a capstand")
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "cannot start "+c.path) || !strings.Contains(err.Error(), log) || !strings.Contains(err.Error(), "repeat `capstan down`") {
		t.Errorf("the error is %v", err)
	}
	if got := steps.Load(); got != purgeStarts {
		t.Errorf("%d starts were reported, want %d", got, purgeStarts)
	}
}

// TestHostBehindALink: a host whose folder is on a disk that is not mounted has machines. `capstan down` must not forget it.
func TestHostBehindALink(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	disk := filepath.Join(t.TempDir(), "disk")
	expect.NoError(t, errors.Join(os.MkdirAll(l.HostRoot("local"), 0o711), os.Symlink(disk, l.HostRoot("other"))))
	if _, err := HostFolders(l); err == nil || !strings.Contains(err.Error(), l.HostRoot("other")) {
		t.Errorf("a disk that is not mounted: %v", err)
	}
	expect.NoError(t, os.Mkdir(disk, 0o711))
	if hosts, err := HostFolders(l); err != nil || !slices.Equal(hosts, []string{"local", "other"}) {
		t.Errorf("hosts %v, %v", hosts, err)
	}
}

// TestHindrances: `capstan down` names the cause why a machine still exists, once.
func TestHindrances(t *testing.T) {
	event := func(phase hostpb.MachineStatus_Phase, message string) *hostpb.Event {
		return &hostpb.Event{Object: &hostpb.Event_Machine{Machine: &hostpb.Machine{
			Spec: &hostpb.MachineSpec{Id: "m-1", Namespace: "team", Name: "one"}, Status: &hostpb.MachineStatus{Phase: phase, Message: message},
		}}}
	}
	h := hindrances{}
	for _, step := range []struct {
		event *hostpb.Event
		want  string
	}{
		{event(hostpb.MachineStatus_RUNNING, "a message"), ""},
		{event(hostpb.MachineStatus_DELETING, ""), ""},
		{event(hostpb.MachineStatus_DELETING, "removal: busy"), "machine team/one still exists: removal: busy"},
		{event(hostpb.MachineStatus_DELETING, "removal: busy"), ""},
		{&hostpb.Event{Type: hostpb.Event_SYNCED}, ""},
	} {
		if got := h.news(step.event); got != step.want {
			t.Errorf("%v: %q, want %q", step.event, got, step.want)
		}
	}
}

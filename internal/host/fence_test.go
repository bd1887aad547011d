package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/fencing"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/testenv/expect"
)

func openFence(t *testing.T, h *Host) {
	t.Helper()
	var err error
	if h.fence, err = fencing.Open(h.store.path("fencing.json"), filepath.Join(t.TempDir(), "memory.json"), h.store.root, "/none/", h.log); err != nil {
		t.Fatal(err)
	}
}

// A machine that fencing has stopped waits for a manager without a limit, in every capstand that starts meanwhile. Only the
// confirmation removes its mark.
func TestFencedMachineWaits(t *testing.T) {
	h := recorded(t)
	h.runc = runc.Runc{Binary: "/bin/false", Root: t.TempDir()}
	h.contacts = afterAbsence(t, time.Now(), time.Nanosecond)
	openFence(t, h)
	onDisk(t, h)
	killed := false
	unmarked, alive := h.fence.Stop(t.Context(), "m-1", func(context.Context) error { killed = true; return nil }) // As the guard does.
	if unmarked != nil || alive != nil || !killed {
		t.Fatal(unmarked, alive, killed)
	}
	clear(h.machines.byID)
	if err := h.loadAll(); err != nil {
		t.Fatal(err)
	}
	m := h.machines.byID["m-1"]
	expect.NoError(t, os.Mkdir(filepath.Join(h.runc.Root, "m-1"), 0o700))
	write(t, filepath.Join(h.runc.Root, "m-1", "state.json"), "") // runc fails: it is not asked for the processes.
	if pause := m.awaitConfirmation(t.Context()); pause != forever || !m.status.Fenced || !m.status.Unconfirmed {
		t.Errorf("the machine waits %s: %v", pause, m.status)
	}
	if _, err := h.ClaimMachine(t.Context(), &hostpb.ClaimMachineRequest{Id: "m-1", Namespace: "default", Name: "one", ManagementCluster: "plane"}); err != nil {
		t.Fatal(err)
	}
	if pause := m.awaitConfirmation(t.Context()); pause != 0 || m.status.Fenced || onDisk(t, h).fenced {
		t.Errorf("after the confirmation the machine waits %s: %v", pause, m.status)
	}
}

// A machine whose lease ends during its start had no process yet when fencing killed it. It stops right after its start, and waits.
func TestFencedDuringItsStart(t *testing.T) {
	h := recorded(t)
	openFence(t, h)
	m := onDisk(t, h)
	pid1 := exec.Command("sleep", "600")
	if err := pid1.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pid1.Process.Kill(); _ = pid1.Wait() }()
	bin := t.TempDir()
	h.runc = runc.Runc{Binary: filepath.Join(bin, "runc"), Root: filepath.Join(bin, "state")}
	state := filepath.Join(h.runc.Root, m.spec.Id, "state.json")
	script := fmt.Sprintf("#!/bin/sh\n: >%s\necho '{\"status\":\"running\",\"pid\":%d}'\n", filepath.Join(m.dir, fencing.Marker), pid1.Process.Pid)
	if err := errors.Join(os.MkdirAll(filepath.Dir(state), 0o700), os.WriteFile(state, nil, 0o600), os.WriteFile(h.runc.Binary, []byte(script), 0o700)); err != nil {
		t.Fatal(err)
	}
	life, end := context.WithTimeout(t.Context(), time.Minute) // Only a machine that continues lives that long.
	defer end()
	attempt := 0
	if pause := m.live(life, &attempt); pause != 0 || life.Err() != nil || attempt != 0 {
		t.Errorf("the machine continues: pause %s, %d failed starts, %v, %v", pause, attempt, life.Err(), m.status)
	}
	if pause := m.live(life, &attempt); pause != forever || !m.status.Fenced || m.status.Phase != hostpb.MachineStatus_PENDING {
		t.Errorf("the machine does not wait: pause %s, %v", pause, m.status)
	}
}

// A machine that its root has frozen runs: capstand adopts it, and fencing waits for its end.
func TestFrozenMachineRuns(t *testing.T) {
	h := recorded(t)
	m := onDisk(t, h)
	bin := t.TempDir()
	h.runc = runc.Runc{Binary: filepath.Join(bin, "runc"), Root: filepath.Join(bin, "state")}
	expect.NoError(t, os.MkdirAll(filepath.Join(h.runc.Root, m.spec.Id), 0o700))
	write(t, filepath.Join(h.runc.Root, m.spec.Id, "state.json"), "")
	for status, want := range map[string]bool{"running": true, "paused": true, "stopped": false} {
		script := fmt.Sprintf("#!/bin/sh\necho '{\"status\":%q,\"pid\":%d}'\n", status, os.Getpid())
		expect.NoError(t, os.WriteFile(h.runc.Binary, []byte(script), 0o700))
		if runs, err := m.hasProcess(t.Context()); err != nil || runs != want {
			t.Errorf("%s: the machine runs: %v, %v", status, runs, err)
		}
	}
}

// withOtherHost gives the network of the machine another host.
func withOtherHost(t *testing.T, h *Host) {
	t.Helper()
	h.box = network.Box{Dir: t.TempDir()}
	n := h.networks.byID[goodSpec().Network.Id]
	n.Overlay = &hostpb.Overlay{Vni: 1, Address: "192.0.2.1", Mtu: 1400}
	dir := filepath.Join(h.box.Dir, "networks", strings.TrimPrefix(network.BridgeName(n.Id), "cap"))
	expect.NoError(t, os.MkdirAll(dir, 0o700))
	write(t, filepath.Join(dir, "peers.json"), `{"hosts":["192.0.2.2"]}`)
}

// A machine has its lease until it is removed: its pods can have a long time to stop after the begin of its deletion.
func TestDeletedMachineHasALease(t *testing.T) {
	h := recorded(t)
	openFence(t, h)
	withOtherHost(t, h)
	m := h.machines.byID["m-1"]
	m.state.ManagementCluster = "plane"
	if _, err := h.fence.Set("plane", 30); err != nil {
		t.Fatal(err)
	}
	m.delete()
	h.fenceStep(t.Context())
	if memory, _ := fencing.ReadMemory(strings.TrimSuffix(h.fence.GuardLog(), ".log")); len(memory.Leases) != 1 || memory.Leases[0].Machine != "m-1" {
		t.Errorf("the guard reads the leases %v", memory.Leases)
	}
}

func TestSetFencing(t *testing.T) {
	h := recorded(t)
	openFence(t, h)
	for _, bad := range []*hostpb.SetFencingRequest{
		{StopAfterSeconds: 60}, {ManagementCluster: "plane", StopAfterSeconds: -1}, {ManagementCluster: "plane", StopAfterSeconds: 3601},
	} {
		if _, err := h.SetFencing(t.Context(), bad); refusal.Of(err).GetReason() != hostpb.Refusal_INVALID {
			t.Errorf("%v: %v", bad, err)
		}
	}
	for _, seconds := range []int32{60, 0} {
		if _, err := h.SetFencing(t.Context(), &hostpb.SetFencingRequest{ManagementCluster: "plane", StopAfterSeconds: seconds}); err != nil {
			t.Fatal(err)
		}
		info, err := h.GetInfo(t.Context(), &hostpb.GetInfoRequest{})
		if err != nil || (len(info.Fencing) == 1) != (seconds == 60) || info.ProtocolVersion != hostpb.ProtocolVersion {
			t.Errorf("%d seconds: %v, %v", seconds, info, err)
		}
	}
}

// A damaged record of the peers is logged when it is found and when it changes, and not each second. Reading it needs no lock.
func TestNeighbourErrorsAreLoggedOnce(t *testing.T) {
	h := recorded(t)
	var log bytes.Buffer
	h.log = slog.New(slog.NewTextHandler(&log, nil))
	h.box = network.Box{Dir: t.TempDir()}
	n := h.networks.byID[goodSpec().Network.Id]
	n.Overlay = &hostpb.Overlay{Vni: 1, Address: "192.0.2.1", Mtu: 1400}
	dir := filepath.Join(h.box.Dir, "networks", strings.TrimPrefix(network.BridgeName(n.Id), "cap"))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		content string
		logged  int
	}{{"{", 1}, {"{", 1}, {"[]", 2}, {`{"hosts":["192.0.2.2"]}`, 2}, {"[]", 3}} {
		if err := os.WriteFile(filepath.Join(dir, "peers.json"), []byte(step.content), 0o600); err != nil {
			t.Fatal(err)
		}
		h.mu.Lock()
		overlays := h.networks.overlays()
		across := h.networks.acrossHosts(overlays) // A lock inside would never return.
		h.mu.Unlock()
		if logged := strings.Count(log.String(), "other hosts of a network"); logged != step.logged || len(across) != strings.Count(step.content, "192") {
			t.Errorf("%s: %d lines, want %d, and networks %v", step.content, logged, step.logged, across)
		}
	}
}

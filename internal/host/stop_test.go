package host

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/testenv/expect"
)

// PID 1 gets the limit of the host. With the limit 0, it is not asked: it would take a missing limit for its default.
func TestStopPods(t *testing.T) {
	for limit, want := range map[time.Duration][]string{0: nil, time.Minute: {"1m0s"}} {
		t.Run(limit.String(), func(t *testing.T) {
			h := recorded(t)
			h.config.StopPodsWithin = limit
			m := onDisk(t, h)
			var asked []string
			withPID1(t, m, os.Getpid(), func(_ http.ResponseWriter, r *http.Request) {
				asked = append(asked, r.FormValue(machineapi.StopPodsWithin))
			})
			m.stopPods(t.Context())
			if !slices.Equal(asked, want) {
				t.Errorf("PID 1 was asked with the limits %q, want %q", asked, want)
			}
		})
	}
}

// withPID1 makes a process the PID 1 of the machine, whose socket has a handler.
func withPID1(t *testing.T, m *machine, pid int, handle http.HandlerFunc) {
	t.Helper()
	bin := t.TempDir()
	m.host.runc = runc.Runc{Binary: filepath.Join(bin, "runc"), Root: filepath.Join(bin, "state")}
	for _, dir := range []string{filepath.Join(m.host.runc.Root, m.spec.Id), m.runDir()} {
		expect.NoError(t, os.MkdirAll(dir, 0o700))
	}
	write(t, filepath.Join(m.host.runc.Root, m.spec.Id, "state.json"), "")
	script := fmt.Sprintf("#!/bin/sh\necho '{\"status\":\"running\",\"pid\":%d}'\n", pid)
	expect.NoError(t, os.WriteFile(m.host.runc.Binary, []byte(script), 0o700))
	listener, err := net.Listen("unix", filepath.Join(m.runDir(), "init.sock"))
	expect.NoError(t, err)
	pid1 := &http.Server{Handler: handle}
	t.Cleanup(func() { _ = pid1.Close() })
	go func() { _ = pid1.Serve(listener) }()
}

// While the pods of a host that shuts down stop, the contact with other hosts is recorded, so that the guard does not kill them.
func TestStopKeepsContact(t *testing.T) {
	h := recorded(t)
	h.config.StopPodsWithin = time.Minute
	openFence(t, h)
	memory := strings.TrimSuffix(h.fence.GuardLog(), ".log")
	write(t, memory, "{}")
	pid1 := exec.Command("sleep", "600")
	expect.NoError(t, pid1.Start())
	defer func() { _ = pid1.Process.Kill(); _ = pid1.Wait() }()
	asked, answer, stopped := make(chan bool), make(chan bool), make(chan bool)
	withPID1(t, h.machines.byID["m-1"], pid1.Process.Pid, func(http.ResponseWriter, *http.Request) { close(asked); <-answer })
	go func() { defer close(stopped); h.StopMachines(t.Context()) }()
	<-asked
	expect.True(t, "the contacts are recorded", func() bool { return read(t, memory) != "{}" })
	close(answer)
	<-stopped
	h.Wait()
}

// A runc that does not answer, as with a freezer of cgroup v1 that never reaches its state, holds up the stop and the deletion of a machine for
// a time only.
func TestStopWithHungRunc(t *testing.T) {
	h := recorded(t)
	h.config.StopPodsWithin = time.Minute
	m := onDisk(t, h)
	bin := t.TempDir()
	h.runc = runc.Runc{Binary: filepath.Join(bin, "runc"), Root: filepath.Join(bin, "state"), StateTimeout: time.Millisecond}
	if err := os.MkdirAll(filepath.Join(h.runc.Root, m.spec.Id), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(h.runc.Root, m.spec.Id, "state.json"), "")
	if err := os.WriteFile(h.runc.Binary, []byte("#!/bin/sh\nexec sleep 600\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	m.stopPods(ctx)
	m.powerOff(ctx)
	if ctx.Err() != nil {
		t.Error("the stop of the machine waits for runc")
	}
}

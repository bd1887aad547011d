package host

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/machineapi"
)

// PID 1 gets the limit of the host. With the limit 0, it is not asked: it would take a missing limit for its default.
func TestStopPods(t *testing.T) {
	for limit, want := range map[time.Duration][]string{0: nil, time.Minute: {"1m0s"}} {
		t.Run(limit.String(), func(t *testing.T) {
			h := recorded(t)
			h.config.StopPodsWithin = limit
			m := onDisk(t, h)
			bin := t.TempDir()
			h.runc = runc.Runc{Binary: filepath.Join(bin, "runc"), Root: filepath.Join(bin, "state")}
			for _, dir := range []string{filepath.Join(h.runc.Root, m.spec.Id), m.runDir()} {
				if err := os.MkdirAll(dir, 0o700); err != nil {
					t.Fatal(err)
				}
			}
			write(t, filepath.Join(h.runc.Root, m.spec.Id, "state.json"), "")
			script := fmt.Sprintf("#!/bin/sh\necho '{\"status\":\"running\",\"pid\":%d}'\n", os.Getpid())
			if err := os.WriteFile(h.runc.Binary, []byte(script), 0o700); err != nil {
				t.Fatal(err)
			}
			listener, err := net.Listen("unix", filepath.Join(m.runDir(), "init.sock"))
			if err != nil {
				t.Fatal(err)
			}
			var asked []string
			pid1 := &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				asked = append(asked, r.FormValue(machineapi.StopPodsWithin))
			})}
			defer func() { _ = pid1.Close() }()
			go func() { _ = pid1.Serve(listener) }()

			m.stopPods(t.Context())
			if !slices.Equal(asked, want) {
				t.Errorf("PID 1 was asked with the limits %q, want %q", asked, want)
			}
		})
	}
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

package host

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"os/exec"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/machineapi"
)

const (
	// stopMargin is the time beside the limit of the pods: for the kubelet to end, and the runtime to list and kill containers.
	stopMargin = 15 * time.Second
	// servicesStop bounds the orderly end of a machine after its pods. capstan-init takes less.
	servicesStop = 30 * time.Second
)

// StopMachines stops all machines in order, because the host shuts down: first the pods of all machines, then the machines. Call
// it after Wait. The machines start again with the next capstand.
func (h *Host) StopMachines(ctx context.Context) {
	// The pods can have more time to stop than fencing leaves to machines without contact. Other hosts are a contact until the end.
	contact, end := context.WithCancel(ctx)
	defer end()
	h.running.Go(func() { h.keepFenced(contact) })
	h.mu.Lock()
	all := make([]*machine, 0, len(h.machines.byID))
	for _, m := range h.machines.byID {
		all = append(all, m)
	}
	h.mu.Unlock()
	h.log.Info("The host shuts down: stopping its machines", "machines", len(all), "podsWithin", h.config.StopPodsWithin)
	for _, stop := range []func(*machine, context.Context){(*machine).stopPods, (*machine).powerOff} {
		var group sync.WaitGroup
		for _, m := range all {
			group.Go(func() { stop(m, ctx) })
		}
		group.Wait()
	}
}

// stopPods stops the pods of a running machine by their grace periods. It returns when none runs any more, when the machine has
// ended, or after the limit of the host. The end of capstand interrupts only the wait.
func (m *machine) stopPods(ctx context.Context) {
	limit := m.host.config.StopPodsWithin
	if limit == 0 {
		return
	}
	pid1, err := m.find(ctx)
	if err != nil || pid1 == nil {
		return
	}
	defer func() { _ = pid1.Close() }()
	m.setStatus(func(s *hostpb.MachineStatus) {
		s.Message = fmt.Sprintf("the pods of the machine stop, within %s", limit)
	})
	ctx, cancel := context.WithTimeout(ctx, limit+stopMargin)
	defer cancel()
	if err := askToStopPods(ctx, m.runDir(), limit); err != nil {
		m.log.Warn("The pods of the machine were not stopped in order", "error", err)
	}
}

// askToStopPods sends the request to PID 1 and waits for the answer. A capstan-init of an earlier version refuses it.
func askToStopPods(ctx context.Context, runDir string, limit time.Duration) error {
	client, end, err := initClient(runDir)
	if err != nil {
		return err
	}
	defer end()
	to := "http://init" + machineapi.StopPodsPath + "?" + url.Values{machineapi.StopPodsWithin: {limit.String()}}.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to, nil)
	if err != nil {
		return err
	}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("PID 1 answered %d, expected 200: its capstan-init may be older than capstand", res.StatusCode)
	}
	return nil
}

// powerOff ends PID 1 in order, with the services of the machine.
func (m *machine) powerOff(ctx context.Context) {
	pid1, err := m.find(ctx)
	if err != nil || pid1 == nil {
		return
	}
	defer func() { _ = pid1.Close() }()
	ctx, cancel := context.WithTimeout(ctx, servicesStop)
	defer cancel()
	if err = pid1.Signal(unix.SIGTERM); err == nil {
		err = pid1.Wait(ctx)
	}
	if err != nil {
		m.log.Warn("The machine did not stop in order", "error", err)
		return
	}
	m.log.Info("Machine stopped")
}

// ShutsDown returns whether the host is being shut down or rebooted. It is false on a host without systemd.
func ShutsDown(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	// The exit code is not 0 in this state.
	state, _ := exec.CommandContext(ctx, "systemctl", "is-system-running").Output()
	return strings.TrimSpace(string(state)) == "stopping"
}

package host

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
)

func TestAfterDeath(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	ago := func(ds ...time.Duration) (all []time.Time) {
		for _, d := range ds {
			all = append(all, now.Add(-d))
		}
		return all
	}
	var full []time.Duration
	for range restartBudget {
		full = append(full, time.Minute)
	}
	for name, test := range map[string]struct {
		deaths []time.Time
		delay  time.Duration
		usedUp bool
		counts int
	}{
		"the first: at once":         {nil, 0, false, 1},
		"the second: a second":       {ago(time.Minute), time.Second, false, 2},
		"the third: two":             {ago(time.Minute, time.Second), 2 * time.Second, false, 3},
		"old deaths do not count":    {ago(time.Hour, restartWindow), 0, false, 1},
		"nor those of a clock ahead": {ago(-time.Hour, -48*time.Hour), 0, false, 1},
		"pauses have an upper end":   {ago(full[:8]...), maxRestartDelay, false, 9},
		"the last one allowed":       {ago(full[:restartBudget-1]...), maxRestartDelay, false, restartBudget},
		"one more uses up":           {ago(full...), 0, true, restartBudget + 1},
		"not when they are old":      {append(ago(2*time.Hour), ago(full[:3]...)...), 4 * time.Second, false, 4},
	} {
		counted, delay, usedUp := afterDeath(test.deaths, now)
		if delay != test.delay || usedUp != test.usedUp || len(counted) != test.counts {
			t.Errorf("%s: got %s %v with %d deaths, want %s %v with %d", name, delay, usedUp, len(counted), test.delay, test.usedUp, test.counts)
		}
	}
}

func TestStillFailed(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	for name, test := range map[string]struct {
		failed    string
		restartAt time.Time
		want      time.Duration
	}{
		"it has not failed":           {"", time.Time{}, 0},
		"its disk is lost":            {"lost", time.Time{}, forever},
		"a while is left":             {"used up", now.Add(time.Minute), time.Minute},
		"the pause is over":           {"used up", now.Add(-time.Minute), 0},
		"the clock was set back":      {"used up", now.Add(48 * time.Hour), failedDelay},
		"the pause ends this instant": {"used up", now, 0},
	} {
		if got := stillFailed(test.failed, test.restartAt, now); got != test.want {
			t.Errorf("%s: got %s, want %s", name, got, test.want)
		}
	}
}

// A machine without remaining restarts pauses, also after a restart of capstand. It starts again after the pause.
// Rows ALL-16, IM-08.
func TestFailedMachineIsTriedAgain(t *testing.T) {
	h := recorded(t)
	m := onDisk(t, h)
	for range restartBudget + 1 {
		m.died()
	}
	run, pause := m.toRun()
	if run || pause <= restartWindow || pause > failedDelay || m.status.Phase != hostpb.MachineStatus_FAILED {
		t.Fatalf("run %v, pause %s, status %v", run, pause, m.status)
	}
	again := onDisk(t, h)
	if run, pause := again.toRun(); run || pause <= restartWindow {
		t.Fatalf("a new capstand: run %v, pause %s", run, pause)
	}
	again.state.RestartAt = time.Now().Add(-time.Second)
	if run, _ := again.toRun(); !run || again.status.Phase != hostpb.MachineStatus_RESTARTING {
		t.Fatalf("after the pause: run %v, status %v", run, again.status)
	}
	if last := onDisk(t, h).state; last.Failed != "" || len(last.Deaths) > 0 {
		t.Errorf("recorded: %+v", last)
	}
}

// StartMachine ends the pause of a machine. It refuses machines of other owners.
// Row ALL-16.
func TestStartMachine(t *testing.T) {
	h := recorded(t)
	m := onDisk(t, h)
	h.machines.byID[m.spec.Id] = m
	for range restartBudget + 1 {
		m.died()
	}
	m.toRun()
	req := &hostpb.StartMachineRequest{Id: m.spec.Id, Namespace: "thief", Name: m.spec.Name}
	if _, err := h.StartMachine(t.Context(), req); status.Code(err) != codes.AlreadyExists || m.state.Failed == "" {
		t.Fatalf("a machine of another owner: %v", err)
	}
	req.Namespace = m.spec.Namespace
	if _, err := h.StartMachine(t.Context(), req); err != nil || !rest(t.Context(), m.wake, forever) {
		t.Fatal(err)
	}
	if run, _ := m.toRun(); !run || len(onDisk(t, h).state.Deaths) > 0 {
		t.Errorf("the machine does not start: %+v", m.state)
	}
	m.setStatus(func(s *hostpb.MachineStatus) { s.Phase = hostpb.MachineStatus_RUNNING })
	if answer, err := h.StartMachine(t.Context(), req); err != nil || answer.Status.Phase != hostpb.MachineStatus_RUNNING || len(m.wake) > 0 {
		t.Errorf("a running machine: %v, %v", answer, err)
	}
}

// The removal of a machine or load balancer is repeated until it succeeds, or until capstand ends.
func TestRemoveFinally(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		attempts, shown, start := 0, 0, time.Now()
		remove := func(context.Context) error {
			if attempts++; attempts < 3 {
				return errors.New("busy")
			}
			return nil
		}
		if !removeFinally(ctx, remove, func(error) { shown++ }) || attempts != 3 || shown != 2 || time.Since(start) != 3*time.Second {
			t.Errorf("%d attempts and %d errors in %s", attempts, shown, time.Since(start))
		}
		attempts = 0
		if removeFinally(ctx, remove, func(error) { cancel() }) || attempts != 1 {
			t.Errorf("%d attempts although capstand ends", attempts)
		}
	})
}

//go:build e2e

package rack_test

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/rack"
)

const (
	managementCluster = "plane"
	stopAfter         = 6 * time.Second
)

// IM-02: a box stops its machines only if it reaches neither a manager nor another box of the cluster. The loss of the managers
// alone stops nothing, and neither does the loss of everything for a cluster on one box. A box whose capstand is dead or hangs
// stops them too. They start again when a manager confirms them, and not before, also after a restart.
func TestFencing(t *testing.T) {
	boxes, _ := newRack(t, 3, standIns(t))
	for _, b := range boxes {
		b.make()
		b.confirm()
		_, err := b.SetFencing(b.ctx(), &hostpb.SetFencingRequest{ManagementCluster: managementCluster, StopAfterSeconds: int32(stopAfter.Seconds())})
		expect.NoError(t, err)
	}
	boxes[0].Leave()
	remain(t, boxes...) // Each cluster is on one box, and no manager is connected.
	boxes[0].Join()
	setPeers(t, boxes[0], boxes[1], boxes[2]) // The time without a manager was long, and no box has reached another one yet.
	disconnect := watch(t, boxes...)
	remain(t, boxes...)
	disconnect()
	remain(t, boxes...) // They reach each other.

	first, hangs := boxes[0], boxes[1]
	since := time.Now()
	machine := first.pid1()
	first.Leave()
	first.stops(since, machine)
	remain(t, boxes[1:]...)
	for _, b := range boxes[1:] {
		b.noContact(first)
	}
	first.Join()
	first.waits()
	first.End(syscall.SIGKILL)
	first.Start()
	first.waits()
	first.Run("rm -rf /run/capstan/fencing") // As a reboot does.
	first.End(syscall.SIGKILL)
	first.Start()
	first.waits()
	first.confirm()
	rack.Eventually(t, "the confirmed machine", func() error { return first.reaches(first) })
	remain(t, boxes...)

	machine = hangs.pid1()
	since = time.Now()
	hangs.Signal(syscall.SIGSTOP)
	hangs.Leave()
	rack.Eventually(t, "the guard stops the machine", func() error { return ended(machine) })
	t.Logf("the guard of a box whose capstand hangs stopped the machine after %s", time.Since(since).Round(100*time.Millisecond))
	if took := time.Since(since); took < stopAfter-time.Second {
		t.Errorf("the machine stopped after %s", took)
	}
	hangs.Join()
	hangs.Signal(syscall.SIGCONT)
	hangs.waits()
	hangs.confirm()
	rack.Eventually(t, "the confirmed machine", func() error { return hangs.reaches(hangs) })

	third, since := boxes[2], time.Now()
	machine = third.pid1()
	third.End(syscall.SIGKILL)
	third.Leave()
	rack.Eventually(t, "the guard stops the machine", func() error { return ended(machine) })
	t.Logf("the guard of a box whose capstand is dead stopped the machine after %s", time.Since(since).Round(100*time.Millisecond))
	third.Join()
	third.Start()
	third.waits()
	for _, b := range boxes { // No fencing, no wait.
		_, err := b.SetFencing(b.ctx(), &hostpb.SetFencingRequest{ManagementCluster: managementCluster})
		expect.NoError(t, err)
		b.Leave()
	}
	remain(t, boxes[:2]...)
	for _, b := range boxes {
		b.Join()
	}
}

// confirm does what a manager does with a machine that it has an object of.
func (b *box) confirm() {
	b.t.Helper()
	m := b.machine()
	_, err := b.ClaimMachine(b.ctx(), &hostpb.ClaimMachineRequest{Id: m.Id, Namespace: m.Namespace, Name: m.Name, ManagementCluster: managementCluster})
	expect.NoError(b.t, err)
}

// watch connects a manager with the boxes, until the returned function is called.
func watch(t *testing.T, boxes ...*box) (disconnect func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	for _, b := range boxes {
		stream, err := b.Watch(ctx, &hostpb.WatchRequest{ManagementCluster: managementCluster})
		expect.NoError(t, err)
		_, err = stream.Recv()
		expect.NoError(t, err)
		go func() {
			for err == nil {
				_, err = stream.Recv()
			}
		}()
	}
	return cancel
}

// pid1 returns the PID 1 of the running machine.
func (b *box) pid1() proc.Ref {
	b.t.Helper()
	m, err := b.GetMachine(b.ctx(), &hostpb.GetMachineRequest{Id: b.machine().Id})
	expect.NoError(b.t, err)
	machine, err := proc.Find(int(m.Status.Pid))
	expect.NoError(b.t, err)
	return machine
}

// ended returns nil if the PID 1 of a machine has ended.
func ended(machine proc.Ref) error {
	if machine.Alive() {
		return errors.New("the machine runs")
	}
	return nil
}

// stopped returns nil if the box does not reach its machine.
func stopped(b *box) error {
	if b.reaches(b) == nil {
		return errors.New("the machine runs")
	}
	return nil
}

// stops expects that the machine ends in time. A busy box is slow.
func (b *box) stops(since time.Time, machine proc.Ref) {
	b.t.Helper()
	rack.Eventually(b.t, "the machine stops", func() error { return b.isFenced() })
	took := time.Since(since)
	b.t.Logf("the machine of a box without contact stopped after %s", took.Round(100*time.Millisecond))
	if took < stopAfter-time.Second || took > stopAfter+30*time.Second {
		b.t.Errorf("the machine stopped after %s, want %s", took, stopAfter)
	}
	if err := ended(machine); err != nil {
		b.t.Error(err)
	}
}

func (b *box) isFenced() error {
	m, err := b.GetMachine(b.ctx(), &hostpb.GetMachineRequest{Id: b.machine().Id})
	if err == nil && (m.Status.Phase != hostpb.MachineStatus_PENDING || !m.Status.Unconfirmed || !m.Status.Fenced) {
		err = fmt.Errorf("the machine is %v", m.Status)
	}
	return err
}

// waits expects that the machine does not start while the box reaches others.
func (b *box) waits() {
	b.t.Helper()
	rack.Eventually(b.t, "the stopped machine waits", b.isFenced)
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if err := errors.Join(b.isFenced(), stopped(b)); err != nil {
			b.t.Fatalf("box %d: %v", b.Number, err)
		}
	}
}

// remain expects that the machines run for longer than they may without contact.
func remain(t *testing.T, boxes ...*box) {
	t.Helper()
	for end := time.Now().Add(stopAfter + 5*time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		for _, b := range boxes {
			if b.reaches(b) == nil {
				continue
			}
			// One answer can be late on a busy box.
			if err := b.reaches(b); err != nil {
				t.Fatalf("box %d: %v", b.Number, err)
			}
		}
	}
}

// noContact expects that the box has a record of the other one without contact for the time.
func (b *box) noContact(other *box) {
	b.t.Helper()
	res, err := b.ListContacts(b.ctx(), &hostpb.ListContactsRequest{NetworkId: clusterID})
	expect.NoError(b.t, err)
	for _, c := range res.Contacts {
		if c.Host != other.Tunnel() {
			continue
		}
		if age := time.Duration(c.AgeMilliseconds) * time.Millisecond; age < stopAfter || !c.Peer || c.Reachable ||
			len(c.Fencing) != 1 || c.Fencing[0].StopAfterSeconds != int32(stopAfter.Seconds()) {
			b.t.Errorf("box %d has recorded %v of box %d", b.Number, c, other.Number)
		}
		return
	}
	b.t.Errorf("box %d has recorded %v", b.Number, res)
}

package connections

import (
	"errors"
	"reflect"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
)

// TestFreeMemory: a host reports a machine and its free memory in any order. No machine counts twice in any order, and an event
// reports each increase of free memory.
func TestFreeMemory(t *testing.T) {
	const gib = int64(1) << 30
	info := func(allocated int64) *hostpb.Event {
		return &hostpb.Event{Type: hostpb.Event_CHANGED, Object: &hostpb.Event_Host{
			Host: &hostpb.HostInfo{MemoryBytes: 10 * gib, AllocatedMemoryBytes: allocated},
		}}
	}
	machine := func(kind hostpb.Event_Type) *hostpb.Event {
		return &hostpb.Event{Type: kind, Object: &hostpb.Event_Machine{
			Machine: &hostpb.Machine{Spec: &hostpb.MachineSpec{Id: "a", MemoryBytes: 2 * gib}},
		}}
	}
	type step struct {
		do   func(h *Host)
		free int64 // GiB
		told bool
	}
	apply := func(e *hostpb.Event, free int64, told bool) step {
		return step{func(h *Host) { h.apply(e) }, free, told}
	}
	promise := step{func(h *Host) { h.Promise("a", Resources{Memory: 2 * gib}) }, 8, false}
	changed, deleted := hostpb.Event_CHANGED, hostpb.Event_DELETED
	grow := step{func(h *Host) { h.PromiseGrowth("a", 5*gib) }, 5, false}
	grown := machine(changed)
	grown.GetMachine().Spec.MemoryBytes = 5 * gib
	for name, steps := range map[string][]step{
		"the account comes before the machine": {promise, apply(info(2*gib), 8, true), apply(machine(changed), 8, false)},
		"the machine comes before the account": {promise, apply(machine(changed), 8, false), apply(info(2*gib), 8, true)},
		"the account is smaller before the machine has gone": {
			apply(machine(changed), 8, false), apply(info(2*gib), 8, true), apply(info(0), 8, true), apply(machine(deleted), 10, true),
		},
		"the machine has gone before the account is smaller": {
			apply(machine(changed), 8, false), apply(info(2*gib), 8, true), apply(machine(deleted), 8, false), apply(info(0), 10, true),
		},
		"a machine grows: the account comes before the machine": {
			apply(machine(changed), 8, false), apply(info(2*gib), 8, true), grow, apply(info(5*gib), 2, true), apply(grown, 5, true),
		},
		"a machine grows: the machine comes before the account": {
			apply(machine(changed), 8, false), apply(info(2*gib), 8, true), grow, apply(machine(changed), 5, false), apply(grown, 5, false), apply(info(5*gib), 5, true),
		},
		"a growth is taken back":                  {apply(machine(changed), 8, false), apply(info(2*gib), 8, true), grow, {func(h *Host) { h.Release("a") }, 8, true}},
		"a machine that grows is deleted":         {apply(machine(changed), 8, false), grow, apply(machine(deleted), 10, true)},
		"a machine that nobody has does not grow": {{func(h *Host) { h.PromiseGrowth("a", 5*gib) }, 10, false}},
		"a promise is taken back":                 {promise, {func(h *Host) { h.Release("a") }, 10, true}},
		"nobody is told before the host is connected": {
			{func(h *Host) { h.err = errors.New("connecting") }, 10, false}, apply(info(gib), 9, false), apply(info(0), 10, false),
		},
	} {
		t.Run(name, func(t *testing.T) {
			told := false
			h := &Host{
				info: &hostpb.HostInfo{MemoryBytes: 10 * gib}, machines: map[string]*hostpb.Machine{}, promised: map[string]Resources{},
				notify: func(e Event) { told = told || e.Capacity },
			}
			for i, s := range steps {
				told = false
				s.do(h)
				if free := h.FreeMemory() / gib; free != s.free || told != s.told {
					t.Errorf("step %d: %d GiB are free, told %t; want %d, %t", i, free, told, s.free, s.told)
				}
			}
		})
	}
}

// A host that becomes usable or unusable by its versions raises an event of its connection: machines in deletion wait for it.
func TestVersionsChangeConnection(t *testing.T) {
	var connection int
	h := &Host{notify: func(e Event) {
		if e.Connection {
			connection++
		}
	}}
	for i, step := range []struct {
		version int32
		events  int
	}{{0, 0}, {hostpb.ProtocolVersion, 0}, {hostpb.MaximumHostVersion + 1, 1}, {hostpb.MaximumHostVersion + 2, 0}, {hostpb.ProtocolVersion, 1}} {
		connection = 0
		h.apply(&hostpb.Event{Type: hostpb.Event_CHANGED, Object: &hostpb.Event_Host{Host: &hostpb.HostInfo{ProtocolVersion: step.version}}})
		if connection != step.events {
			t.Errorf("step %d: %d events, want %d", i, connection, step.events)
		}
	}
}

// The processors and disks of machines count once, whether the host has reported the machine or not. A machine without a limit of
// processors has all of them.
func TestFreeResources(t *testing.T) {
	const gib = int64(1) << 30
	spec := func(id string, cpus int32, disk int64) *hostpb.Machine {
		return &hostpb.Machine{Spec: &hostpb.MachineSpec{Id: id, Cpus: cpus, DiskBytes: disk, MemoryBytes: gib}}
	}
	withGPU := func(m *hostpb.Machine) *hostpb.Machine {
		m.Spec.Devices = []*hostpb.MachineDevice{{Name: "example.com/gpu", Count: 1}, {Name: "/dev/kvm", Count: 1}}
		return m
	}
	h := &Host{
		info: &hostpb.HostInfo{Cpus: 8, MemoryBytes: 10 * gib, DiskBytes: 100 * gib, Devices: []*hostpb.DeviceKind{{Name: "example.com/gpu", Count: 4, Allocated: 1}}},
		promised: map[string]Resources{
			"a": {CPUs: 2, Memory: 3 * gib, Disk: 20 * gib, Devices: map[string]int32{"example.com/gpu": 1}},
			"c": {CPUs: 1, Memory: 2 * gib, Disk: 80 * gib, Devices: map[string]int32{"example.com/gpu": 2}},
		},
	}
	h.keepAll(withGPU(spec("a", 2, 20*gib)), spec("b", 0, 10*gib))
	if got, want := h.Free(), (Resources{CPUs: 8 - 2 - 8 - 1, Memory: (10 - 3 - 1 - 2) * gib, Disk: -10 * gib, Devices: map[string]int32{"example.com/gpu": 1}}); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// An event reports free devices also if no memory became free, because the host counts more memory than its machines have.
func TestFreedDevices(t *testing.T) {
	const gib = int64(1) << 30
	device := []*hostpb.MachineDevice{{Name: "example.com/gpu", Count: 1}}
	gone := &hostpb.Event{Type: hostpb.Event_DELETED, Object: &hostpb.Event_Machine{Machine: &hostpb.Machine{Spec: &hostpb.MachineSpec{Id: "a"}}}}
	for name, tc := range map[string]struct {
		machines []*hostpb.Machine
		promised map[string]Resources
		do       func(*Host)
		told     bool
	}{
		"a promise with a device is taken back": {
			nil, map[string]Resources{"a": {Memory: gib, Devices: map[string]int32{"example.com/gpu": 1}}}, func(h *Host) { h.Release("a") }, true,
		},
		"a promise without a device is taken back": {nil, map[string]Resources{"a": {Memory: gib}}, func(h *Host) { h.Release("a") }, false},
		"a promise for a machine with the device is taken back": {
			[]*hostpb.Machine{{Spec: &hostpb.MachineSpec{Id: "a", MemoryBytes: gib, Devices: device}}},
			map[string]Resources{"a": {Memory: gib, Devices: map[string]int32{"example.com/gpu": 1}}}, func(h *Host) { h.Release("a") }, false,
		},
		"a machine with a device is deleted": {
			[]*hostpb.Machine{{Spec: &hostpb.MachineSpec{Id: "a", MemoryBytes: gib, Devices: device}}}, nil, func(h *Host) { h.apply(gone) }, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			told := false
			h := &Host{
				info: &hostpb.HostInfo{
					MemoryBytes: 10 * gib, AllocatedMemoryBytes: 5 * gib, Devices: []*hostpb.DeviceKind{{Name: "example.com/gpu", Count: 1}},
				},
				promised: tc.promised, notify: func(e Event) { told = told || e.Capacity },
			}
			h.keepAll(tc.machines...)
			tc.do(h)
			if told != tc.told {
				t.Errorf("told %t, want %t", told, tc.told)
			}
		})
	}
}

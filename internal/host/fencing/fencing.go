// Package fencing measures for how long a host has reached neither a manager nor another host of a network. After a time that the
// manager of a management cluster sets, the host stops the machines of this management cluster in such a network. Losing the
// managers alone never stops a machine, and neither does a loss in a network that is on one host only.
//
// All times are of package boottime.
//
// A guard process stops the machines when capstand does not run or hangs: see Guard.
//
// Layer: host. Allowed imports: api, library, contract.
package fencing

import (
	"maps"
	"slices"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/host/proc"
)

// maxStopAfter is the longest time without contact that can be set.
const maxStopAfter = time.Hour

// Settings are the seconds without contact after which machines stop, by management cluster.
type Settings map[string]int32

// Lease is the time until which a machine may run.
type Lease struct {
	Machine  string        `json:"machine"`
	Deadline time.Duration `json:"deadline"`
}

// Probed is the last probe of another host that this host has answered.
type Probed struct {
	At       time.Duration `json:"at"`
	Settings Settings      `json:"settings,omitempty"`
}

// Memory is the part of the state that lasts until the host reboots.
type Memory struct {
	Boot string `json:"boot"`
	// Since is the start of the records.
	Since time.Duration `json:"since"`
	// Managers are the last contacts with managers, by management cluster.
	Managers map[string]time.Duration `json:"managers"`
	// Reached are the last contacts with any other host, by network. A contact is the time at which an answered probe was sent, or
	// at which a manager has set the other hosts.
	Reached map[string]time.Duration `json:"reached"`
	// Probed are the probes of other hosts, by network and tunnel address.
	Probed map[string]map[string]Probed `json:"probed"`
	// Leases are those that the guard enforces.
	Leases []Lease `json:"leases"`
	// Root is the folder of capstand's state, and Cgroup the group that contains the groups of the machines.
	Root   string `json:"root"`
	Cgroup string `json:"cgroup"`
}

// ReadMemory returns the memory of this boot. fresh is true if this boot has no memory yet.
func ReadMemory(path string) (m Memory, fresh bool) {
	boot := proc.BootID()
	if err := atomicfile.ReadJSON(path, &m); err != nil || m.Boot != boot {
		m, fresh = Memory{Boot: boot, Since: boottime.Now()}, true
	}
	if m.Managers == nil {
		m.Managers = map[string]time.Duration{}
	}
	if m.Reached == nil {
		m.Reached = map[string]time.Duration{}
	}
	if m.Probed == nil {
		m.Probed = map[string]map[string]Probed{}
	}
	return m, fresh
}

// expiresAt is the time until which machines may run that stop after a time without contact; 0 if there was no contact.
func expiresAt(stopAfter, manager, host time.Duration) time.Duration {
	if last := max(manager, host); last > 0 {
		return last + stopAfter
	}
	return 0
}

// Expired returns the machines that must stop now.
func Expired(leases []Lease, now time.Duration) (out []string) {
	for _, l := range leases {
		if now >= l.Deadline {
			out = append(out, l.Machine)
		}
	}
	return out
}

// probedLife is for how long the probe of a host is remembered that is not in the network any more. It is longer than
// maxStopAfter and every margin.
const probedLife = 2 * time.Hour

// forget removes old probes of hosts that are not peers of the network any more.
func (m *Memory) forget(now time.Duration, peers map[string][]string) {
	for network, hosts := range m.Probed {
		maps.DeleteFunc(hosts, func(host string, p Probed) bool {
			return now-p.At > probedLife && !slices.Contains(peers[network], host)
		})
		if len(hosts) == 0 {
			delete(m.Probed, network)
		}
	}
	maps.DeleteFunc(m.Reached, func(network string, at time.Duration) bool { return now-at > probedLife && peers[network] == nil })
}

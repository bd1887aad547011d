package fencing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/host/proc"
)

// Network is a cluster's network that other hosts have too.
type Network struct {
	ID string
	// Own is the address of this host in the overlay.
	Own netip.Addr
	// Hosts are the tunnel addresses of the other hosts, by their addresses in the overlay.
	Hosts map[netip.Addr]netip.Addr
}

// Machine is a machine that the host may have to stop.
type Machine struct{ ID, Network, ManagementCluster string }

// Fence has the settings and the contacts of a host.
type Fence struct {
	log *slog.Logger
	// settings is the path of the settings, path that of the memory.
	settingsPath, path string
	marks              Marks
	// setting is held while the settings change. It is taken before mu, which is never held during a write to a disk.
	setting sync.Mutex

	mu       sync.Mutex
	settings Settings
	memory   Memory
	// watching counts the connected managers, by management cluster.
	watching map[string]int
	hosts    map[string]int // number of other hosts by network
	probers  map[string]*prober
	failed   map[string]string // why there is no prober, by network
	// saved: the last write of the memory succeeded.
	saved bool
	guard *proc.Ref
}

// Open reads the settings, from a file that outlives the boot, and the memory.
func Open(settings, memory, root, cgroup string, log *slog.Logger) (*Fence, error) {
	f := &Fence{
		log: log, settingsPath: settings, path: memory, marks: marks(root, memory), settings: Settings{}, saved: true,
		watching: map[string]int{}, hosts: map[string]int{}, probers: map[string]*prober{}, failed: map[string]string{},
	}
	if err := atomicfile.ReadJSON(settings, &f.settings); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("fencing: %w. Repair the file, or remove it so that no machine is ever stopped", err)
	}
	if err := os.MkdirAll(filepath.Dir(memory), 0o700); err != nil {
		return nil, err
	}
	f.memory, _ = ReadMemory(memory)
	f.memory.Root, f.memory.Cgroup = root, cgroup
	return f, nil
}

// Set changes the setting of a management cluster and records it; 0 seconds end the fencing. It returns whether it has changed.
func (f *Fence) Set(managementCluster string, seconds int32) (changed bool, err error) {
	f.contact(managementCluster)
	f.setting.Lock()
	defer f.setting.Unlock()
	next := f.Settings()
	if next[managementCluster] == seconds {
		return false, nil
	}
	next[managementCluster] = seconds
	if seconds == 0 {
		delete(next, managementCluster)
	}
	if err := atomicfile.WriteJSON(f.settingsPath, next, 0o600); err != nil {
		return false, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.settings = next
	return true, nil
}

// contact records that a manager calls now.
func (f *Fence) contact(managementCluster string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.memory.Managers[managementCluster] = boottime.Now()
}

// Stop stops a machine until a manager confirms it. kill ends its processes. unmarked is an error of the record: a capstand that starts can
// start the machine again.
func (f *Fence) Stop(ctx context.Context, machine string, kill func(context.Context) error) (unmarked, alive error) {
	return f.marks.stop(ctx, machine, kill)
}

// Marked returns whether fencing has stopped a machine that no manager has confirmed since.
func (f *Fence) Marked(machine string) bool { return f != nil && f.marks.marked(machine) }

// Unmark records that a manager has confirmed the machine, or that it is gone.
func (f *Fence) Unmark(machine string) error {
	if f == nil {
		return nil
	}
	return f.marks.unmark(machine)
}

// Settings returns the settings.
func (f *Fence) Settings() Settings {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.settings)
}

// Connected records that a manager of a management cluster is connected, until the returned function is called.
func (f *Fence) Connected(managementCluster string) (end func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watching[managementCluster]++
	f.memory.Managers[managementCluster] = boottime.Now()
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.watching[managementCluster]--
		f.memory.Managers[managementCluster] = boottime.Now()
	}
}

// Watched reports whether a manager is connected.
func (f *Fence) Watched() bool {
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, managers := range f.watching {
		if managers > 0 {
			return true
		}
	}
	return false
}

// Deadline returns the time until which a machine may run; ok is false if it is never stopped.
func (f *Fence) Deadline(m Machine) (deadline time.Duration, ok bool) {
	if f == nil {
		return 0, false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.deadline(m)
}

func (f *Fence) deadline(m Machine) (time.Duration, bool) {
	seconds := f.settings[m.ManagementCluster]
	if seconds == 0 || f.hosts[m.Network] == 0 {
		return 0, false
	}
	manager := f.memory.Managers[m.ManagementCluster]
	if f.watching[m.ManagementCluster] > 0 {
		manager = boottime.Now()
	}
	return expiresAt(time.Duration(seconds)*time.Second, manager, f.memory.Reached[m.Network]), true
}

// Begin records that a manager has just set the other hosts of a network. Without this contact, the machines of a network that was
// on one host only could stop at once.
func (f *Fence) Begin(network string) {
	if f != nil {
		f.reached(network, boottime.Now())
	}
}

// Any returns a management cluster that has a setting, or "".
func (f *Fence) Any() string {
	for _, id := range slices.Sorted(maps.Keys(f.Settings())) {
		return id
	}
	return ""
}

// StopAfter is the setting of a management cluster.
func (f *Fence) StopAfter(managementCluster string) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return time.Duration(f.settings[managementCluster]) * time.Second
}

// SetNetworks replaces the networks that other hosts have too.
func (f *Fence) SetNetworks(networks []Network) {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.hosts)
	keep := map[string]bool{}
	for _, n := range networks {
		f.hosts[n.ID], keep[n.ID] = len(n.Hosts), true
		f.listen(n)
	}
	for id, p := range f.probers {
		if !keep[id] {
			p.close()
			delete(f.probers, id)
		}
	}
}

// listen keeps the socket of a network open. While another capstand of the box has the port, this one sends its probes from another port,
// and that one answers the other hosts.
func (f *Fence) listen(n Network) {
	p := f.probers[n.ID]
	if p == nil || !p.answers() {
		p = f.open(n, p)
	}
	if p == nil {
		return
	}
	f.probers[n.ID] = p
	p.setHosts(n.Hosts)
}

// open returns a prober that answers in place of old, which does not and may be nil. If that is impossible, it returns old, or a new prober
// that does not answer; nil if there can be none.
func (f *Fence) open(n Network, old *prober) *prober {
	probed := func(host netip.Addr, s Settings) bool { return f.probed(n.ID, host, s) }
	reached := func(sent time.Duration) { f.reached(n.ID, sent) }
	p, err := newProber(netip.AddrPortFrom(n.Own, Port), probed, reached)
	if err == nil {
		delete(f.failed, n.ID)
		if old != nil {
			old.close()
		}
		return p
	}
	if why := err.Error(); f.failed[n.ID] != why {
		f.failed[n.ID] = why
		f.log.Warn("Cannot answer the probes of other hosts; another capstand of the box does if it has the port", "network", n.ID, "error", err)
	}
	if old == nil {
		old, _ = newProber(netip.AddrPortFrom(n.Own, 0), nil, reached)
	}
	return old
}

// probed records the probe of another host. It returns false if the record may be lost: then the host gets no answer.
func (f *Fence) probed(network string, host netip.Addr, s Settings) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.saved {
		return false
	}
	if f.memory.Probed[network] == nil {
		f.memory.Probed[network] = map[string]Probed{}
	}
	before := f.memory.Probed[network][host.String()]
	if len(s) == 0 {
		s = before.Settings // Only Reachable announces nothing.
	}
	f.memory.Probed[network][host.String()] = Probed{At: boottime.Now(), Settings: s}
	return true
}

func (f *Fence) reached(network string, sent time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.memory.Reached[network] = max(f.memory.Reached[network], sent)
}

// Step sends probes, renews the leases of the machines, and returns the machines that must stop.
func (f *Fence) Step(machines []Machine) (expired []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := boottime.Now()
	for id, n := range f.watching {
		if n > 0 {
			f.memory.Managers[id] = now
		}
	}
	f.memory.Leases = nil
	announced := map[string]Settings{}
	for _, m := range machines {
		deadline, ok := f.deadline(m)
		if !ok {
			continue
		}
		seconds := f.settings[m.ManagementCluster]
		if deadline == 0 {
			// No contact in this boot. The machine does not start before the first one.
			deadline = f.memory.Since + time.Duration(seconds)*time.Second
		}
		f.memory.Leases = append(f.memory.Leases, Lease{Machine: m.ID, Deadline: deadline})
		if announced[m.Network] == nil {
			announced[m.Network] = Settings{}
		}
		announced[m.Network][m.ManagementCluster] = seconds
	}
	for network, s := range announced {
		if p := f.probers[network]; p != nil {
			p.probe(s)
		}
	}
	f.save(now)
	return Expired(f.memory.Leases, now)
}

// save writes the memory, unless it is empty and was never written.
func (f *Fence) save(now time.Duration) {
	peers := map[string][]string{}
	for id, p := range f.probers {
		peers[id] = []string{}
		for _, tunnel := range p.hosts {
			peers[id] = append(peers[id], tunnel.String())
		}
	}
	f.memory.forget(now, peers)
	if len(f.memory.Leases)+len(f.memory.Probed) == 0 && !atomicfile.Exists(f.path) {
		return
	}
	err := f.record()
	if err != nil && f.saved {
		f.log.Error("Cannot record the contacts with other hosts: their probes are not answered", "error", err)
	}
	f.saved = err == nil
}

// record writes the memory. Without room for a second file, it writes into the place of the present one: the guard reads the deadlines only
// from the file. A guard that reads a part of it ends, and KeepGuard starts another one.
func (f *Fence) record() error {
	data, err := json.Marshal(f.memory)
	if err != nil {
		return err
	}
	if err = atomicfile.WriteFile(f.path, data, 0o600); err == nil || !atomicfile.Exists(f.path) {
		return err
	}
	if inPlace := atomicfile.Overwrite(f.path, data, 0o600); inPlace != nil {
		return errors.Join(err, inPlace)
	}
	return nil
}

// KeepGuard starts the guard if there are leases and none runs, or one of another version of capstand. logging contains the flags of its
// logs.
func (f *Fence) KeepGuard(logging []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.memory.Leases) == 0 {
		return
	}
	if f.guard == nil {
		ref := &proc.Ref{}
		if atomicfile.ReadJSON(f.path+".guard", ref) == nil {
			f.guard = ref
		}
	}
	old := f.guard
	if old != nil && old.Alive() && !old.Outdated() {
		return
	}
	if err := f.startGuard(logging); err != nil {
		f.log.Error("Cannot start the guard, which stops machines when capstand does not run", "error", err)
	}
	if old == nil || f.guard == old { // Without a new guard, the old one continues.
		return
	}
	if process, err := old.Open(); err == nil {
		f.log.Info("Guard replaced", "pid", f.guard.PID, "oldPID", old.PID)
		_, _ = process.Signal(unix.SIGKILL), process.Close()
	}
}

// GuardLog is the path of the guard's log.
func (f *Fence) GuardLog() string { return f.path + ".log" }

func (f *Fence) startGuard(logging []string) error {
	cmd := exec.Command("/proc/self/exe", append([]string{"guard", "--memory", f.path}, logging...)...)
	cmd.Args[0], cmd.Dir = "capstand", "/"
	log, err := os.OpenFile(f.GuardLog(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	ref, err := proc.Start(cmd)
	if err != nil {
		return err
	}
	f.guard = &ref
	return atomicfile.WriteJSON(f.path+".guard", ref, 0o600)
}

// Contact is the last probe of another host.
type Contact struct {
	Host     string
	Age      time.Duration
	Settings Settings
	Peer     bool
	// Own and Address are the addresses of this host and of the other one in the overlay, if it is a peer.
	Own, Address netip.Addr
}

// Contacts returns the contacts of a network, and for how long this host has recorded them.
func (f *Fence) Contacts(network string, n *Network) (out []Contact, recorded time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := boottime.Now()
	all := map[string]Contact{}
	for host, p := range f.memory.Probed[network] {
		all[host] = Contact{Host: host, Age: now - p.At, Settings: maps.Clone(p.Settings)}
	}
	if n != nil {
		for address, tunnel := range n.Hosts {
			c := all[tunnel.String()]
			if c.Host == "" {
				c = Contact{Host: tunnel.String(), Age: now - f.memory.Since}
			}
			c.Peer, c.Own, c.Address = true, n.Own, address
			all[c.Host] = c
		}
	}
	for _, host := range slices.Sorted(maps.Keys(all)) {
		out = append(out, all[host])
	}
	return out, now - f.memory.Since
}

// Close ends the probes. Machines, the memory and the guard stay.
func (f *Fence) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, p := range f.probers {
		p.close()
		delete(f.probers, id)
	}
}

package host

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/foreignfile"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/machineapi"
)

const (
	// virtualPause is the time between two looks at the files of machines.
	virtualPause = 200 * time.Millisecond
	// refresh is the time between two offers, between two extensions of a term without an election, and between two
	// announcements after a take-over.
	refresh = time.Second
	// announceAgain is the time between two announcements of an address that the host keeps.
	announceAgain = 30 * time.Second
	// announceOften is the time after a take-over during which the host announces the address often: a packet can be lost.
	announceOften = 5 * time.Second
)

// virtualAddress gives the host the virtual address of a load balancer while it may have it.
type virtualAddress struct {
	lb      *loadBalancer
	address netip.Addr
	// probe receives the result of the running probe; nil if none runs.
	probe chan error
	// until is the end of the term, and expires the time at which the kernel removes the address.
	until, expires time.Duration
	// refreshed is the time of the last refresh, taken that of the take-over, and announced that of the last announcement; 0 if
	// none.
	refreshed, taken, announced time.Duration
}

// holdVirtualAddresses manages the virtual addresses of all load balancers until ctx ends. The kernel removes an address when
// capstand does not extend its lifetime.
func (h *Host) holdVirtualAddresses(ctx context.Context) {
	ticker := time.NewTicker(virtualPause)
	defer ticker.Stop()
	held := map[string]*virtualAddress{}
	var wanted map[string]candidate
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		wanted = h.candidates(wanted)
		for id, v := range held {
			if lb := wanted[id].lb; lb != v.lb || v.address.String() != lb.currentSpec().VirtualAddress.GetAddress() {
				v.end(nil)
				delete(held, id)
			}
		}
		for id, c := range wanted {
			if held[id] == nil {
				address, _ := netip.ParseAddr(c.lb.currentSpec().VirtualAddress.GetAddress()) // admission.CheckLoadBalancer has checked it.
				held[id] = &virtualAddress{lb: c.lb, address: address}
			}
			held[id].step(ctx, c.electors, c.lan)
		}
	}
}

// candidate is a load balancer with a virtual address.
type candidate struct {
	lb *loadBalancer
	// electors are the folders that the host shares with the control plane machines of the network.
	electors []string
	// lan is that of the network, or nil.
	lan *network.LAN
}

// candidates returns the load balancers with a virtual address, by id. last are those of the last look: while a change of the host holds mu
// and waits for its disk, they remain, because the host would lose an address whose lifetime it does not extend.
func (h *Host) candidates(last map[string]candidate) map[string]candidate {
	if h.mu.TryLock() {
		defer h.mu.Unlock()
		last = map[string]candidate{}
		for id, lb := range h.balancers.byID {
			if lb.spec.VirtualAddress != nil {
				last[id] = candidate{lb, h.electors(lb.spec.NetworkId), h.networks.lan(lb.spec)}
			}
		}
	}
	maps.DeleteFunc(last, func(_ string, c candidate) bool { return c.lb.deleted.Err() != nil })
	return last
}

// electors returns the folders that the host shares with the control plane machines of a network; mu is held.
func (h *Host) electors(networkID string) (dirs []string) {
	for _, m := range h.machines.byID {
		if m.spec.ControlPlane && m.spec.Network.Id == networkID {
			dirs = append(dirs, m.runDir())
		}
	}
	return dirs
}

// step gives the host the address, or takes it away. Only the station of lan can have the address, unless it is nil.
func (v *virtualAddress) step(ctx context.Context, electors []string, lan *network.LAN) {
	now := boottime.Now()
	link, err := network.VirtualLink(v.address)
	if err == nil && lan != nil && !lan.HasStation(link) {
		err = fmt.Errorf("the virtual address %s is in the network of %s of this host: expected %s of the LAN; give it an address in the network of the LAN", v.address, link.Attrs().Name, lan.Station())
	}
	if err != nil {
		v.end(err)
		return
	}
	v.renew(now, electors)
	switch {
	case ended(now, v.until, v.expires):
		v.end(nil)
	case lifetime(now, v.until, v.expires) == 0:
	case v.taken != 0:
		v.report(v.hold(link))
	default:
		if free, err := v.free(ctx, link); free {
			v.report(v.hold(link))
		} else if err != nil {
			v.report(err)
		}
	}
}

// renew sets the end of the term.
func (v *virtualAddress) renew(now time.Duration, electors []string) {
	due := now-v.refreshed >= refresh
	if due {
		v.refreshed = now
	}
	switch {
	case v.lb.currentSpec().VirtualAddress.GetFirst():
		if due {
			v.until = now + machineapi.EndpointLease
		}
	case v.lb.hasHealthyBackend():
		if due {
			v.offer(electors, now+machineapi.EndpointLease)
		}
		v.until = termOf(electors, now)
	default:
		v.until = 0
	}
}

// lifetime returns the lifetime that the kernel has to give the address for a term: the rest of the term in whole seconds, which
// are the kernel's unit. It is rounded down, so that the address is gone before another host can have it. The result is 0 if the
// kernel keeps the address longer already, until expires.
func lifetime(now, until, expires time.Duration) time.Duration {
	if life := (until - now).Truncate(time.Second); now+life > expires {
		return max(0, life)
	}
	return 0
}

// ended reports whether the host must not have the address, or has lost it: the kernel has removed it at expires, which is 0 before
// the take-over.
func ended(now, until, expires time.Duration) bool {
	return until <= now || expires != 0 && expires <= now
}

// free reports whether no other station has the address. The answer needs several calls, because a probe takes longer than the
// lifetimes of other addresses allow. The probe before each take-over finds a station that took the address meanwhile, and a
// previous holder that hangs.
func (v *virtualAddress) free(ctx context.Context, link netlink.Link) (bool, error) {
	if v.probe == nil {
		// After a restart of capstand, the host still has the address.
		if has, err := network.HasAddress(v.address); has || err != nil {
			return has, err
		}
		v.probe = make(chan error, 1)
		go func(result chan<- error) { result <- network.ProbeVirtual(ctx, link, v.address) }(v.probe)
	}
	select {
	case err := <-v.probe:
		v.probe = nil
		return err == nil, err
	default:
		return false, nil
	}
}

// hold extends the lifetime of the address, and announces it. It reads the clock again, because the process may have been stopped.
func (v *virtualAddress) hold(link netlink.Link) error {
	now := boottime.Now()
	life := lifetime(now, v.until, v.expires)
	if life == 0 {
		return nil
	}
	if err := network.HoldVirtual(link, v.address, life); err != nil {
		return err
	}
	v.expires = now + life
	pause := announceAgain
	if v.taken == 0 {
		v.taken, v.announced = now, 0
		v.lb.log.Info("The host has the virtual address", "address", v.address, "link", link.Attrs().Name)
	}
	if now-v.taken <= announceOften {
		pause = refresh
	}
	if now-v.announced < pause {
		return nil
	}
	v.announced = now
	return network.AnnounceVirtual(link, v.address)
}

// end gives up the address and the probe for it.
func (v *virtualAddress) end(err error) {
	v.probe = nil
	v.release()
	v.report(err)
}

// release takes the address from the host.
func (v *virtualAddress) release() {
	if v.taken == 0 {
		return
	}
	v.taken, v.expires = 0, 0
	v.lb.log.Info("The host gives up the virtual address", "address", v.address)
	if err := network.ReleaseVirtual(v.address); err != nil {
		v.lb.log.Error("Cannot remove the virtual address; the kernel removes it within seconds", "address", v.address, "error", err)
	}
}

// report shows the state to watchers.
func (v *virtualAddress) report(err error) {
	v.lb.change(func() {
		v.lb.holds, v.lb.virtualMessage = v.taken != 0, ""
		if err != nil {
			v.lb.virtualMessage = err.Error()
		}
	})
}

// offer lets the machines of this host take part in the election until a time.
func (v *virtualAddress) offer(electors []string, until time.Duration) {
	for _, dir := range electors {
		if err := writeOffer(dir, until); atomicfile.IgnoreMissing(err) != nil { // A machine that has not started has no folder.
			v.lb.log.Error("Cannot offer the host to a control plane machine", "error", err)
		}
	}
}

// writeOffer replaces the offer in the folder that capstand and a machine share.
func writeOffer(dir string, until time.Duration) error {
	data, err := json.Marshal(machineapi.EndpointTerm{Until: until})
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return foreignfile.Replace(root, machineapi.EndpointOfferFile, data, 0o600)
}

// termOf returns the latest term of the machines, which does not exceed a whole Lease from now.
func termOf(electors []string, now time.Duration) (until time.Duration) {
	for _, dir := range electors {
		if term, err := readTerm(dir); err == nil {
			until = max(until, term)
		}
	}
	return min(until, now+machineapi.EndpointLease)
}

// maxTerm is the size of the largest file with a term, in bytes.
const maxTerm = 4096

// readTerm reads the file of a machine.
func readTerm(dir string) (time.Duration, error) {
	var term machineapi.EndpointTerm
	err := foreignfile.ReadJSON(dir, machineapi.EndpointLeaseFile, maxTerm, &term)
	return term.Until, err
}

// hasHealthyBackend returns whether the load balancer has an API server to which it can lead clients.
func (lb *loadBalancer) hasHealthyBackend() bool {
	lb.mu.Lock()
	defer lb.mu.Unlock()
	return len(lb.status.Healthy) > 0 && len(lb.status.Listening) > 0
}

// fillVirtualAddress sets the outputs about the virtual address; lb.mu is held.
func (lb *loadBalancer) fillVirtualAddress(out *hostpb.LoadBalancer) {
	if out.VirtualAddress == nil {
		return
	}
	out.VirtualAddress.Held = lb.holds
	if out.Message == "" {
		out.Message = lb.virtualMessage
	}
}

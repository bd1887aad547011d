package host

import (
	"context"
	"net/netip"
	"time"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
)

// ensureNetwork creates the missing parts of the machine's network. After a reboot, that is all of it.
func (m *machine) ensureNetwork(ctx context.Context) error {
	n := m.spec.Network
	if err := m.host.box.Ensure(ctx, boxNetwork(n)); err != nil {
		return err
	}
	if err := m.host.renewLease(m.spec); err != nil {
		return err
	}
	if err := m.restorePeers(); err != nil {
		m.log.Error("The machines on other hosts were not restored: the owner of the network sets them again", "error", err)
	}
	return m.host.box.Plug(n.Id, m.spec.Id, addresses(m.spec))
}

// restorePeers restores the peers of the network if it could not be repaired when capstand started.
func (m *machine) restorePeers() error {
	m.host.mu.Lock()
	defer m.host.mu.Unlock()
	return m.host.restorePeers(m.spec.Network)
}

// addresses converts the machine's addresses for package network.
func addresses(spec *hostpb.MachineSpec) []network.Address {
	var all []network.Address
	for _, a := range admission.Normalized(spec).Addresses {
		addr, _ := netip.ParseAddr(a.Address)
		gateway, _ := netip.ParseAddr(a.Gateway)
		all = append(all, network.Address{Prefix: netip.PrefixFrom(addr, int(a.Prefix)), Gateway: gateway})
	}
	return all
}

// keepConnected restores the machine's network when another program on the box has removed its cable or its bridge.
func (m *machine) keepConnected(ctx context.Context) {
	for range network.LostLinks(ctx, m.log, boxNetwork(m.spec.Network).Bridge(), m.spec.Id) {
		for attempt := 0; ctx.Err() == nil; attempt++ {
			err := m.ensureNetwork(ctx)
			if err == nil {
				m.log.Warn("Another program on this host removed a network link of the machine; capstand restored it")
				break
			}
			m.log.Error("Cannot restore the network of the machine", "error", err)
			rest(ctx, nil, pauseAfter(attempt))
		}
		rest(ctx, nil, time.Second) // The pause limits the load if the other program removes the link again at once.
	}
}

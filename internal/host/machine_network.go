package host

import (
	"context"
	"net/netip"
	"time"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
)

// ensureNetwork makes the machine's network again, after a reboot all of it.
func (m *machine) ensureNetwork(ctx context.Context) error {
	n := m.spec.Network
	if err := m.host.box.Ensure(ctx, boxNetwork(n)); err != nil {
		return err
	}
	if err := m.host.renewLease(m.spec); err != nil {
		return err
	}
	return m.host.box.Plug(n.Id, m.spec.Id, addresses(m.spec))
}

// addresses as package network wants them.
func addresses(spec *hostpb.MachineSpec) []network.Address {
	var all []network.Address
	for _, a := range admission.Normalized(spec).Addresses {
		addr, _ := netip.ParseAddr(a.Address)
		gateway, _ := netip.ParseAddr(a.Gateway)
		all = append(all, network.Address{Prefix: netip.PrefixFrom(addr, int(a.Prefix)), Gateway: gateway})
	}
	return all
}

// keepConnected makes the machine's network again whenever something else on the box has removed its cable or its bridge.
func (m *machine) keepConnected(ctx context.Context) {
	for range network.LostLinks(ctx, m.log, m.spec.Network.Id, m.spec.Id) {
		for attempt := 0; ctx.Err() == nil; attempt++ {
			err := m.ensureNetwork(ctx)
			if err == nil {
				m.log.Warn("something on this host removed a link of the machine; it is back")
				break
			}
			m.log.Error("network", "error", err)
			rest(ctx, nil, pauseAfter(attempt))
		}
		rest(ctx, nil, time.Second) // something that removes it again at once does not keep the box busy
	}
}

package host

import (
	"context"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"capstan.dev/capstan/internal/host/conformance"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// A host that loses the tunnel address of a network, or its MTU, reports it. The networks of one address are one problem.
func TestTunnelProblems(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	h := recorded(t)
	h.box = network.Box{Dir: t.TempDir()}
	networkWith := func(mtu int32) *hostpb.Network {
		return &hostpb.Network{Overlay: &hostpb.Overlay{Vni: uint32(mtu), Address: conformance.TunnelAddress, Mtu: mtu}}
	}
	overlays := []*hostpb.Network{networkWith(1400), networkWith(8950)}
	expect := func(when, want string) {
		t.Helper()
		problems, err := h.networks.tunnelProblems(overlays)
		if got := strings.Join(problems, "; "); err != nil || (got == "") != (want == "") || !strings.Contains(got, want) || len(problems) > 1 {
			t.Errorf("%s: %q, %v, want %q", when, problems, err, want)
		}
	}
	expect("without the address", "tunnel address "+conformance.TunnelAddress+" is not an address of this host any more")
	tunnelAddress(t)
	expect("with the address", "")
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetMTU(loopback, 1500); err != nil {
		t.Fatal(err)
	}
	expect("with a smaller MTU", "interface lo with the tunnel address "+conformance.TunnelAddress+" carries 1500")
}

// The loss is published, and its end.
func TestTunnelProblemsAreReported(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	h := recorded(t)
	h.box = network.Box{Dir: t.TempDir()}
	h.networks.byID[goodSpec().Network.Id].Overlay = &hostpb.Overlay{Vni: 5000, Address: conformance.TunnelAddress, Mtu: 1400}
	ended, end := context.WithCancel(t.Context())
	end()
	for _, problems := range []int{1, 0} {
		h.machines.keepLinks(ended) // One look.
		if info, err := h.GetInfo(t.Context(), &hostpb.GetInfoRequest{}); err != nil || len(info.TunnelProblems) != problems {
			t.Errorf("%v, %v, want %d problems", info.GetTunnelProblems(), err, problems)
		}
		if problems > 0 {
			tunnelAddress(t)
		}
	}
}

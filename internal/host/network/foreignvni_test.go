package network

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// A network whose VNI another program of the box uses is refused, and the device of that program stays. Another port of VXLAN has VNIs
// of its own. The network is made when the device has gone.
func TestForeignVNI(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r := newRack(t, false)
	a := r.add()
	n := a.network(rackNetwork)
	foreign := func(name string, port int) *netlink.Vxlan {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		return &netlink.Vxlan{LinkAttrs: attrs, VxlanId: int(n.Overlay.VNI), Port: port}
	}
	r.must(in(a.ns, func() error {
		for _, device := range []*netlink.Vxlan{foreign("flannel.1", tunnelPort), foreign("other-port", 8472)} {
			if err := netlink.LinkAdd(device); err != nil {
				return err
			}
		}
		const want = "VNI 5000 belongs to a VXLAN device of another program on this box: choose another VNI"
		var conflict ConflictError
		if err := a.Ensure(t.Context(), n); !errors.As(err, &conflict) || conflict.Error() != want || conflict.Subject != "5000" {
			t.Errorf("the VNI of another program: got %v, want %q", err, want)
		}
		if _, err := netlink.LinkByName(TunnelName(n.ID)); !isNoLink(err) {
			t.Errorf("the refused network has a tunnel: %v", err)
		}
		if err := deleteLink("flannel.1"); err != nil { // It also proves that the device stayed.
			return err
		}
		return a.Ensure(t.Context(), n)
	}))
	r.must(in(a.ns, func() error {
		if whole, err := a.hasOverlay(n); err != nil || !whole {
			t.Errorf("the tunnel is incomplete after the other device was removed: %v", err)
		}
		_, err := netlink.LinkByName("other-port")
		return err
	}))
}

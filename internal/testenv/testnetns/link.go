package testnetns

import (
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/thread"
)

// New creates a network namespace that forwards packets, with a loopback device. It lasts as long as the handle.
func New() (ns netns.NsHandle, err error) {
	thread.Throwaway(func() {
		if ns, err = netns.New(); err != nil {
			return
		}
		for _, path := range []string{"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"} {
			if err = os.WriteFile(path, []byte("1"), 0); err != nil {
				return
			}
		}
		_, err = LoopbackUp()
	})
	return ns, err
}

// LoopbackUp activates the loopback device of the present network namespace, and returns it.
func LoopbackUp() (netlink.Link, error) {
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	return lo, err
}

// In runs f in a network namespace.
func In(ns netns.NsHandle, f func() error) (err error) {
	thread.Throwaway(func() {
		if err = netns.Set(ns); err == nil {
			err = f()
		}
	})
	return err
}

// End is one end of a cable.
type End struct {
	NS   netns.NsHandle
	Name string
}

// Cable connects two network namespaces.
func Cable(a, b End) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Namespace = a.Name, netlink.NsFd(int(a.NS))
	return In(b.NS, func() error { return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: b.Name}) })
}

// Connect configures a link with an address, which can be empty, and a route, which leads to the link itself if via is empty.
func Connect(name string, own, to netip.Prefix, via netip.Addr) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if own.IsValid() {
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(own), Flags: unix.IFA_F_NODAD}); err != nil {
			return err
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(to), Scope: netlink.SCOPE_LINK}
	if via.IsValid() {
		route.Gw, route.Scope = via.AsSlice(), netlink.SCOPE_UNIVERSE
	}
	return netlink.RouteAdd(route)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

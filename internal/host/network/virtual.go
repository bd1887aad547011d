package network

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A virtual address belongs to one box of a cluster at a time. The kernel removes it when its lifetime ends, so it does not
// outlive a capstand that is killed.

// virtualLife is the longest lifetime of a virtual address. A longer one belongs to an address of another program.
const virtualLife = 10 * time.Second

// VirtualLink returns the interface whose network contains a virtual address. It returns an error if an interface has the
// address already, unless it is a virtual one.
func VirtualLink(address netip.Addr) (netlink.Link, error) {
	all, err := netlink.AddrList(nil, linkFamily(address))
	if err != nil {
		return nil, err
	}
	best, bits := -1, -1
	for _, a := range all {
		ip, _ := netip.AddrFromSlice(a.IP)
		ones, _ := a.Mask.Size()
		if ip.Unmap() == address {
			if !isVirtual(a) {
				return nil, fmt.Errorf("%s is an address of this host: choose another virtual address", address)
			}
			continue
		}
		if ones < address.BitLen() && ones > bits && a.Contains(net.IP(address.AsSlice())) {
			best, bits = a.LinkIndex, ones
		}
	}
	if best < 0 {
		return nil, fmt.Errorf("no interface of this host is in the network of the virtual address %s: give the interface to this network an address there, or correct spec.virtualAddresses of the CapstanHost", address)
	}
	link, err := netlink.LinkByIndex(best)
	if err == nil && isMachineBridge(link) {
		return nil, fmt.Errorf("the virtual address %s is in the machine network of a cluster on this host: choose another one", address)
	}
	return link, err
}

// isMachineBridge returns whether a link is the bridge of a network of machines. A bridge of the administrator can have a similar name.
func isMachineBridge(link netlink.Link) bool {
	return link.Type() == "bridge" && ownLink.MatchString(link.Attrs().Name)
}

// linkFamily returns the address family in netlink.
func linkFamily(a netip.Addr) int {
	if a.Is6() {
		return netlink.FAMILY_V6
	}
	return netlink.FAMILY_V4
}

func isVirtual(a netlink.Addr) bool {
	ones, bits := a.Mask.Size()
	return ones == bits && a.ValidLft > 0 && a.ValidLft <= int(virtualLife/time.Second)
}

// HoldVirtual gives a link a virtual address for a time of at least a second, which it rounds down to seconds. The box does not
// use the address for its own connections. The kernel does not search for another station with an IPv6 address, because the
// search would take a second. The caller calls ProbeVirtual first.
func HoldVirtual(link netlink.Link, address netip.Addr, life time.Duration) error {
	err := netlink.AddrReplace(link, &netlink.Addr{
		IPNet: ipNet(address, address.BitLen()), ValidLft: int(min(life, virtualLife) / time.Second), PreferedLft: 0, Flags: unix.IFA_F_NODAD,
	})
	if err != nil {
		return fmt.Errorf("adding the virtual address %s to %s: %w", address, link.Attrs().Name, err)
	}
	return nil
}

// ReleaseVirtual removes a virtual address from the box. A missing one is no error.
func ReleaseVirtual(address netip.Addr) error {
	all, err := netlink.AddrList(nil, linkFamily(address))
	for _, a := range all {
		if ip, _ := netip.AddrFromSlice(a.IP); ip.Unmap() != address || !isVirtual(a) {
			continue
		}
		link, linkErr := netlink.LinkByIndex(a.LinkIndex)
		if linkErr != nil {
			continue // It was removed together with its addresses.
		}
		if delErr := netlink.AddrDel(link, &netlink.Addr{IPNet: a.IPNet}); !errors.Is(delErr, unix.EADDRNOTAVAIL) {
			err = errors.Join(err, delErr)
		}
	}
	return err
}

var broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

const (
	arpRequest, arpReply = 1, 2
	arpLength            = 42
)

// arp returns an Ethernet frame with an ARP packet that is sent to all stations.
func arp(operation uint16, mac net.HardwareAddr, sender, target netip.Addr) []byte {
	var f bytes.Buffer
	f.Write(broadcast)
	f.Write(mac)
	f.Write([]byte{0x08, 0x06, 0, 1, 0x08, 0, 6, 4})
	_ = binary.Write(&f, binary.BigEndian, operation)
	f.Write(mac)
	f.Write(sender.AsSlice())
	f.Write(make([]byte, 6))
	f.Write(target.AsSlice())
	return f.Bytes()
}

// holderOf returns the MAC address of a station that sends with an address, other than the link's own, or nil.
func holderOf(frame []byte, address netip.Addr, own net.HardwareAddr) net.HardwareAddr {
	if len(frame) < arpLength || frame[12] != 0x08 || frame[13] != 0x06 {
		return nil
	}
	mac, sender := net.HardwareAddr(bytes.Clone(frame[22:28])), netip.AddrFrom4([4]byte(frame[28:32]))
	if sender != address || bytes.Equal(mac, own) {
		return nil
	}
	return mac
}

const (
	typeARP  = 0x0806
	typeIPv6 = 0x86dd
)

// packets opens a socket for frames of a type on a link. Frames to its address are sent to all stations.
func packets(link netlink.Link, kind uint16) (fd int, to *unix.SockaddrLinklayer, err error) {
	if len(link.Attrs().HardwareAddr) != 6 {
		return -1, nil, fmt.Errorf("%s is not an Ethernet interface: a virtual address needs one", link.Attrs().Name)
	}
	protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, kind))
	to = &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Attrs().Index, Halen: 6}
	copy(to.Addr[:], broadcast)
	fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol))
	if err == nil {
		if err = unix.Bind(fd, to); err != nil {
			_ = unix.Close(fd)
		}
	}
	return fd, to, err
}

// AnnounceVirtual announces to all stations that the link has an IP address: with gratuitous ARP packets of both kinds, because some
// systems ignore one of them, or with a neighbour advertisement.
func AnnounceVirtual(link netlink.Link, address netip.Addr) error {
	if address.Is6() {
		awaitLocal(link, address)
		return advertise(link, address)
	}
	fd, to, err := packets(link, typeARP)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	mac := link.Attrs().HardwareAddr
	return errors.Join(unix.Sendto(fd, arp(arpRequest, mac, address, address), 0, to), unix.Sendto(fd, arp(arpReply, mac, address, address), 0, to))
}

const (
	probes     = 3
	probePause = 100 * time.Millisecond
)

// ProbeVirtual returns an error if another station of the link's network has a virtual address.
func ProbeVirtual(ctx context.Context, link netlink.Link, address netip.Addr) error {
	mac, err := probe(ctx, link, address)
	if mac != nil {
		return fmt.Errorf("the virtual address %s belongs to the station %s in the network of %s: free it, or exclude it from spec.virtualAddresses", address, mac, link.Attrs().Name)
	}
	return err
}

// probe returns the MAC address of another station of the link's network that has an address, or nil (RFC 5227).
func probe(ctx context.Context, link netlink.Link, address netip.Addr) (net.HardwareAddr, error) {
	ask, err := prober(link, address)
	if err != nil {
		return nil, err
	}
	return ask(ctx)
}

// prober opens a socket, and returns the function that probes with it. The function must be called once. The socket belongs to
// the network namespace of the thread that opened it.
func prober(link netlink.Link, address netip.Addr) (func(context.Context) (net.HardwareAddr, error), error) {
	if address.Is6() {
		fd, err := neighbourSocket(link)
		return func(ctx context.Context) (net.HardwareAddr, error) { return solicit(ctx, fd, link, address) }, err
	}
	fd, to, err := packets(link, typeARP)
	own := link.Attrs().HardwareAddr
	return func(ctx context.Context) (net.HardwareAddr, error) {
		return probeWith(ctx, fd, to, arp(arpRequest, own, netip.IPv4Unspecified(), address), func(frame []byte) net.HardwareAddr { return holderOf(frame, address, own) })
	}, err
}

// probeWith sends a frame that asks for an address, returns the first answer that is not nil, and closes the socket.
func probeWith(ctx context.Context, fd int, to *unix.SockaddrLinklayer, ask []byte, answer func([]byte) net.HardwareAddr) (net.HardwareAddr, error) {
	defer func() { _ = unix.Close(fd) }()
	wait := unix.NsecToTimeval(int64(probePause / 4))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		return nil, err
	}
	frame := make([]byte, 256)
	for range probes {
		if err := unix.Sendto(fd, ask, 0, to); err != nil {
			return nil, err
		}
		for end := time.Now().Add(probePause); time.Now().Before(end) && ctx.Err() == nil; {
			n, _, err := unix.Recvfrom(fd, frame, 0)
			if err != nil {
				continue // Most calls end without a frame.
			}
			if mac := answer(frame[:n]); mac != nil {
				return mac, nil
			}
		}
	}
	return nil, ctx.Err()
}

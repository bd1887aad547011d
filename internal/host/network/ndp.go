package network

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/icmp"
	icmpv6 "golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// Neighbour discovery (RFC 4861) is the counterpart of ARP for IPv6.

const (
	ndpSolicitation, ndpAdvertisement = 135, 136
	// The options with the MAC address of the sender and of the target.
	ndpSource, ndpTarget = 1, 2
	// ndpOverride makes stations replace the MAC address that they have recorded.
	ndpOverride = 0x20 << 24
	// ndpHops is the hop limit of all messages. A router reduces it, so messages from other networks have a smaller one.
	ndpHops   = 255
	ndpLength = 32
)

var allNodes = netip.MustParseAddr("ff02::1")

// ndp returns a message about an address. The kernel fills in the checksum.
func ndp(kind byte, flags uint32, target netip.Addr, option byte, mac net.HardwareAddr) []byte {
	m := binary.BigEndian.AppendUint32([]byte{kind, 0, 0, 0}, flags)
	return append(append(append(m, target.AsSlice()...), option, 1), mac...)
}

// solicitedNode returns the multicast address at which a station with an address is asked for its MAC address.
func solicitedNode(a netip.Addr) netip.Addr {
	raw := a.As16()
	return netip.AddrFrom16([16]byte{0xff, 2, 11: 1, 12: 0xff, 13: raw[13], 14: raw[14], 15: raw[15]})
}

// neighbourSocket opens a socket for neighbour discovery on a link. It receives advertisements only.
func neighbourSocket(link netlink.Link) (int, error) {
	if len(link.Attrs().HardwareAddr) != 6 {
		return -1, fmt.Errorf("%s is not an Ethernet interface: a virtual address needs one", link.Attrs().Name)
	}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
	if err != nil {
		return -1, err
	}
	filter := unix.ICMPv6Filter{}
	for i := range filter.Data {
		filter.Data[i] = ^uint32(0) // A set bit excludes a kind.
	}
	filter.Data[ndpAdvertisement/32] &^= 1 << (ndpAdvertisement % 32)
	wait := unix.NsecToTimeval(int64(probePause / 4))
	err = errors.Join(
		unix.SetsockoptICMPv6Filter(fd, unix.IPPROTO_ICMPV6, unix.ICMPV6_FILTER, &filter),
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, ndpHops),
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, 1),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.BindToDevice(fd, link.Attrs().Name),
	)
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("neighbour discovery on %s: %w", link.Attrs().Name, err)
	}
	return fd, nil
}

func sendNDP(fd int, link netlink.Link, to netip.Addr, message []byte) error {
	err := unix.Sendto(fd, message, 0, &unix.SockaddrInet6{Addr: to.As16(), ZoneId: uint32(link.Attrs().Index)})
	if err != nil {
		return fmt.Errorf("neighbour discovery on %s: %w", link.Attrs().Name, err)
	}
	return nil
}

const (
	localPatience = 500 * time.Millisecond
	localPause    = 5 * time.Millisecond
)

// awaitLocal waits until the kernel accepts packets for an IPv6 address of a link, which it does a moment after it has the address:
// stations that heard an advertisement before would send packets that the box drops. The wait is short, because the caller also
// renews other addresses. An advertisement that is early is repeated.
func awaitLocal(link netlink.Link, address netip.Addr) {
	options := &netlink.RouteGetOptions{OifIndex: link.Attrs().Index}
	for end := time.Now().Add(localPatience); time.Now().Before(end); time.Sleep(localPause) {
		routes, err := netlink.RouteGetWithOptions(address.AsSlice(), options)
		if err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL {
			return
		}
	}
}

// advertise announces to all stations of a link's network that the link has an address.
func advertise(link netlink.Link, address netip.Addr) error {
	fd, err := neighbourSocket(link)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return sendNDP(fd, link, allNodes, ndp(ndpAdvertisement, ndpOverride, address, ndpTarget, link.Attrs().HardwareAddr))
}

// solicit probes with neighbour discovery, and closes the socket.
func solicit(ctx context.Context, fd int, link netlink.Link, address netip.Addr) (net.HardwareAddr, error) {
	defer func() { _ = unix.Close(fd) }()
	own := link.Attrs().HardwareAddr
	for range probes {
		if err := sendNDP(fd, link, solicitedNode(address), ndp(ndpSolicitation, 0, address, ndpSource, own)); err != nil {
			return nil, err
		}
		for end := time.Now().Add(probePause); time.Now().Before(end) && ctx.Err() == nil; {
			if mac := receiveAdvertisement(fd, address); mac != nil && !bytes.Equal(mac, own) {
				return mac, nil
			}
		}
	}
	return nil, ctx.Err()
}

// receiveAdvertisement returns the MAC address in the next message if the message is about the address and from the network of
// the link, or nil.
func receiveAdvertisement(fd int, address netip.Addr) net.HardwareAddr {
	message, control := make([]byte, 256), make([]byte, 64)
	n, c, _, _, err := unix.Recvmsg(fd, message, control, 0)
	if err != nil || hopLimit(control[:c]) != ndpHops {
		return nil // Most calls end without a message.
	}
	return advertised(message[:n], address)
}

// advertised returns the MAC address of an advertisement of an address, or nil.
func advertised(message []byte, address netip.Addr) net.HardwareAddr {
	if len(message) < ndpLength || message[0] != ndpAdvertisement || netip.AddrFrom16([16]byte(message[8:24])) != address || message[24] != ndpTarget {
		return nil
	}
	return bytes.Clone(message[26:ndpLength])
}

const (
	ethernetHeader, ipv6Header = 14, 40
	ndpShort                   = 24 // a message without options
)

// duplicateSearch returns the frame with which a station without addresses searches for a holder of an address (RFC 4862). The holder
// answers to all nodes.
func duplicateSearch(mac net.HardwareAddr, address netip.Addr) ([]byte, error) {
	from, group := netip.IPv6Unspecified().AsSlice(), solicitedNode(address).AsSlice()
	target := ndp(ndpSolicitation, 0, address, 0, nil)[4:ndpShort]
	message, err := (&icmp.Message{Type: icmpv6.ICMPTypeNeighborSolicitation, Body: &icmp.RawBody{Data: target}}).Marshal(icmp.IPv6PseudoHeader(from, group))
	return slices.Concat(
		[]byte{0x33, 0x33}, group[12:], []byte(mac), []byte{typeIPv6 >> 8, typeIPv6 & 0xff},
		[]byte{6 << 4, 0, 0, 0, 0, ndpShort, unix.IPPROTO_ICMPV6, ndpHops}, from, group,
		message,
	), err
}

// advertisedIn returns the MAC address in a frame with an advertisement of an address, or nil.
func advertisedIn(frame []byte, address netip.Addr) net.HardwareAddr {
	const headers = ethernetHeader + ipv6Header
	if len(frame) < headers || binary.BigEndian.Uint16(frame[12:]) != typeIPv6 || frame[ethernetHeader+6] != unix.IPPROTO_ICMPV6 || frame[ethernetHeader+7] != ndpHops {
		return nil
	}
	return advertised(frame[headers:], address)
}

// hopLimit returns the hop limit in the control messages of a packet, or 0.
func hopLimit(control []byte) uint32 {
	messages, _ := unix.ParseSocketControlMessage(control)
	for _, m := range messages {
		if m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_HOPLIMIT && len(m.Data) >= 4 {
			return binary.NativeEndian.Uint32(m.Data)
		}
	}
	return 0
}

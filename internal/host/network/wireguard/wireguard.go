// Package wireguard is the encrypted link of a box to other boxes: a WireGuard device, which belongs to all networks of the box.
//
// The key of a box determines its address in the link. A peer can send only from the address of its own key, so the address of a
// packet that arrives through the link proves from which box it comes.
//
// The device is one of the kernel. A kernel without WireGuard gets a device of a process of capstand's program (TUN), which
// outlives capstand.
//
// Layer: host. Allowed imports: api, library, contract.
package wireguard

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"capstan.dev/capstan/internal/cidr"
)

const (
	// Device is the name of the device.
	Device = "capwg"
	// Port is the UDP port of the link.
	Port = 4787
)

const (
	// keepaliveInterval is less than the time after which firewalls forget a UDP flow.
	keepaliveInterval = 25 * time.Second
	// headStart is the time in which only the box with the smaller key can start the first session.
	headStart = 2 * time.Second
)

// Address returns the address of the box with a public key, in cidr.EncryptedLink.
func Address(public wgtypes.Key) netip.Addr {
	address, sum := cidr.EncryptedLink.Addr().As16(), sha256.Sum256(public[:])
	copy(address[4:], sum[:])
	return netip.AddrFrom16(address)
}

// Peer is another box.
type Peer struct {
	Key wgtypes.Key
	// Host is the address to which the encrypted packets go.
	Host netip.Addr
}

// Link is the link of this box.
type Link struct {
	// KeyFile contains the private key.
	KeyFile string
	// Public is the public key.
	Public wgtypes.Key
	// Dir contains the files that last as long as the links of the box.
	Dir string
	// UID is the user and group of the process of a device, if the kernel has none.
	UID int
	// Logging contains the flags of the logs of that process.
	Logging []string
}

// control configures a device. It leaves the sessions with known peers alone.
type control interface {
	peers() ([]wgtypes.Key, error)
	configure(wgtypes.Config) error
}

// Ensure creates or repairs the device, and makes the peers those of the list. If keep is true, other peers of the device stay, and
// its MTU does not become smaller.
func (l *Link) Ensure(mtu int, peers []Peer, keep bool) error {
	c, created, err := l.device()
	if err != nil {
		return fmt.Errorf("the WireGuard device %s: %w", Device, err)
	}
	have, err := c.peers()
	if err != nil {
		return fmt.Errorf("reading the peers of the WireGuard device %s: %w", Device, err)
	}
	if created {
		have = keysOf(peers) // These peers may have sessions with the device before, so they do not start others.
	}
	keep = keep && !created
	change, later := l.change(have, peers, keep)
	if err := c.configure(change); err != nil {
		return fmt.Errorf("setting the peers of the WireGuard device %s: %w", Device, err)
	}
	if len(later.Peers) > 0 {
		// An error means that the device is gone. The next Ensure gives its successor all peers.
		time.AfterFunc(headStart, func() { _ = c.configure(later) })
	}
	return l.connect(mtu, keep)
}

// change returns the configuration that turns the peers of a device into those of the list, or adds them, and the configuration that
// follows after headStart.
//
// If the first packets of both boxes start a session each at the same time, neither session works, and WireGuard notices that after
// 5 to 15 seconds. So one of two boxes starts the first session, and the other one receives the address of a new peer later. A packet
// of that peer also contains its address.
func (l *Link) change(have []wgtypes.Key, want []Peer, keep bool) (now, later wgtypes.Config) {
	keys := map[wgtypes.Key]bool{}
	for _, p := range want {
		keys[p.Key] = true
		peer, interval := configuration(p), time.Duration(0)
		switch {
		case l.starts(p.Key):
			interval = keepaliveInterval
		case !slices.Contains(have, p.Key):
			later.Peers = append(later.Peers, wgtypes.PeerConfig{PublicKey: p.Key, UpdateOnly: true, Endpoint: peer.Endpoint})
			peer.Endpoint = nil
		}
		peer.PersistentKeepaliveInterval = &interval
		now.Peers = append(now.Peers, peer)
	}
	for _, key := range have {
		if !keys[key] && !keep {
			now.Peers = append(now.Peers, wgtypes.PeerConfig{PublicKey: key, Remove: true})
		}
	}
	return now, later
}

// configuration is that of a box that can send only from the address of its key.
func configuration(p Peer) wgtypes.PeerConfig {
	return wgtypes.PeerConfig{
		PublicKey: p.Key, Endpoint: &net.UDPAddr{IP: p.Host.AsSlice(), Port: Port},
		ReplaceAllowedIPs: true, AllowedIPs: []net.IPNet{*single(Address(p.Key))},
	}
}

// starts returns whether this box starts the session with a peer as soon as it has the peer, and sends keepalives to renew it.
func (l *Link) starts(peer wgtypes.Key) bool { return bytes.Compare(l.Public[:], peer[:]) < 0 }

func keysOf(peers []Peer) (keys []wgtypes.Key) {
	for _, p := range peers {
		keys = append(keys, p.Key)
	}
	return keys
}

// device returns the control of the device, which it creates if there is none that works.
func (l *Link) device() (c control, created bool, err error) {
	link, err := netlink.LinkByName(Device)
	if err == nil {
		if c, err = l.working(link); c != nil {
			return c, false, nil
		}
	}
	switch {
	case err == nil: // Its process has ended, or capstand before it had its key, or it belongs to another program.
		err = netlink.LinkDel(link)
	case errors.As(err, &netlink.LinkNotFoundError{}):
		err = nil
	}
	if err != nil {
		return nil, false, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = Device
	switch err = netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: attrs}); {
	case err == nil:
		c, err = l.startKernel()
	case errors.Is(err, unix.EOPNOTSUPP):
		c, err = l.start()
	default:
		return nil, false, err
	}
	return c, true, err
}

// working returns the control of an existing device, or nil if the device has no process, or another key or port than those of the link.
func (l *Link) working(link netlink.Link) (control, error) {
	if link.Type() != "wireguard" {
		if l.running() {
			return process{l.socket()}, nil
		}
		return nil, nil
	}
	d, err := kernel{}.device()
	if err == nil && l.owns(d) {
		return kernel{}, nil
	}
	return nil, err
}

// owns returns whether a device of the kernel has the key and the port of the link. A device gets them after its creation.
func (l *Link) owns(d *wgtypes.Device) bool { return d.PublicKey == l.Public && d.ListenPort == Port }

// connect gives the device its address, and sends the packets for all boxes into it.
func (l *Link) connect(mtu int, keep bool) error {
	link, err := netlink.LinkByName(Device)
	if err != nil {
		return err
	}
	if have := link.Attrs().MTU; have < mtu || have > mtu && !keep {
		err = netlink.LinkSetMTU(link, mtu)
	}
	if e := os.WriteFile("/proc/sys/net/ipv6/conf/"+Device+"/disable_ipv6", []byte("0"), 0); e != nil { // Some hosts disable it by default.
		err = errors.Join(err, fmt.Errorf("IPv6 must not be disabled in the kernel of this host: %w", e))
	}
	own := &netlink.Addr{IPNet: single(Address(l.Public)), Flags: unix.IFA_F_NODAD}
	err = errors.Join(err, netlink.AddrReplace(link, own), netlink.LinkSetUp(link))
	if err != nil {
		return fmt.Errorf("setting up %s: %w", Device, err)
	}
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(cidr.EncryptedLink), Src: Address(l.Public).AsSlice()}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("route to %s: %w", cidr.EncryptedLink, err)
	}
	return nil
}

// Whole returns whether the device exists and works.
func (l *Link) Whole() (bool, error) {
	link, err := netlink.LinkByName(Device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return false, nil
	}
	if err != nil || link.Attrs().Flags&net.FlagUp == 0 {
		return false, err
	}
	if c, err := l.working(link); c == nil {
		return false, err
	}
	addresses, err := netlink.AddrList(link, netlink.FAMILY_V6)
	return slices.ContainsFunc(addresses, func(a netlink.Addr) bool { return a.IP.Equal(Address(l.Public).AsSlice()) }), err
}

// Remove removes the device and its process, and leaves the folder. Without them it does nothing.
func (l *Link) Remove() error {
	link, err := netlink.LinkByName(Device)
	switch {
	case err == nil:
		err = netlink.LinkDel(link)
	case errors.As(err, &netlink.LinkNotFoundError{}):
		err = nil
	}
	return errors.Join(err, l.end(), os.RemoveAll(l.Log()), os.RemoveAll(l.Log()+".1"))
}

func (l *Link) socket() string { return filepath.Join(l.Dir, "control.sock") }

func single(a netip.Addr) *net.IPNet { return ipNet(netip.PrefixFrom(a, a.BitLen())) }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

package network

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/host/network/wireguard"
)

// Place is the place at which a Service is published: an address, or ports of an address of the host, which Services share.
type Place struct {
	Address netip.Addr
	// Name of the Service with ports of the host, or empty.
	Name string
}

// Compare orders places by address and name.
func (p Place) Compare(other Place) int {
	return cmp.Or(p.Address.Compare(other.Address), cmp.Compare(p.Name, other.Name))
}

func (s Service) place() Place {
	if s.HostPorts {
		return Place{s.Address, s.Name}
	}
	return Place{Address: s.Address}
}

func (s Service) hasPort(protocol string, port uint16) bool {
	return slices.ContainsFunc(s.Ports, func(p ServicePort) bool { return p.Protocol == protocol && p.Port == port })
}

// covers returns whether a destination belongs to the Service.
func (s Service) covers(address netip.Addr, protocol string, port uint16) bool {
	return s.Address == address && (!s.HostPorts || s.hasPort(protocol, port))
}

// portsFlaw returns why the box cannot give up ports of its own address to a Service; the lock is held. The ports that this capstand
// has recorded for the network are not asked for again: programs cannot serve clients at them.
func (p *published) portsFlaw(s Service) error {
	own, err := p.isOwn(s.Address)
	if err != nil {
		return err
	}
	if !own {
		return fmt.Errorf("%s is not an address of the host: correct spec.services.hostAddresses of the CapstanHost", s.Address)
	}
	has := func(port ServicePort) func(Service) bool {
		return func(other Service) bool { return other.HostPorts && other.covers(s.Address, port.Protocol, port.Port) }
	}
	for _, port := range s.Ports {
		if port.Protocol == "udp" && (port.Port == tunnelPort || port.Port == wireguard.Port) {
			return fmt.Errorf("UDP port %d belongs to the tunnels between hosts: use another port", port.Port)
		}
		place := fmt.Sprintf("%s port %d of %s", strings.ToUpper(port.Protocol), port.Port, s.Address)
		switch {
		case slices.ContainsFunc(p.others, has(port)):
			return fmt.Errorf("another cluster on this box publishes a Service at %s: use another port", place)
		case slices.ContainsFunc(p.held, has(port)):
		case p.damage != nil:
			return p.damage
		default:
			if err := portFree(s.Address, port); errors.Is(err, unix.EADDRINUSE) {
				return fmt.Errorf("a program of the host uses %s: use another port, or stop the program (ss -lntup shows it)", place)
			} else if err != nil {
				return fmt.Errorf("asking for %s: %w", place, err)
			}
		}
	}
	return nil
}

// isOwn returns whether an address is one of the box itself: not of a bridge of machines, and not one for a Service.
func (p *published) isOwn(address netip.Addr) (bool, error) {
	all, err := p.addressesLike(address)
	if err != nil {
		return false, err
	}
	i := slices.IndexFunc(all, func(a netlink.Addr) bool { return a.IP.Equal(address.AsSlice()) })
	if i < 0 {
		return false, nil
	}
	link, err := netlink.LinkByIndex(all[i].LinkIndex)
	if err != nil {
		return false, err
	}
	if isMachineBridge(link) {
		return false, nil
	}
	published := atPoolAddress(address)
	return !slices.ContainsFunc(p.held, published) && !slices.ContainsFunc(p.others, published), nil
}

// published are the Services that the capstands of the box publish, and the addresses of its interfaces, while the box is locked. They are
// read once for all Services of a network: for each, the work would grow with the square of their number, and all others wait for the lock.
type published struct {
	// held are those of this capstand for the network, and others all others that are not in damaged folders.
	held, others []Service
	damage, err  error
	addresses    map[int][]netlink.Addr // by family
}

// published reads the Services of the box for a network; the lock is held. The methods of the result return the error of reading.
func (b Box) published(networkID string) *published {
	p := &published{addresses: map[int][]netlink.Addr{}}
	p.damage, p.err = b.eachService(func(network, host string, s Service) {
		if network == networkID && host == b.HostID {
			p.held = append(p.held, s)
			return
		}
		p.others = append(p.others, s)
	})
	return p
}

// addressesLike returns the addresses of the family of an address.
func (p *published) addressesLike(address netip.Addr) ([]netlink.Addr, error) {
	family := linkFamily(address)
	if all, have := p.addresses[family]; have || p.err != nil {
		return all, p.err
	}
	all, err := netlink.AddrList(nil, family)
	if err == nil {
		p.addresses[family] = all
	}
	return all, err
}

// PortPublished returns whether a Service has a TCP port of the box, so that a program that listens there would get no connections.
func (b Box) PortPublished(to netip.AddrPort) (published bool, err error) {
	err = b.locked(func() error {
		damage, err := b.eachService(func(_, _ string, s Service) {
			published = published || s.HostPorts && s.hasPort("tcp", to.Port()) && (s.Address == to.Addr() || to.Addr().IsUnspecified())
		})
		if published {
			return err
		}
		return errors.Join(err, damage)
	})
	return published, err
}

// eachService calls f for each Service that a capstand of the box publishes. The Services in damaged folders are unknown.
func (b Box) eachService(f func(network, host string, s Service)) (damage, err error) {
	networks, damage, err := b.survey()
	if err != nil {
		return nil, err
	}
	for _, n := range networks {
		users, err := b.users(n.ID)
		if err != nil {
			damage = errors.Join(damage, fmt.Errorf("expected the capstands that use network %s of %s, found a damaged folder: %w; remove what is not a file there", n.ID, n.Cluster, err))
			continue
		}
		for _, u := range users {
			services, err := readServices(filepath.Join(b.servicesDir(n.ID), u.Host))
			if err != nil {
				return nil, err
			}
			for _, s := range services {
				f(n.ID, u.Host, s)
			}
		}
	}
	return damage, nil
}

// portFree binds a socket to the port for a moment, without listening. It fails with EADDRINUSE if a program listens at the port of this
// address or of all addresses.
func portFree(address netip.Addr, p ServicePort) error {
	family, kind := unix.AF_INET, unix.SOCK_STREAM
	var to unix.Sockaddr = &unix.SockaddrInet4{Port: int(p.Port), Addr: to4(address)}
	if address.Is6() {
		family, to = unix.AF_INET6, &unix.SockaddrInet6{Port: int(p.Port), Addr: address.As16()}
	}
	if p.Protocol == "udp" {
		kind = unix.SOCK_DGRAM
	}
	socket, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(socket) }()
	if kind == unix.SOCK_STREAM { // The connections of a program that has ended do not occupy the port.
		if err := unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	return os.NewSyscallError("bind", unix.Bind(socket, to))
}

func to4(address netip.Addr) (out [4]byte) {
	if address.Is4() {
		out = address.As4()
	}
	return out
}

// hairpin gives connections of machines to a Service, which return to a machine of the same network, the address of the box as their
// source. Otherwise the machine would answer directly, with an address that the client did not connect to.
func (f firewall) hairpin() (rules []string) {
	if !slices.ContainsFunc(f.services, func(s Service) bool { return s.HostPorts }) {
		return nil
	}
	for _, subnet := range f.subnets {
		rules = append(rules, fmt.Sprintf("%s saddr %s oifname %s ct status dnat masquerade", family(subnet.Prefix.Addr()), subnet.Prefix, BridgeName(f.networkID)))
	}
	return rules
}

// protectPorts drops connections to published ports of the box that no rule translates: of other clients than those of the Service, and
// while it has no machine. A program of the host would get them.
func (s Service) protectPorts() (rules []string) {
	for _, p := range s.Ports {
		rules = append(rules, fmt.Sprintf("%s daddr %s %s dport %d ct state != { established, related } drop", family(s.Address), s.Address, p.Protocol, p.Port))
	}
	return rules
}

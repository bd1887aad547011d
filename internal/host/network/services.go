package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
)

// Service is a Service of a cluster that clients outside of the box reach at an address of the box.
type Service struct {
	Name    string     `json:"name"`
	Address netip.Addr `json:"address"`
	// HostPorts: the address is one of the box itself, and the Service has only its ports.
	HostPorts bool `json:"hostPorts,omitempty"`
	// Ports of the address.
	Ports []ServicePort `json:"ports"`
	// Machines get the connections.
	Machines []netip.Addr `json:"machines,omitempty"`
	// Sources are the networks of the clients; empty for all.
	Sources []netip.Prefix `json:"sources,omitempty"`
	// Withdrawn: the Service has no rules any more, and its connections may not have ended yet.
	Withdrawn bool `json:"withdrawn,omitempty"`
}

// ServicePort leads a port of the address to a port of the machines.
type ServicePort struct {
	Protocol string `json:"protocol"` // tcp or udp
	Port     uint16 `json:"port"`
	NodePort uint16 `json:"nodePort"`
}

// Refused contains the reasons why a box cannot publish Services at their places.
type Refused map[Place]string

// SetServices publishes the Services of a network through this capstand and ends the publication of all others. It returns
// the places that the box cannot give; their Services are not published.
//
// The record is written before a new address is added, and after a former address was removed: an address without a record
// would count as an address of the host.
func (b Box) SetServices(ctx context.Context, networkID string, want []Service) (Refused, error) {
	refused, links := Refused{}, map[netip.Addr]netlink.Link{}
	var fresh []netip.Addr
	if err := b.locked(func() (err error) {
		p := b.published(networkID)
		for _, s := range want {
			if s.HostPorts {
				continue
			}
			link, held, why := p.serviceLink(s.Address)
			switch {
			case why != nil:
				refused[s.place()] = why.Error()
			case !held:
				fresh = append(fresh, s.Address)
			}
			links[s.Address] = link
		}
		return nil
	}); err != nil {
		return nil, err
	}
	probeAll(ctx, fresh, links, refused) // It takes time, and the lock is that of the whole box.
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	accepted := slices.DeleteFunc(slices.Clone(want), func(s Service) bool { return refused[s.place()] != "" })
	// The end of a request must not leave an address without its rules.
	return refused, b.locked(func() error { return b.publish(context.WithoutCancel(ctx), networkID, accepted, links, refused) })
}

// probeAll asks for the stations that have new addresses, for all addresses at a time.
func probeAll(ctx context.Context, addresses []netip.Addr, links map[netip.Addr]netlink.Link, refused Refused) {
	var mu sync.Mutex
	var running sync.WaitGroup
	for _, address := range addresses {
		ask, err := prober(links[address], address)
		if err != nil {
			mu.Lock()
			refused[Place{Address: address}] = fmt.Sprintf("asking for the address %s: %v", address, err)
			mu.Unlock()
			continue
		}
		running.Go(func() {
			mac, err := ask(ctx)
			if err == nil && mac == nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			refused[Place{Address: address}] = fmt.Sprintf("the address %s belongs to the station %s in the network of %s: free it, or exclude it from the pool", address, mac, links[address].Attrs().Name)
			if err != nil {
				refused[Place{Address: address}] = fmt.Sprintf("asking for the address %s: %v", address, err)
			}
		})
	}
	running.Wait()
}

// publish writes the record, the rules and the addresses; the lock is held. Another capstand of the box may have taken an
// address during the probe.
func (b Box) publish(ctx context.Context, networkID string, want []Service, links map[netip.Addr]netlink.Link, refused Refused) error {
	n, ok := b.Network(networkID)
	if !ok {
		return fmt.Errorf("network %s does not exist on this box", networkID)
	}
	p := b.published(networkID)
	want = slices.DeleteFunc(want, func(s Service) bool {
		var why error
		if s.HostPorts {
			why = p.portsFlaw(s)
		} else {
			_, _, why = p.serviceLink(s.Address)
		}
		if why != nil {
			refused[s.place()] = why.Error()
		}
		return why != nil
	})
	have, err := b.ownServices(networkID)
	if err != nil {
		return err
	}
	if len(have) == 0 && len(want) == 0 {
		return nil
	}
	if err := b.removeServiceAddresses(have, want); err != nil {
		return err
	}
	if err := b.applyServices(ctx, n, have, want); err != nil { // Before the address, so that no service of the host answers at it.
		return err
	}
	for _, s := range want {
		if s.HostPorts {
			continue
		}
		if err := addServiceAddress(links[s.Address], s.Address); err != nil {
			return err
		}
	}
	return nil
}

// applyServices writes the record and the rules, and ends the connections of former Services. The record contains these until it has
// succeeded: after an error or a crash, the next call finds them there, also if it wants no Service.
func (b Box) applyServices(ctx context.Context, n Network, have, want []Service) error {
	former := withdrawn(have, want)
	if err := b.recordServices(n.ID, slices.Concat(want, former)); err != nil {
		return err
	}
	if err := b.rewriteFirewall(ctx, n); err != nil {
		return err
	}
	if err := endFlows(have, want); err != nil || len(former) == 0 {
		return err
	}
	return b.recordServices(n.ID, want)
}

// withdrawn returns the Services whose address, or one of whose ports of an address of the host, is not wanted any more.
func withdrawn(have, want []Service) (former []Service) {
	for _, s := range have {
		if !slices.ContainsFunc(want, func(w Service) bool { return w.replaces(s) }) {
			s.Withdrawn = true
			former = append(former, s)
		}
	}
	return former
}

// replaces returns whether the Service has the address, or all ports of the address of the host, that former has.
func (s Service) replaces(former Service) bool {
	lacks := func(p ServicePort) bool { return !s.hasPort(p.Protocol, p.Port) }
	return s.place() == former.place() && (!former.HostPorts || !slices.ContainsFunc(former.Ports, lacks))
}

func (b Box) servicesDir(networkID string) string { return filepath.Join(b.dir(networkID), "services") }

func (b Box) servicesFile(networkID string) string {
	return filepath.Join(b.servicesDir(networkID), b.HostID)
}

func (b Box) recordServices(networkID string, services []Service) error {
	if len(services) == 0 {
		return atomicfile.Remove(b.servicesFile(networkID))
	}
	if err := os.MkdirAll(b.servicesDir(networkID), 0o755); err != nil {
		return err
	}
	return atomicfile.WriteJSON(b.servicesFile(networkID), services, 0o644)
}

// ownServices returns the Services of a network that this capstand publishes.
func (b Box) ownServices(networkID string) ([]Service, error) {
	return readServices(b.servicesFile(networkID))
}

// services returns the Services of a network that the capstands of the box publish, without the withdrawn ones.
func (b Box) services(networkID string) (all []Service, err error) {
	users, err := b.users(networkID)
	if err != nil {
		return nil, err
	}
	for _, user := range users {
		of, err := readServices(filepath.Join(b.servicesDir(networkID), user.Host))
		if err != nil {
			return nil, err
		}
		all = append(all, of...)
	}
	return slices.DeleteFunc(all, func(s Service) bool { return s.Withdrawn }), nil
}

func readServices(path string) (all []Service, err error) {
	if err := atomicfile.ReadJSON(path, &all); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return all, nil
}

// releaseServices ends the publication of a network's Services through this capstand; the lock is held.
func (b Box) releaseServices(networkID string) error {
	have, err := b.ownServices(networkID)
	if err != nil {
		return err
	}
	if err := b.removeServiceAddresses(have, nil); err != nil {
		return err
	}
	return errors.Join(endFlows(have, nil), atomicfile.Remove(b.servicesFile(networkID)))
}

// removeForsakenAddresses removes the addresses of capstands whose state folder is gone; the lock is held, and the network has
// no user any more.
func (b Box) removeForsakenAddresses(networkID string) (err error) {
	files, _ := filepath.Glob(filepath.Join(b.servicesDir(networkID), "*"))
	for _, file := range files {
		if have, readErr := readServices(file); readErr == nil { // A crash can leave an unfinished file.
			err = errors.Join(err, b.removeServiceAddresses(have, nil), endFlows(have, nil))
		}
	}
	return err
}

// serviceLink returns the interface whose network contains an address, and whether this capstand has recorded the address
// for a Service of the network and the interface has it. An address of the host, or of another publication, is an error.
func (p *published) serviceLink(address netip.Addr) (link netlink.Link, held bool, err error) {
	recorded, err := p.publisher(address)
	if err != nil {
		return nil, false, err
	}
	all, err := p.addressesLike(address)
	if err != nil {
		return nil, false, err
	}
	best, bits := -1, -1
	for _, a := range all {
		ip, _ := netip.AddrFromSlice(a.IP)
		ones, _ := a.Mask.Size()
		prefix := netip.PrefixFrom(ip.Unmap(), ones).Masked()
		switch {
		case ip.Unmap() == address && !recorded:
			return nil, false, fmt.Errorf("%s is an address of the host itself: exclude it from the pool", address)
		case ip.Unmap() == address:
			link, err = netlink.LinkByIndex(a.LinkIndex)
			return link, err == nil, err
		case ones >= address.BitLen()-1 || ones <= bits || !prefix.Contains(address):
		case address == prefix.Addr() || address.Is4() && address == lastAddress(prefix):
			return nil, false, fmt.Errorf("%s is the network or broadcast address of %s: exclude it from the pool", address, prefix)
		default:
			best, bits = a.LinkIndex, ones
		}
	}
	if best < 0 {
		return nil, false, fmt.Errorf("no interface of the host is in the network of the address %s: correct the pool and spec.services.addresses of the CapstanHost", address)
	}
	link, err = netlink.LinkByIndex(best)
	if err == nil && isMachineBridge(link) {
		return nil, false, fmt.Errorf("%s is in the machine network of a cluster on the host: clients outside of the host do not reach it; use another pool", address)
	}
	return link, false, err
}

// atPoolAddress returns the question whether a Service has an address that is none of the host itself.
func atPoolAddress(address netip.Addr) func(Service) bool {
	return func(s Service) bool { return !s.HostPorts && s.Address == address }
}

// publisher returns whether this capstand publishes a Service of the network at the address. It returns an error if another
// network or capstand of the box does.
func (p *published) publisher(address netip.Addr) (own bool, err error) {
	if p.err != nil {
		return false, p.err
	}
	has := atPoolAddress(address)
	if slices.ContainsFunc(p.others, has) {
		return false, fmt.Errorf("another Service on this box has the address %s", address)
	}
	if slices.ContainsFunc(p.held, has) {
		return true, nil
	}
	return false, p.damage
}

// addServiceAddress gives an interface an address, and announces it if it is new. The box does not use it for its own
// connections.
func addServiceAddress(link netlink.Link, address netip.Addr) error {
	a := &netlink.Addr{IPNet: ipNet(address, address.BitLen())}
	if address.Is6() {
		// The kernel would look for another station for a second, and would use the address for connections of the box.
		a.Flags, a.ValidLft, a.PreferedLft = unix.IFA_F_NODAD, math.MaxUint32, 0
	}
	err := netlink.AddrAdd(link, a)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("adding the address %s to %s: %w", address, link.Attrs().Name, err)
	}
	return AnnounceVirtual(link, address)
}

// removeServiceAddresses removes the addresses of Services that are no longer wanted.
func (b Box) removeServiceAddresses(have, want []Service) error {
	all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	for _, a := range all {
		ip, _ := netip.AddrFromSlice(a.IP)
		has := atPoolAddress(ip.Unmap())
		if !slices.ContainsFunc(have, has) || slices.ContainsFunc(want, has) {
			continue
		}
		link, err := netlink.LinkByIndex(a.LinkIndex)
		if err != nil {
			continue // It was removed together with its addresses.
		}
		if err := netlink.AddrDel(link, &netlink.Addr{IPNet: a.IPNet}); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("removing the address %s from %s: %w", ip, link.Attrs().Name, err)
		}
	}
	return nil
}

// AnnounceServices announces the addresses of the Services of a network that this capstand has. The box stays locked: an address must not be
// announced after it was given up.
func (b Box) AnnounceServices(networkID string, services []Service) error {
	return b.locked(func() error {
		for address, link := range b.published(networkID).heldAddresses(services) {
			if err := AnnounceVirtual(link, address); err != nil {
				return err
			}
		}
		return nil
	})
}

// HoldsServices reports whether this capstand has all addresses and ports of the Services of a network, and has withdrawn all others.
func (b Box) HoldsServices(networkID string, services []Service) (whole bool, err error) {
	err = b.locked(func() error {
		recorded, err := b.ownServices(networkID)
		if err != nil {
			return err
		}
		p := b.published(networkID)
		held := p.heldAddresses(services)
		whole = len(withdrawn(recorded, services)) == 0 && !slices.ContainsFunc(services, func(s Service) bool {
			return s.HostPorts && !p.holdsPorts(s, recorded) || !s.HostPorts && held[s.Address] == nil
		})
		return nil
	})
	return whole, err
}

// heldAddresses returns the interfaces that have the addresses of Services; the box is locked.
func (p *published) heldAddresses(services []Service) map[netip.Addr]netlink.Link {
	held := map[netip.Addr]netlink.Link{}
	for _, s := range services {
		if s.HostPorts {
			continue
		}
		if link, has, why := p.serviceLink(s.Address); why == nil && has {
			held[s.Address] = link
		}
	}
	return held
}

// holdsPorts reports whether the box has the address of the ports of a Service, and recorded contains these ports.
func (p *published) holdsPorts(s Service, recorded []Service) bool {
	own, err := p.isOwn(s.Address)
	return err == nil && own && slices.ContainsFunc(recorded, func(r Service) bool { return !r.Withdrawn && r.place() == s.place() })
}

// YieldServices gives up the addresses that another station of their network has too, and those for which the network cannot be asked. It
// returns the Services that stay, and the reasons against the others. A box without a manager calls it: while the box was away from the
// network, another one may have got the addresses.
func (b Box) YieldServices(ctx context.Context, networkID string, services []Service) (kept []Service, lost Refused, err error) {
	var held map[netip.Addr]netlink.Link
	if err := b.locked(func() error {
		held = b.published(networkID).heldAddresses(services)
		return nil
	}); err != nil {
		return nil, nil, err
	}
	lost = Refused{}
	probeAll(ctx, slices.Collect(maps.Keys(held)), held, lost)
	if err := ctx.Err(); err != nil || len(lost) == 0 {
		return services, nil, err
	}
	kept = slices.DeleteFunc(slices.Clone(services), func(s Service) bool { return lost[s.place()] != "" })
	_, err = b.SetServices(ctx, networkID, kept)
	return kept, lost, err
}

// endFlows ends the tracked connections that the Services do not allow any more, and those from before a Service that no rule translates.
// Otherwise a client that keeps sending from one port would be served, or not be served, as long as it sends. TCP connections continue when
// their machine gets no new ones.
func endFlows(have, want []Service) error {
	families := map[int]bool{}
	for _, s := range slices.Concat(have, want) {
		families[linkFamily(s.Address)] = true
	}
	for family := range families {
		if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, netlink.InetFamily(family), unwantedFlows{have, want}); err != nil {
			return fmt.Errorf("ending the connections of former Services: %w", err)
		}
	}
	return nil
}

type unwantedFlows struct{ have, want []Service }

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (u unwantedFlows) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	to, _ := netip.AddrFromSlice(flow.Forward.DstIP)
	at := func(s Service) bool { return s.covers(to.Unmap(), protocolOf(flow.Forward), flow.Forward.DstPort) }
	if i := slices.IndexFunc(u.want, at); i >= 0 {
		return !u.want[i].serves(flow.Forward, flow.Reverse)
	}
	return slices.ContainsFunc(u.have, at)
}

func protocolOf(flow netlink.IPTuple) string {
	return map[uint8]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}[flow.Protocol]
}

// serves returns whether a connection to the Service may go on. answers are the packets of the machine to which it was translated: a node port
// of another Service had the port before.
func (s Service) serves(flow, answers netlink.IPTuple) bool {
	protocol := protocolOf(flow)
	if !slices.Contains(s.Ports, ServicePort{Protocol: protocol, Port: flow.DstPort, NodePort: answers.SrcPort}) {
		return false
	}
	from, _ := netip.AddrFromSlice(flow.SrcIP)
	if len(s.Sources) > 0 && !slices.ContainsFunc(s.Sources, func(p netip.Prefix) bool { return p.Contains(from.Unmap()) }) {
		return false
	}
	to, _ := netip.AddrFromSlice(answers.SrcIP)
	return protocol == "tcp" || slices.Contains(s.Machines, to.Unmap())
}

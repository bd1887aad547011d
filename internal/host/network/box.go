// Package network creates the network of machines: a bridge per cluster, a network namespace and a veth pair (cable) per
// machine, and firewall rules.
//
// Several capstands can run on one box, and the machines of one cluster on several of them. Files below /run/capstan, which
// last as long as the links, record the state that the capstands share. One lock guards them:
//
//	lock
//	networks/<hash>/network.json     id, CIDR, overlay
//	networks/<hash>/peers.json       the machines on other boxes
//	networks/<hash>/redirect.json    the endpoint whose connections the load balancer gets
//	networks/<hash>/services/<host>  the Services of the cluster that a capstand publishes
//	networks/<hash>/hosts/<host id>  a capstand that uses the network; the last one removes it
//	networks/<hash>/leases/<address> the machine, or load balancer, that has the address
//	netns/<hash>                     the network namespace of a machine
//	wireguard/                       the process of the encrypted link
//
// After a reboot each capstand creates its part again from its own disk.
//
// Layer: host. Allowed imports: api, library, contract.
package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/network/wireguard"
)

// DefaultRunDir is shared by all capstands of the box.
const DefaultRunDir = "/run/capstan"

// InUseError reports that an address, or the id of a network or machine, belongs to another object of this box.
type InUseError struct {
	// Address that is in use; empty if an id is in use.
	Address string
	message string
}

// ConflictError reports that a network cannot exist on this box.
type ConflictError struct {
	// Subject is the CIDR, or the VNI of an overlay, that conflicts, or the tunnel address that the network has instead of another one;
	// empty if the address family conflicts.
	Subject string
	message string
}

func (e InUseError) Error() string    { return e.message }
func (e ConflictError) Error() string { return e.message }

// Box is the network of this box from the view of one capstand.
type Box struct {
	// Dir is DefaultRunDir.
	Dir string
	// HostID and HostRoot are the capstand's own id and state folder.
	HostID, HostRoot string
	// Link encrypts the overlays; nil if they are not encrypted.
	Link *wireguard.Link
}

// Network is the network of a cluster.
type Network struct {
	ID   string `json:"id"`
	CIDR string `json:"cidr"`
	// IPv6CIDR is the second network; it is empty if the network is not dual-stack.
	IPv6CIDR string `json:"ipv6CIDR,omitempty"`
	// Cluster is the namespace and name of the cluster. Only its machines join the network.
	Cluster string `json:"cluster"`
	// Overlay is nil if the network stays on this box.
	Overlay *Overlay `json:"overlay,omitempty"`
	// LAN is nil if the network has a bridge of its own.
	LAN *LAN `json:"lan,omitempty"`
}

// owner identifies a capstand.
type owner struct {
	Host string `json:"host"`
	Root string `json:"root"`
}

// stale returns whether the capstand's state folder is gone, so it has no machines or load balancers any more.
func (o owner) stale() bool { return o.Root == "" || !atomicfile.Exists(o.Root) }

func (b Box) me() owner { return owner{Host: b.HostID, Root: b.HostRoot} }

func (b Box) dir(networkID string) string { return filepath.Join(b.Dir, "networks", hash(networkID)) }

// NetNS returns the path of a machine's network namespace.
func (b Box) NetNS(machineID string) string { return filepath.Join(b.Dir, "netns", hash(machineID)) }

// locked runs f while no other capstand of the box changes networks.
func (b Box) locked(f func() error) error {
	if err := os.MkdirAll(b.Dir, 0o755); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(b.Dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	return f()
}

// FitsRoutes returns a ConflictError if a route of the box, except through bridges of networks, leads to a part of the network, or if the network
// contains the gateway of such a route or a part of used.
func (b Box) FitsRoutes(n Network, used ...UsedRange) error {
	if n.LAN != nil {
		return nil // The box has no route to it.
	}
	subnets, err := Subnets(n.CIDR, n.IPv6CIDR)
	if err != nil {
		return err
	}
	return b.locked(func() error {
		networks, err := b.list()
		if err != nil {
			return err
		}
		bridges := []string{BridgeName(n.ID)}
		for _, other := range networks {
			bridges = append(bridges, BridgeName(other.ID))
		}
		routes, err := hostRoutes(bridges)
		if err != nil {
			return err
		}
		return disjoint(subnets, append(routes, used...))
	})
}

// Tunnels returns the tunnel addresses of the other boxes. It reads the peers of all networks, which can be megabytes.
func (b Box) Tunnels() (used []UsedRange, err error) {
	err = b.locked(func() error {
		networks, err := b.list()
		for _, n := range networks {
			peers, _ := b.peers(n.ID) // A damaged record must not keep all new networks away.
			for _, host := range peers.hosts() {
				used = append(used, Used(host, "a tunnel to another host"))
			}
		}
		return err
	})
	return used, err
}

// disjoint returns a ConflictError if a subnet overlaps a used range.
func disjoint(subnets []Subnet, used []UsedRange) error {
	for _, subnet := range subnets {
		if err := overlap(subnet.Prefix, used); err != nil {
			return ConflictError{Subject: subnet.Prefix.String(), message: err.Error()}
		}
	}
	return nil
}

// Ensure creates or repairs a network on the box and records that this capstand uses it. It returns a ConflictError if another
// network of the box has a part of the CIDR.
func (b Box) Ensure(ctx context.Context, n Network) error {
	n = b.encrypt(n)
	subnets, err := Subnets(n.CIDR, n.IPv6CIDR)
	if err != nil {
		return err
	}
	return b.locked(func() error {
		if err := b.admit(n, subnets); err != nil {
			return err
		}
		dir := b.dir(n.ID)
		for _, sub := range []string{"hosts", "leases"} {
			if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
				return err
			}
		}
		if err := atomicfile.WriteJSON(filepath.Join(dir, "network.json"), n, 0o644); err != nil {
			return err
		}
		if err := atomicfile.WriteJSON(filepath.Join(dir, "hosts", b.HostID), b.me(), 0o644); err != nil {
			return err
		}
		if err := b.writeFirewall(ctx, n, subnets); err != nil { // Before the bridge forwards the first packet.
			return err
		}
		if n.LAN != nil {
			return nil // The bridge exists, and capstand leaves it alone. The box does not forward.
		}
		if hasIPv6(subnets) {
			if _, err := ForwardIPv6(); err != nil {
				return err
			}
		}
		return b.ensureLinks(n, subnets)
	})
}

// ensureLinks creates or repairs the bridge and the tunnel of a network.
func (b Box) ensureLinks(n Network, subnets []Subnet) error {
	mtu := uplinkMTU(subnets)
	if n.Overlay != nil {
		mtu = n.Overlay.MTU
	}
	if err := ensureBridge(BridgeName(n.ID), subnets, gatewayMAC(n.ID, subnets), mtu); err != nil {
		return err
	}
	served, err := b.served(n.ID)
	if err != nil {
		return err
	}
	for _, address := range served {
		if err := addBridgeAddress(BridgeName(n.ID), address); err != nil {
			return err
		}
	}
	return b.ensureOverlay(n, subnets)
}

// hasBridge reports whether the bridge of a network is up with all its addresses, and connects to machines from the right one.
func (b Box) hasBridge(n Network, subnets []Subnet) (bool, error) {
	want, err := b.served(n.ID)
	if err != nil {
		return false, err
	}
	for _, subnet := range subnets {
		want = append(want, subnet.Gateway.String())
	}
	if n.Overlay == nil {
		return isUp(BridgeName(n.ID), want)
	}
	own := n.hostAddress(n.Overlay.Address)
	if up, err := isUp(BridgeName(n.ID), append(want, own.String())); err != nil || !up {
		return false, err
	}
	return hasRouteFrom(BridgeName(n.ID), subnets[0].Prefix, own)
}

// admit compares the network with the other networks of the box.
func (b Box) admit(n Network, subnets []Subnet) error {
	if n.LAN != nil {
		if _, err := lanLink(*n.LAN); err != nil {
			return err
		}
		if hasIPv6(subnets) {
			if err := requireIPv6(procIPv6); err != nil {
				return err
			}
		}
	}
	networks, err := b.list()
	if err != nil {
		return err
	}
	var used []UsedRange
	for _, other := range networks {
		switch {
		case other.ID == n.ID:
			err = admitSame(n, other, subnets)
		case sameNames(other.ID, n.ID):
			err = InUseError{message: fmt.Sprintf("the id %s has the same short hash as that of another network on this box: create the cluster again with another id", n.ID)}
		default:
			used = append(used, routed(other)...)
			err = admitOverlay(n, other)
		}
		if err != nil {
			return err
		}
	}
	if n.LAN != nil {
		return nil // The box has no route to it.
	}
	return disjoint(subnets, used)
}

// admitSame compares the network with its record on the box: a cluster keeps its networks.
func admitSame(n, recorded Network, subnets []Subnet) error {
	before, err := Subnets(recorded.CIDR, recorded.IPv6CIDR)
	switch {
	case err != nil: // Damaged, or not written by a capstand.
	case recorded.Cluster != n.Cluster:
		return InUseError{message: fmt.Sprintf("network %s belongs to cluster %s on this box, not to %s, which is a copy of it: delete the copy and create it again without an id",
			n.ID, recorded.Cluster, n.Cluster)}
	case !slices.Equal(before, subnets):
		return ConflictError{Subject: n.CIDR, message: fmt.Sprintf("network %s of cluster %s is %s on this box and cannot become %s; delete the cluster first",
			n.ID, recorded.Cluster, strings.TrimSpace(recorded.CIDR+" "+recorded.IPv6CIDR), strings.TrimSpace(n.CIDR+" "+n.IPv6CIDR))}
	}
	if err := admitOverlay(n, recorded); err != nil {
		return err
	}
	return admitLAN(n, recorded)
}

// routed returns the subnets of a network that the box has routes to. It has none to a LAN. Users of other namespaces read a refusal, so it
// does not name the cluster.
func routed(n Network) (used []UsedRange) {
	subnets, err := Subnets(n.CIDR, n.IPv6CIDR)
	if err != nil || n.LAN != nil { // Damaged, or not written by a capstand.
		return nil
	}
	for _, subnet := range subnets {
		used = append(used, UsedRange{subnet.Prefix, "another cluster"})
	}
	return used
}

// list returns the networks of the box without damaged folders, for work that concerns each network alone. A check that compares
// networks must use survey: it is not complete while a folder is damaged. The guard of the box reports the damage.
func (b Box) list() ([]Network, error) {
	networks, _, err := b.survey()
	return networks, err
}

// survey returns the networks of the box, and the damage of folders. A folder without a readable network.json and without a
// user remains from a capstand that was killed while it created or removed the network; survey removes it. If the folder has a
// user, the file is damaged: the leases are still needed, and the user writes the file again with its next machine or at its
// next start. The networks are those of the other folders.
func (b Box) survey() (networks []Network, damage, err error) {
	entries, err := os.ReadDir(filepath.Join(b.Dir, "networks"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	for _, entry := range entries {
		var n Network
		dir := filepath.Join(b.Dir, "networks", entry.Name())
		if unreadable := atomicfile.ReadJSON(filepath.Join(dir, "network.json"), &n); unreadable == nil {
			networks = append(networks, n)
		} else if err := removeUnused(dir, unreadable); err != nil {
			damage = errors.Join(damage, fmt.Errorf("expected a network of machines in %s, found a damaged folder: %w; stop the capstands of this box, remove the folder and start them again: they write it again", dir, err))
		}
	}
	return networks, damage, nil
}

// removeUnused removes the folder of an unreadable network, or returns why it must stay: a capstand uses it.
func removeUnused(dir string, unreadable error) error {
	users, err := usersIn(filepath.Join(dir, "hosts"))
	if err != nil {
		return err
	}
	if len(users) > 0 {
		return unreadable
	}
	return os.RemoveAll(dir)
}

// Release records that this capstand no longer uses the network. The last user removes the network.
func (b Box) Release(ctx context.Context, networkID string) error {
	return b.locked(func() error { return b.release(ctx, networkID) })
}

func (b Box) release(ctx context.Context, networkID string) error {
	dir := b.dir(networkID)
	if err := b.dropLeases(networkID, func(l Lease) bool { return l.Host == b.HostID }); err != nil {
		return err
	}
	if err := b.releaseServices(networkID); err != nil {
		return err
	}
	if err := atomicfile.Remove(filepath.Join(dir, "hosts", b.HostID)); err != nil {
		return err
	}
	users, err := b.users(networkID)
	if err != nil {
		return err
	}
	if n, ok := b.Network(networkID); ok && len(users) > 0 {
		return b.rewriteFirewall(ctx, n) // without the Services of this capstand
	} else if len(users) > 0 {
		return nil
	}
	if err := errors.Join(b.removeForsakenAddresses(networkID), deleteLink(TunnelName(networkID)), deleteLink(BridgeName(networkID)), b.deleteFirewalls(ctx, networkID)); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(dir), b.syncLink())
}

// Sweep releases all networks except the known ones. A capstand that was killed may have created a network without a record,
// or not have completed its removal.
func (b Box) Sweep(ctx context.Context, known func(networkID string) bool) error {
	return b.locked(func() error {
		networks, damage, err := b.survey()
		err = errors.Join(err, damage)
		for _, n := range networks {
			if !known(n.ID) {
				err = errors.Join(err, b.release(ctx, n.ID))
			}
		}
		return err
	})
}

// uses reports whether this capstand uses a network, as its record in the folder of the network says. Other capstands of the box can
// use it as well.
func (b Box) uses(networkID string) bool {
	return atomicfile.Exists(filepath.Join(b.dir(networkID), "hosts", b.HostID))
}

// users lists the capstands that use a network, and removes those whose state folder is gone.
func (b Box) users(networkID string) ([]owner, error) {
	return usersIn(filepath.Join(b.dir(networkID), "hosts"))
}

func usersIn(dir string) ([]owner, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var all []owner
	for _, entry := range entries {
		var o owner
		err := atomicfile.ReadJSON(filepath.Join(dir, entry.Name()), &o)
		// Files with other names remain from a capstand that was killed while it wrote them.
		if err != nil || o.stale() || o.Host != entry.Name() {
			if err := atomicfile.Remove(filepath.Join(dir, entry.Name())); err != nil {
				return nil, err
			}
			continue
		}
		all = append(all, o)
	}
	return all, nil
}

// Network returns the network as recorded on the box.
func (b Box) Network(networkID string) (n Network, ok bool) {
	err := atomicfile.ReadJSON(filepath.Join(b.dir(networkID), "network.json"), &n)
	return n, err == nil && n.ID == networkID
}

// Plug creates a machine's network namespace and connects it.
func (b Box) Plug(networkID, machineID string, addresses []Address) error {
	ns := b.NetNS(machineID)
	if err := ensureNetNS(ns); err != nil {
		return err
	}
	mac := MAC(networkID, addresses[0].Prefix.Addr().String())
	n, ok := b.Network(networkID)
	if !ok {
		n.ID = networkID
	}
	connect := func() error { return plug(n.Bridge(), n.vlan(), VethName(machineID), ns, mac, addresses) }
	switch {
	case n.LAN == nil:
		return connect()
	case n.vlan() != 0: // Other capstands of the box do not repair a port that is not complete.
		return errors.Join(b.locked(connect), guardPort(VethName(machineID)))
	}
	return errors.Join(connect(), guardPort(VethName(machineID)))
}

// Unplug removes a machine's cable and network namespace.
func (b Box) Unplug(machineID string) error {
	return errors.Join(deleteLink(VethName(machineID)), deleteNetNS(b.NetNS(machineID)))
}

package admission

import (
	"fmt"
	"iter"
	"net/netip"
	"strconv"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/network/wireguard"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/overhead"
)

// Limits of an overlay, besides those of package overhead.
const (
	maxMTU = 9000
	// maxPeers is the largest number of machines on other hosts, and maxHosts that of these hosts.
	maxPeers, maxHosts = 10_000, 2048
)

// checkOverlay refuses an overlay that is invalid on every host.
func checkOverlay(o *hostpb.Overlay) error {
	if o == nil {
		return nil
	}
	if o.Vni < overhead.MinVNI || o.Vni > overhead.MaxVNI {
		return fmt.Errorf("the overlay has VNI %d: expected %d to %d", o.Vni, overhead.MinVNI, overhead.MaxVNI)
	}
	if o.Mtu < overhead.MinMTU || o.Mtu > maxMTU {
		return fmt.Errorf("the overlay has an MTU of %d bytes: expected %d to %d", o.Mtu, overhead.MinMTU, maxMTU)
	}
	_, err := tunnelAddress(o.Address)
	return err
}

// tunnelAddress parses the address at which a host receives VXLAN packets.
func tunnelAddress(text string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if err != nil || !addr.IsGlobalUnicast() || addr.Zone() != "" || addr.Is4In6() {
		return netip.Addr{}, fmt.Errorf("%q is not a tunnel address: expected the IP address of a host, for example 192.0.2.10", text)
	}
	return addr, nil
}

// sameOverlay refuses another overlay for a network that exists, and a VNI of another network (NETWORK_CONFLICT). others
// are the networks of the host. The box of capstand also compares the networks of its other hosts.
func sameOverlay(n *hostpb.Network, others iter.Seq[*hostpb.Network]) error {
	for other := range others {
		switch {
		case other.Id == n.Id && !proto.Equal(other.Overlay, n.Overlay):
			return refusal.About(hostpb.Refusal_NETWORK_CONFLICT, network.OverlaySubject(n.Cidr, n.Overlay.GetAddress(), other.Overlay.GetAddress()), "network %s has overlay {%v} on this host and cannot get {%v}; delete the cluster first", n.Id, other.Overlay, n.Overlay)
		case other.Id != n.Id && n.Overlay != nil && other.Overlay.GetVni() == n.Overlay.Vni:
			return refusal.About(hostpb.Refusal_NETWORK_CONFLICT, strconv.Itoa(int(n.Overlay.Vni)), "VNI %d belongs to another cluster on this host; choose another VNI", n.Overlay.Vni)
		}
	}
	return nil
}

// knownNetwork decides whether a request of a cluster can change a network. have is nil if the host does not have the network.
func knownNetwork(id string, req owner.Object, have *hostpb.Network) error {
	if err := CheckID("network", id); err != nil {
		return err
	}
	if err := owner.Given("network", id, req); err != nil {
		return err
	}
	if have == nil {
		return refusal.Errorf(hostpb.Refusal_NOT_FOUND, "no network %q on this host; create the network first", id)
	}
	return owner.Ensure("network", id, have, req)
}

// Peers decides whether a host, which encrypts its overlays or not, may replace the peers of a network. have is nil if the host
// does not have the network.
func Peers(req *hostpb.SetPeersRequest, have *hostpb.Network, encrypts bool) error {
	if err := knownNetwork(req.GetNetworkId(), req, have); err != nil {
		return err
	}
	if have.Overlay == nil {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "network %s has no overlay, so it has no machines on other hosts", req.NetworkId)
	}
	if err := checkPeers(req, have); err != nil {
		return invalid("network %s: %v", req.NetworkId, err)
	}
	return checkKeys(req, encrypts)
}

// checkKeys requires a key of each other host if this host encrypts its overlays, and no key otherwise.
func checkKeys(req *hostpb.SetPeersRequest, encrypts bool) error {
	if !encrypts && len(req.PublicKeys) > 0 {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "the other hosts of network %s encrypt their overlays and this host does not: start its capstand with --overlay-encryption=WireGuard", req.NetworkId)
	}
	if !encrypts {
		return nil
	}
	hosts := map[string]bool{}
	for _, host := range req.Hosts {
		hosts[host] = true
	}
	for _, peer := range req.Peers {
		hosts[peer.Host] = true
	}
	for host := range hosts {
		if req.PublicKeys[host] == "" {
			return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "this host encrypts its overlays, and host %s of network %s has no key: start its capstand with --overlay-encryption=WireGuard", host, req.NetworkId)
		}
	}
	return checkKeyTexts(req.PublicKeys, hosts)
}

// checkKeyTexts refuses invalid keys, one key of two hosts, and keys of hosts that the network does not have.
func checkKeyTexts(keys map[string]string, hosts map[string]bool) error {
	seen := map[string]bool{}
	for host, key := range keys {
		if _, err := wireguard.ParsePublic(key); err != nil {
			return invalid("host %s: %v", host, err)
		}
		if !hosts[host] || seen[key] {
			return invalid("host %s has a key: expected one different key for each host of the network", host)
		}
		seen[key] = true
	}
	return nil
}

// CheckFencing requires a management cluster, and a time in the range that SetFencing accepts.
func CheckFencing(req *hostpb.SetFencingRequest) error {
	if id := req.GetManagementCluster(); id == "" || len(id) > 128 {
		return invalid("fencing: expected the id of a management cluster with at most 128 bytes, found %d bytes", len(id))
	}
	if s := req.GetStopAfterSeconds(); s < 0 || s > 3600 {
		return invalid("fencing: stop_after_seconds is %d: expected 1 to 3600, or 0 to end the fencing", s)
	}
	return nil
}

func checkPeers(req *hostpb.SetPeersRequest, n *hostpb.Network) error {
	if len(req.Peers) > maxPeers || len(req.Hosts) > maxHosts {
		return fmt.Errorf("%d peers and %d hosts: expected at most %d and %d", len(req.Peers), len(req.Hosts), maxPeers, maxHosts)
	}
	subnets, err := subnetsOf(n)
	if err != nil {
		return err
	}
	own, err := tunnelAddress(n.Overlay.Address)
	if err != nil {
		return err
	}
	for _, host := range req.Hosts {
		if err := checkPeerHost(host, own); err != nil {
			return err
		}
	}
	seen := map[string]bool{}
	for _, peer := range req.Peers {
		if err := checkPeer(peer, subnets, own); err != nil {
			return err
		}
		for _, a := range peer.Addresses {
			if seen[a] {
				return fmt.Errorf("two peers have address %s", a)
			}
			seen[a] = true
		}
	}
	return nil
}

// checkPeer requires addresses as machines have them, and another host of the same family as this one.
func checkPeer(peer *hostpb.Peer, subnets []network.Subnet, own netip.Addr) error {
	if len(peer.Addresses) == 0 || len(peer.Addresses) > len(subnets) {
		return fmt.Errorf("a peer has %d addresses: expected 1 to %d, IPv4 first", len(peer.Addresses), len(subnets))
	}
	for i, a := range peer.Addresses {
		if err := network.CheckAddress(subnets[i].Prefix, a, subnets[i].Prefix.Bits()); err != nil {
			return err
		}
		if canonical := netip.MustParseAddr(a).String(); a != canonical {
			return fmt.Errorf("peer address %s: expected the form %s", a, canonical)
		}
	}
	if err := checkPeerHost(peer.Host, own); err != nil {
		return fmt.Errorf("peer %s: %w", peer.Addresses[0], err)
	}
	return nil
}

func checkPeerHost(text string, own netip.Addr) error {
	host, err := tunnelAddress(text)
	switch {
	case err != nil:
		return err
	case host == own:
		return fmt.Errorf("%s is this host: expected other hosts", host)
	case host.Is4() != own.Is4():
		return fmt.Errorf("%s is the address of another host, and %s that of this host: expected addresses of one family", host, own)
	}
	return nil
}

// checkEndpoint accepts an IP address and a port that the load balancer can listen for.
func checkEndpoint(endpoint string) error {
	if endpoint == "" {
		return nil
	}
	at, err := netip.ParseAddrPort(endpoint)
	if err != nil || at.Port() == 0 || !at.Addr().IsGlobalUnicast() || at.Addr().Zone() != "" || at.Addr().Is4In6() {
		return fmt.Errorf("%q is not an endpoint: expected an IP address and a port, for example 192.0.2.10:6443", endpoint)
	}
	return nil
}

// TunnelAddress returns the tunnel address that a host with the networks reports, or "" if none has an overlay. A host has had several only if
// an older manager let it change.
func TunnelAddress(networks iter.Seq[*hostpb.Network]) (first string) {
	for n := range networks {
		if a := n.GetOverlay().GetAddress(); a != "" && (first == "" || a < first) {
			first = a
		}
	}
	return first
}

package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/refusal"
)

// networks is the registry of the cluster networks of this host.
type networks struct {
	*platform
	// users refuses the deletion of a network that has machines or a load balancer.
	users func(networkID string) error
	byID  map[string]*hostpb.Network
	// changed publishes the host's info; mu is held.
	changed func()
	// publishing is held while the addresses of Services change, which takes time. It is taken before mu.
	publishing sync.Mutex
	// neighbourErrors are those of acrossHosts, and routeErrors those of fitsRoutes.
	neighbourErrors, routeErrors lastErrors
	pulses                       pulses
	// serviceErrors are those of holdServices.
	serviceErrors lastErrors
	// unrecorded are the last requests of SetServices, by network, that are in effect and could not be recorded.
	unrecorded map[string]*hostpb.SetServicesRequest
}

func boxNetwork(n *hostpb.Network) network.Network {
	return network.Network{ID: n.Id, CIDR: n.Cidr, IPv6CIDR: n.Ipv6Cidr, Cluster: n.Namespace + "/" + n.Name, Overlay: boxOverlay(n.Overlay), LAN: boxLAN(n.Lan)}
}

// boxLAN converts a LAN that admission.CheckNetwork has checked.
func boxLAN(l *hostpb.LAN) *network.LAN {
	if l == nil {
		return nil
	}
	out := &network.LAN{Bridge: l.Bridge, VLAN: uint16(l.Vlan)}
	for _, text := range l.Pods {
		if pods, err := netip.ParsePrefix(text); err == nil {
			out.Pods = append(out.Pods, pods)
		}
	}
	return out
}

func boxOverlay(o *hostpb.Overlay) *network.Overlay {
	if o == nil {
		return nil
	}
	address, _ := netip.ParseAddr(o.Address) // admission.CheckNetwork has checked it.
	return &network.Overlay{VNI: o.Vni, Address: address, MTU: int(o.Mtu)}
}

// fillNetwork sets a network's outputs. The CIDR is empty if the record of a machine could not be read.
func fillNetwork(n *hostpb.Network) *hostpb.Network {
	if n.Lan != nil {
		n.Bridge = n.Lan.Bridge // The gateway is that of the LAN.
		return n
	}
	if _, gateway, err := network.ParseCIDR(n.Cidr); err == nil {
		n.Gateway, n.Bridge = gateway.String(), network.BridgeName(n.Id)
	}
	return n
}

// routeIPv6 returns whether a network needs the host's forwarding of IPv6; mu is held.
func (ns *networks) routeIPv6() bool {
	for _, n := range ns.byID {
		if boxNetwork(n).RoutesIPv6() {
			return true
		}
	}
	return false
}

// EnsureNetwork creates a cluster's network on this host.
func (ns *networks) EnsureNetwork(ctx context.Context, n *hostpb.Network) (*hostpb.Network, error) {
	if err := admission.CheckNetwork(n); err != nil {
		return nil, err
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if err := ns.ensure(ctx, n, false); err != nil {
		return nil, err
	}
	return fillNetwork(proto.CloneOf(ns.byID[n.Id])), nil
}

// onDemand marks a network that EnsureMachine created. It is removed with its last machine.
const onDemand = "on-demand"

// ensure creates and records a network; mu is held.
func (ns *networks) ensure(ctx context.Context, n *hostpb.Network, demanded bool) error {
	if err := admission.Network(n, maps.Values(ns.byID)); err != nil {
		return err
	}
	if err := ns.hasTunnelAddress(n); err != nil {
		return err
	}
	if err := ns.fitsRoutes(ctx, n); err != nil {
		return networkError(err)
	}
	if err := ns.box.Ensure(ctx, boxNetwork(n)); err != nil {
		if ns.byID[n.Id] == nil { // remove the part that was created
			err = errors.Join(err, ns.abandon(ctx, n.Id))
		}
		return networkError(err)
	}
	known := ns.byID[n.Id] != nil
	if known && atomicfile.Exists(specFile(ns.store.path(networksDir, n.Id))) {
		if !demanded {
			return atomicfile.Remove(ns.store.path(networksDir, n.Id, onDemand))
		}
		return nil
	}
	n = &hostpb.Network{Id: n.Id, Namespace: n.Namespace, Name: n.Name, Cidr: n.Cidr, Ipv6Cidr: n.Ipv6Cidr, Overlay: n.Overlay, Lan: n.Lan}
	files := map[string][]byte{}
	if demanded {
		files[onDemand] = nil
	}
	if err := ns.store.create(networksDir, n.Id, n, files); err != nil {
		if !known { // Machines may use a network whose damaged record could not be restored.
			err = errors.Join(err, ns.abandon(ctx, n.Id))
		}
		return status.Errorf(codes.Internal, "recording network: %v", err)
	}
	ns.byID[n.Id] = n
	ns.log.Info("Network created", "cluster", n.Namespace+"/"+n.Name, "id", n.Id, "cidr", n.Cidr, "ipv6CIDR", n.Ipv6Cidr, "bridge", boxNetwork(n).Bridge(), "vlan", n.GetLan().GetVlan())
	ns.changed()
	return nil
}

// abandon removes the parts of a network without a record, also for a caller that does not wait any more.
func (ns *networks) abandon(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTimeout)
	defer cancel()
	return ns.box.Release(ctx, id)
}

// fitsRoutes refuses a new network that overlaps a route of the host, or that contains an address which the host reaches by its default route
// and needs; mu is held. For one that exists, also through another capstand of the box, an overlap is logged: its machines have the addresses,
// and a wider route, for example of a VPN, does not affect them. The manager can be one of its machines. The tunnels of the host are for new
// networks only: to read them with each machine takes too long.
func (ns *networks) fitsRoutes(ctx context.Context, n *hostpb.Network) error {
	var needed []network.UsedRange
	for _, server := range nameServers(resolvConf(hostResolvConf)) {
		needed = append(needed, network.Used(server, "the host's name server"))
	}
	if _, onBox := ns.box.Network(n.Id); !onBox && ns.byID[n.Id] == nil {
		tunnels, err := ns.box.Tunnels()
		if err != nil {
			return err
		}
		return ns.box.FitsRoutes(boxNetwork(n), slices.Concat(needed, tunnels, callerOf(ctx))...)
	}
	if err := ns.box.FitsRoutes(boxNetwork(n), needed...); ns.routeErrors.news(n.Id, err) {
		ns.log.Warn("The host reaches a part of a network of machines elsewhere, and packets may take the wrong way", "cluster", n.Namespace+"/"+n.Name, "id", n.Id, "error", err)
	}
	return nil
}

// callerOf returns the address of the manager that calls through a network.
func callerOf(ctx context.Context) []network.UsedRange {
	if caller, ok := peer.FromContext(ctx); ok {
		if at, err := netip.ParseAddrPort(caller.Addr.String()); err == nil {
			return []network.UsedRange{network.Used(at.Addr(), "the manager")}
		}
	}
	return nil
}

// hasTunnelAddress refuses a new network with a tunnel address of another host; mu is held. A network that exists keeps its
// address, which the host may get only a while after its start.
func (ns *networks) hasTunnelAddress(n *hostpb.Network) error {
	overlay := boxOverlay(n.Overlay)
	if overlay == nil || ns.byID[n.Id] != nil {
		return nil
	}
	has, err := network.HasAddress(overlay.Address)
	if err != nil {
		return status.Errorf(codes.Internal, "addresses of the host: %v", err)
	}
	if !has {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "tunnel address %s is not an address of this host: correct spec.tunnelAddress of its CapstanHost", overlay.Address)
	}
	if err := network.FitsLink(*overlay, ns.box.Link != nil); err != nil {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "%v", err)
	}
	return nil
}

// tunnelProblems explains, for networks that exist, what hasTunnelAddress refuses for a new one: an address can go to another interface, or
// its interface can get a smaller MTU.
func (ns *networks) tunnelProblems(overlays []*hostpb.Network) ([]string, error) {
	ends := map[network.Overlay]bool{}
	for _, n := range overlays {
		overlay := boxOverlay(n.Overlay)
		ends[network.Overlay{Address: overlay.Address, MTU: overlay.MTU}] = true
	}
	problems := map[string]bool{}
	for end := range ends {
		has, err := network.HasAddress(end.Address)
		if err != nil {
			return nil, err
		}
		if !has {
			problems[fmt.Sprintf("tunnel address %s is not an address of this host any more: give it to the host again", end.Address)] = true
		} else if err := network.FitsLink(end, ns.box.Link != nil); err != nil {
			problems[err.Error()] = true
		}
	}
	return slices.Sorted(maps.Keys(problems)), nil
}

// peersFile contains the last request of SetPeers for a network.
const peersFile = "peers.json"

// SetPeers replaces the machines of a network on other hosts.
func (ns *networks) SetPeers(ctx context.Context, req *hostpb.SetPeersRequest) (*hostpb.SetPeersResponse, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if err := admission.Peers(req, ns.byID[req.GetNetworkId()], ns.box.Link != nil); err != nil {
		return nil, err
	}
	// Without a record, for example on a full disk, the peers are in effect until a reboot. The caller tries again.
	unrecorded := writeSpec(ns.store.path(networksDir, req.NetworkId, peersFile), req)
	ns.fence.Begin(req.NetworkId)
	if err := ns.box.SetPeers(ctx, req.NetworkId, boxPeers(req)); err != nil {
		return nil, status.Errorf(codes.Internal, "peers of network %s: %v", req.NetworkId, errors.Join(err, unrecorded))
	}
	if unrecorded != nil {
		return nil, status.Errorf(codes.Internal, "recording peers: %v", unrecorded)
	}
	return &hostpb.SetPeersResponse{}, nil
}

// boxPeers converts a request that admission.Peers has checked.
func boxPeers(req *hostpb.SetPeersRequest) (p network.Peers) {
	for _, host := range req.Hosts {
		p.Hosts = append(p.Hosts, netip.MustParseAddr(host))
	}
	for host, key := range req.PublicKeys {
		if p.Keys == nil {
			p.Keys = map[netip.Addr]string{}
		}
		p.Keys[netip.MustParseAddr(host)] = key
	}
	for _, peer := range req.Peers {
		machine := network.Peer{Host: netip.MustParseAddr(peer.Host)}
		for _, a := range peer.Addresses {
			machine.Addresses = append(machine.Addresses, netip.MustParseAddr(a))
		}
		p.Machines = append(p.Machines, machine)
	}
	return p
}

// restorePeers writes the recorded peers of a network after a reboot; mu is held. Until then the box has its own record,
// which is newer if another capstand of the box wrote it.
func (p *platform) restorePeers(n *hostpb.Network) error {
	if n.Overlay == nil || p.box.HasPeers(n.Id) {
		return nil
	}
	peers, err := p.recordedPeers(n)
	if err == nil {
		err = p.box.SetPeers(p.ctx, n.Id, peers)
	}
	return atomicfile.IgnoreMissing(err)
}

// recordedPeers reads the record of the last SetPeers for a network.
func (p *platform) recordedPeers(n *hostpb.Network) (network.Peers, error) {
	req := &hostpb.SetPeersRequest{}
	err := readSpec(p.store.path(networksDir, n.Id, peersFile), req)
	if err == nil {
		err = admission.Peers(req, n, p.box.Link != nil)
	}
	if err != nil {
		return network.Peers{}, err
	}
	return boxPeers(req), nil
}

// neighbours are Box.Neighbours. After a reboot, the record of capstand has them until the network is repaired: a machine that fencing
// would have stopped must not start because the repair fails.
func (ns *networks) neighbours(n *hostpb.Network) (own netip.Addr, others map[netip.Addr]netip.Addr, err error) {
	own, others, err = ns.box.Neighbours(boxNetwork(n))
	if err != nil || len(others) > 0 || ns.box.HasPeers(n.Id) {
		return own, others, err
	}
	peers, err := ns.recordedPeers(n)
	own, others = boxNetwork(n).Neighbours(peers)
	return own, others, atomicfile.IgnoreMissing(err)
}

// DeleteNetwork removes a cluster's network from this host. An unknown network is no error.
func (ns *networks) DeleteNetwork(ctx context.Context, req *hostpb.DeleteNetworkRequest) (*hostpb.DeleteNetworkResponse, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if err := admission.Deletion("network", req, ns.byID[req.Id]); err != nil {
		return nil, err
	}
	if err := ns.users(req.Id); err != nil {
		return nil, err
	}
	if ns.byID[req.Id] == nil {
		return &hostpb.DeleteNetworkResponse{}, nil
	}
	return &hostpb.DeleteNetworkResponse{}, ns.delete(ctx, req.Id)
}

// delete removes a network; mu is held. The record is removed last, so that the deletion continues after a crash.
func (ns *networks) delete(ctx context.Context, id string) error {
	if err := ns.box.Release(ctx, id); err != nil {
		return status.Errorf(codes.Internal, "network %s: %v", id, err)
	}
	if err := ns.store.discard(ns.store.path(networksDir, id)); err != nil {
		return status.Errorf(codes.Internal, "network %s: %v", id, err)
	}
	delete(ns.byID, id)
	delete(ns.unrecorded, id)
	ns.routeErrors.news(id, nil)
	ns.log.Info("Network removed", "id", id)
	ns.changed()
	ns.emptyTrash()
	return nil
}

// deleteUnused removes a network that EnsureMachine created and that has no machine any more; mu is held.
func (ns *networks) deleteUnused(ctx context.Context, id string) error {
	if ns.users(id) != nil || !atomicfile.Exists(ns.store.path(networksDir, id, onDemand)) {
		return nil
	}
	return ns.delete(ctx, id)
}

// unlease releases the addresses of a machine that is not recorded, and its network if EnsureMachine created it and it
// has no machine; mu is held.
func (ns *networks) unlease(ctx context.Context, networkID, machineID string) error {
	return errors.Join(ns.box.Unlease(networkID, machineID), ns.deleteUnused(ctx, networkID))
}

// unleaseUnrecorded releases the addresses that a machine without a record has in any network; mu is held.
func (ns *networks) unleaseUnrecorded(ctx context.Context, machineID string) error {
	for id := range ns.byID {
		if err := ns.unlease(ctx, id, machineID); err != nil {
			return status.Errorf(codes.Internal, "addresses of machine %s: %v", machineID, err)
		}
	}
	return nil
}

// served returns the addresses that the network's bridge must have for a load balancer; mu is held. The bridge of a LAN gets its virtual
// address with the election.
func (ns *networks) served(spec *hostpb.LoadBalancer, listen []string) ([]string, error) {
	n := ns.byID[spec.NetworkId]
	if err := admission.BalancerNetwork(spec, n); err != nil {
		return nil, err
	}
	if n.Lan != nil {
		return nil, nil
	}
	return network.Served(n.Cidr, listen)
}

// serve gives the network's bridge the addresses that a load balancer listens on; mu is held.
func (ns *networks) serve(spec *hostpb.LoadBalancer, listen []string) error {
	return ns.serveWith(spec, listen, ns.box.Serve, ns.box.Redirect)
}

// serveAgain is serve for a load balancer that is recorded on disk: its owner may have moved it to another capstand of the box; mu is held.
func (ns *networks) serveAgain(spec *hostpb.LoadBalancer, listen []string) error {
	return ns.serveWith(spec, listen, ns.box.ServeAgain, ns.box.RedirectAgain)
}

func (ns *networks) serveWith(spec *hostpb.LoadBalancer, listen []string, serve func(networkID, balancerID, name string, addresses []string) error,
	redirectTo func(context.Context, string, network.Redirect) error,
) error {
	addresses, err := ns.served(spec, listen)
	if err != nil {
		return err
	}
	redirect, err := ns.redirect(spec, listen)
	if err != nil {
		return err
	}
	if err := serve(spec.NetworkId, spec.Id, spec.Namespace+"/"+spec.Name, addresses); err != nil {
		return err
	}
	return redirectTo(ns.ctx, spec.NetworkId, redirect)
}

// unserve takes the addresses of a load balancer from the network's bridge, and ends its redirection.
func (ns *networks) unserve(ctx context.Context, spec *hostpb.LoadBalancer) error {
	return errors.Join(ns.box.Serve(spec.NetworkId, spec.Id, "", nil), ns.box.Redirect(ctx, spec.NetworkId, network.Redirect{Balancer: spec.Id}))
}

// redirect returns the rule that sends connections to the cluster's endpoint to a load balancer; mu is held. A LAN needs no such rule:
// the load balancer listens at the endpoint itself. The result then has no addresses.
func (ns *networks) redirect(spec *hostpb.LoadBalancer, listen []string) (network.Redirect, error) {
	n := ns.byID[spec.NetworkId]
	if n.Lan != nil {
		return network.Redirect{Balancer: spec.Id}, nil
	}
	subnets, err := network.Subnets(n.Cidr, n.Ipv6Cidr)
	if err != nil {
		return network.Redirect{}, err
	}
	redirect, err := network.ChooseRedirect(spec.Id, spec.Endpoint, listen, subnets)
	redirect.Virtual = spec.VirtualAddress != nil
	return redirect, err
}

// lan returns the LAN of a load balancer, or nil; mu is held.
func (ns *networks) lan(spec *hostpb.LoadBalancer) *network.LAN {
	return boxLAN(ns.byID[spec.NetworkId].GetLan())
}

// listenAddresses returns the listen addresses of a load balancer, with its network's gateway filled in; mu is held.
func (ns *networks) listenAddresses(spec *hostpb.LoadBalancer) ([]string, error) {
	n := ns.byID[spec.NetworkId]
	if err := admission.BalancerNetwork(spec, n); err != nil {
		return nil, err
	}
	listen, err := listenAddresses(spec.Listen, fillNetwork(proto.CloneOf(n)).Gateway)
	if err != nil {
		return nil, refusal.Errorf(hostpb.Refusal_INVALID, "load balancer %s/%s: %v", spec.Namespace, spec.Name, err)
	}
	return listen, nil
}

// networkError returns the refusal for an error of package network.
func networkError(err error) error {
	var inUse network.InUseError
	var conflict network.ConflictError
	switch {
	case errors.As(err, &inUse) && inUse.Address != "":
		return refusal.About(hostpb.Refusal_ADDRESS_IN_USE, inUse.Address, "%v", err)
	case errors.As(err, &inUse):
		return refusal.Errorf(hostpb.Refusal_ID_IN_USE, "%v", err)
	case errors.As(err, &conflict):
		return refusal.About(hostpb.Refusal_NETWORK_CONFLICT, conflict.Subject, "%v", err)
	}
	return status.Error(codes.Internal, err.Error())
}

package admission

import (
	"fmt"
	"iter"
	"net"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/host/refusal"
)

// BalancerCgroup is the prefix of the names of the cgroups of load balancers. Those of machines are the ids.
const BalancerCgroup = "balancer-"

// NewMachine decides whether a host may create a machine whose spec CheckMachine accepted. deleted is true if the host
// deleted a machine of that id within the last day. others are the machines of the host.
func NewMachine(spec *hostpb.MachineSpec, info *hostpb.HostInfo, deleted bool, others iter.Seq[*hostpb.MachineSpec]) error {
	if deleted {
		return refusal.Errorf(hostpb.Refusal_DELETED, "machine %s was deleted within the last day: create it again with a new id", spec.Id)
	}
	if strings.HasPrefix(spec.Id, BalancerCgroup) { // The machine and a load balancer would end each other.
		return invalid("machine id %q is not valid: ids of new machines do not begin with %s", spec.Id, BalancerCgroup)
	}
	for other := range others {
		if owner.Same(other, spec) {
			return refusal.Errorf(hostpb.Refusal_NAME_IN_USE, "machine %s/%s is %s on this host, not %s: it belongs to another management cluster or to an earlier object of that name; delete it first",
				spec.Namespace, spec.Name, other.Id, spec.Id)
		}
	}
	if err := provided(spec, info); err != nil {
		return err
	}
	if err := hasDevices(spec, info); err != nil {
		return err
	}
	return fits(spec, info)
}

// sameMachine decides whether a request can be about a machine that exists: it must have the same owner and spec.
func sameMachine(have, want *hostpb.MachineSpec) error {
	if err := owner.Ensure("machine", have.Id, have, want); err != nil {
		return err
	}
	return unchanged(have, want)
}

// FreeAddresses refuses the addresses that another machine of the network has (ADDRESS_IN_USE). capstand does not need
// it: its leases also cover the other hosts of the box.
func FreeAddresses(spec *hostpb.MachineSpec, others iter.Seq[*hostpb.MachineSpec]) error {
	for other := range others {
		if other.Id == spec.Id || other.GetNetwork().GetId() != spec.GetNetwork().GetId() {
			continue
		}
		for _, a := range spec.Addresses {
			if slices.ContainsFunc(other.Addresses, func(b *hostpb.Address) bool { return a.Address == b.Address }) {
				return refusal.About(hostpb.Refusal_ADDRESS_IN_USE, a.Address, "address %s belongs to machine %s/%s (%s) of this host",
					a.Address, other.Namespace, other.Name, other.Id)
			}
		}
	}
	return nil
}

// Network decides whether a host may create or keep a network whose description CheckNetwork accepted. others are the
// networks of the host, which may include the network itself. It reads them several times.
func Network(n *hostpb.Network, others iter.Seq[*hostpb.Network]) error {
	for other := range others {
		if other.Id == n.Id {
			if err := owner.Ensure("network", n.Id, other, n); err != nil {
				return err
			}
		} else if owner.Same(other, n) {
			return refusal.Errorf(hostpb.Refusal_NAME_IN_USE, "cluster %s/%s has network %s on this host, not %s: it belongs to another cluster of that name; delete that cluster first",
				n.Namespace, n.Name, other.Id, n.Id)
		}
	}
	for other := range others {
		if other.Id == n.Id && !proto.Equal(other.Lan, n.Lan) {
			return refusal.About(hostpb.Refusal_NETWORK_CONFLICT, n.Cidr, "network %s has LAN {%v} on this host and cannot get {%v}; delete the machines of the cluster on this host first", n.Id, other.Lan, n.Lan)
		}
	}
	return sameOverlay(n, others)
}

// NoOverlap refuses a network whose CIDRs overlap another network, or differ from those that it has already
// (NETWORK_CONFLICT). capstand does not need it: its box also covers other hosts and the routes of the box.
func NoOverlap(n *hostpb.Network, others iter.Seq[*hostpb.Network]) error {
	subnets, err := subnetsOf(n)
	if err != nil {
		return invalid("cluster %s/%s: %v", n.Namespace, n.Name, err)
	}
	for other := range others {
		if other.Id == n.Id {
			if other.Cidr != n.Cidr || other.Ipv6Cidr != n.Ipv6Cidr {
				return refusal.About(hostpb.Refusal_NETWORK_CONFLICT, n.Cidr, "network %s is %s on this host and cannot become %s; delete the cluster first", n.Id, other.Cidr, n.Cidr)
			}
			continue
		}
		if n.Lan != nil || other.Lan != nil {
			continue // The host has no route to a LAN.
		}
		if err := disjoint(subnets, other); err != nil {
			return err
		}
	}
	return nil
}

// disjoint refuses subnets that another network uses. Users of other namespaces read the message, so it does not name the cluster.
func disjoint(subnets []network.Subnet, other *hostpb.Network) error {
	theirs, _ := subnetsOf(other)
	for _, subnet := range subnets {
		for _, used := range theirs {
			if used.Prefix.Overlaps(subnet.Prefix) {
				return refusal.About(hostpb.Refusal_NETWORK_CONFLICT, subnet.Prefix.String(), "network %s overlaps %s of another cluster; choose another network for the machines",
					subnet.Prefix, used.Prefix)
			}
		}
	}
	return nil
}

// UnusedNetwork refuses the deletion of a network that has machines or a load balancer (NETWORK_IN_USE).
func UnusedNetwork(id string, machines iter.Seq[*hostpb.MachineSpec], balancers iter.Seq[*hostpb.LoadBalancer]) error {
	for m := range machines {
		if m.GetNetwork().GetId() == id {
			return refusal.Errorf(hostpb.Refusal_NETWORK_IN_USE, "network %s has machine %s/%s; delete its machines first", id, m.Namespace, m.Name)
		}
	}
	for lb := range balancers {
		if lb.NetworkId == id {
			return refusal.Errorf(hostpb.Refusal_NETWORK_IN_USE, "network %s has load balancer %s/%s; delete it first", id, lb.Namespace, lb.Name)
		}
	}
	return nil
}

// LoadBalancer decides whether a host may create or change a load balancer that CheckLoadBalancer accepted. others are
// the load balancers of the host, which may include the load balancer itself.
func LoadBalancer(lb *hostpb.LoadBalancer, others iter.Seq[*hostpb.LoadBalancer]) error {
	for other := range others {
		if other.Id == lb.Id {
			if err := owner.Ensure("load balancer", lb.Id, other, lb); err != nil {
				return err
			}
		} else if owner.Same(other, lb) {
			return refusal.Errorf(hostpb.Refusal_NAME_IN_USE, "load balancer %s/%s is %s on this host, not %s: it belongs to another cluster of that name; delete that cluster first",
				lb.Namespace, lb.Name, other.Id, lb.Id)
		}
	}
	return nil
}

// Request is a request about an object that the host may have.
type Request interface {
	owner.Object
	GetId() string
}

// Deletion decides whether a request may delete an object. have has no name if the host does not have the object: the
// deletion then succeeds without an effect.
func Deletion(what string, req Request, have owner.Object) error {
	if err := CheckID(what, req.GetId()); err != nil {
		return err
	}
	if err := owner.Given(what, req.GetId(), req); err != nil || have.GetName() == "" {
		return err
	}
	return owner.Delete(what, req.GetId(), have, req)
}

// Owned decides whether a request is for a machine of this host, and from its owner. have is nil if the host does not have the machine (NOT_FOUND).
func Owned(req Request, have *hostpb.MachineSpec) error {
	if err := owner.Given("machine", req.GetId(), req); err != nil {
		return err
	}
	if have == nil {
		return NoMachine(req.GetId())
	}
	return owner.Ensure("machine", req.GetId(), have, req)
}

// NoMachine is the refusal of a call about a machine that the host does not have (NOT_FOUND).
func NoMachine(id string) error {
	return refusal.Errorf(hostpb.Refusal_NOT_FOUND, "no machine %q on this host", id)
}

// BalancerNetwork decides whether a load balancer can listen in its network. n is nil if the host does not have the network
// (NOT_FOUND). Hosts are no gateways of a network of the user: a load balancer there listens at its virtual address only (UNSUPPORTED). Its
// backends are machines of the network (INVALID).
func BalancerNetwork(lb *hostpb.LoadBalancer, n *hostpb.Network) error {
	switch {
	case n == nil:
		return refusal.Errorf(hostpb.Refusal_NOT_FOUND, "load balancer %s/%s: no network %q on this host; create the network first", lb.Namespace, lb.Name, lb.NetworkId)
	case n.Lan != nil && !atVirtualAddress(lb, n.Cidr):
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "load balancer %s/%s: network %s is the LAN %s, where a load balancer listens at its virtual address only: expected one of the LAN, found the listen addresses %v and the virtual address %q",
			lb.Namespace, lb.Name, lb.NetworkId, n.Cidr, lb.Listen, lb.VirtualAddress.GetAddress())
	}
	for _, b := range lb.Backends {
		if err := checkBackend(b, n); err != nil {
			return refusal.Errorf(hostpb.Refusal_INVALID, "load balancer %s/%s: backend %s: %v", lb.Namespace, lb.Name, b.Name, err)
		}
	}
	return nil
}

// checkBackend returns an error unless a machine of the network can have the address of a backend. A load balancer is in the network namespace
// of the host, so it could otherwise reach programs of the host and other networks for a tenant.
func checkBackend(b *hostpb.Backend, n *hostpb.Network) error {
	cidr, err := netip.ParsePrefix(n.Cidr)
	if err != nil {
		return err
	}
	address, _, err := net.SplitHostPort(b.Address)
	if err != nil {
		return err
	}
	if n.Lan == nil {
		return network.CheckAddress(cidr, address, cidr.Bits())
	}
	if a, err := netip.ParseAddr(address); err != nil || !cidr.Contains(a) {
		return fmt.Errorf("expected an address of the LAN %s, found %q", cidr, address)
	}
	return nil
}

// atVirtualAddress returns whether a load balancer that CheckLoadBalancer accepted listens at its virtual address only, and in the network.
func atVirtualAddress(lb *hostpb.LoadBalancer, cidr string) bool {
	network, err := netip.ParsePrefix(cidr)
	address, invalid := netip.ParseAddr(lb.VirtualAddress.GetAddress())
	return err == nil && invalid == nil && network.Contains(address) && slices.Equal(lb.Listen, []string{lb.Endpoint})
}

package admission

import (
	"fmt"
	"net/netip"
	"slices"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/refusal"
)

// Services decides whether a host may replace the Services that it publishes for a cluster. have is nil if the host does not
// have the network.
func Services(req *hostpb.SetServicesRequest, have *hostpb.Network) error {
	if err := knownNetwork(req.GetNetworkId(), req, have); err != nil {
		return err
	}
	if have.Lan != nil && len(req.Services) > 0 {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "network %s is a LAN, where hosts publish no Services", req.NetworkId)
	}
	if err := checkServices(req, have); err != nil {
		return invalid("network %s: %v", req.NetworkId, err)
	}
	return nil
}

func checkServices(req *hostpb.SetServicesRequest, n *hostpb.Network) error {
	if len(req.Services) > hostpb.MaxServices {
		return fmt.Errorf("%d Services: expected at most %d", len(req.Services), hostpb.MaxServices)
	}
	subnets, err := subnetsOf(n)
	if err != nil {
		return err
	}
	ports, taken := 0, places{}
	for _, s := range req.Services {
		if err := checkService(s, subnets); err != nil {
			return fmt.Errorf("service %.*q: %w", hostpb.MaxServiceName, s.Name, err)
		}
		if err := taken.add(s); err != nil {
			return err
		}
		ports += len(s.Ports)
	}
	if ports > hostpb.MaxServicePorts {
		return fmt.Errorf("the Services have %d ports: expected at most %d", ports, hostpb.MaxServicePorts)
	}
	return nil
}

// places are the addresses of Services, and the ports of each address of the host.
type places map[string]map[string]bool

// add takes the place of a Service. A nil map of ports means that a Service has the whole address.
func (p places) add(s *hostpb.PublishedService) error {
	ports, seen := p[s.Address]
	if seen && (!s.HostPorts || ports == nil) {
		return fmt.Errorf("two Services have the address %s", s.Address)
	}
	if !s.HostPorts {
		p[s.Address] = nil
		return nil
	}
	if !seen {
		ports = map[string]bool{}
		p[s.Address] = ports
	}
	names := []string{s.Name}
	for _, port := range s.Ports {
		names = append(names, fmt.Sprintf("%s port %d", port.Protocol, port.Port))
	}
	for _, name := range names {
		if ports[name] {
			return fmt.Errorf("%s is there twice at the address %s", name, s.Address)
		}
		ports[name] = true
	}
	return nil
}

func checkService(s *hostpb.PublishedService, subnets []network.Subnet) error {
	address, err := netip.ParseAddr(s.Address)
	switch {
	case err != nil || address.Is4In6() || address.Zone() != "" || !address.IsGlobalUnicast() || address.String() != s.Address:
		return fmt.Errorf("address %q: expected a global unicast address in its canonical form", s.Address)
	case len(s.Name) > hostpb.MaxServiceName:
		return fmt.Errorf("a name of %d bytes: expected at most %d", len(s.Name), hostpb.MaxServiceName)
	case len(s.Ports) == 0:
		return fmt.Errorf("address %s has no port", s.Address)
	case len(s.Machines) > hostpb.MaxServiceMachines:
		return fmt.Errorf("%d machines: expected at most %d", len(s.Machines), hostpb.MaxServiceMachines)
	case len(s.SourceRanges) > hostpb.MaxSourceRanges:
		return fmt.Errorf("%d source ranges: expected at most %d", len(s.SourceRanges), hostpb.MaxSourceRanges)
	}
	if err := checkPorts(s.Ports); err != nil {
		return err
	}
	i := slices.IndexFunc(subnets, func(n network.Subnet) bool { return n.Prefix.Addr().Is6() == address.Is6() })
	if i < 0 {
		return fmt.Errorf("address %s: the network of the machines, %s, has no addresses of this family", s.Address, subnets[0].Prefix)
	}
	subnet, seen := subnets[i], map[string]bool{}
	for _, m := range s.Machines {
		if err := network.CheckAddress(subnet.Prefix, m, subnet.Prefix.Bits()); err != nil {
			return err
		}
		if seen[m] {
			return fmt.Errorf("machine %s is there twice", m)
		}
		seen[m] = true
	}
	for _, r := range s.SourceRanges {
		prefix, err := netip.ParsePrefix(r)
		if err != nil || prefix.Addr().Is4() != address.Is4() || prefix.Addr().Is4In6() || prefix != prefix.Masked() {
			return fmt.Errorf("source range %q: expected a network of the family of %s without host bits, for example 192.0.2.0/24 or 2001:db8::/64", r, address)
		}
	}
	return nil
}

func checkPorts(ports []*hostpb.PublishedPort) error {
	type port struct {
		protocol hostpb.PublishedPort_Protocol
		number   uint32
	}
	seen := map[port]bool{}
	for _, p := range ports {
		switch {
		case p.Protocol != hostpb.PublishedPort_TCP && p.Protocol != hostpb.PublishedPort_UDP:
			return fmt.Errorf("port %d has the protocol %s: expected TCP or UDP", p.Port, p.Protocol)
		case p.Port == 0 || p.Port > 65535 || p.NodePort == 0 || p.NodePort > 65535:
			return fmt.Errorf("port %d with node port %d: expected ports from 1 to 65535", p.Port, p.NodePort)
		case seen[port{p.Protocol, p.Port}]:
			return fmt.Errorf("port %d of %s is there twice", p.Port, p.Protocol)
		}
		seen[port{p.Protocol, p.Port}] = true
	}
	return nil
}

package network

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// toServices returns the rules that lead connections to Services to machines. A Service without machines has none.
func (f firewall) toServices() (rules []string) {
	for _, s := range f.services {
		for _, p := range s.Ports {
			if len(s.Machines) > 0 {
				rules = append(rules, fmt.Sprintf("%s daddr %s %s dport %d%s dnat %[1]s to %[6]s",
					family(s.Address), s.Address, p.Protocol, p.Port, sources(s.Sources), machines(s.Machines, p.NodePort)))
			}
		}
	}
	return rules
}

func sources(networks []netip.Prefix) string {
	if len(networks) == 0 {
		return ""
	}
	return " " + family(networks[0].Addr()) + " saddr { " + join(networks) + " }"
}

// machines returns the target of a translation: one machine at random for each connection.
func machines(addresses []netip.Addr, port uint16) string {
	if len(addresses) == 1 {
		return netip.AddrPortFrom(addresses[0], port).String()
	}
	var all []string
	for i, a := range addresses {
		all = append(all, fmt.Sprintf("%d : %s . %d", i, a, port))
	}
	return fmt.Sprintf("numgen random mod %d map { %s }", len(addresses), strings.Join(all, ", "))
}

// admitServices accepts forwarded connections that were translated from a port of a Service, and no others: a client that
// sends to the port of a machine is not a client of the Service.
func (f firewall) admitServices() (rules []string) {
	for _, s := range f.services {
		for _, protocol := range []string{"tcp", "udp"} {
			var ports []string
			for _, p := range s.Ports {
				if p.Protocol == protocol {
					ports = append(ports, strconv.Itoa(int(p.Port)))
				}
			}
			if len(ports) > 0 {
				rules = append(rules, fmt.Sprintf("oifname %s ct status dnat ct original %s daddr %s meta l4proto %s ct original proto-dst { %s } accept",
					BridgeName(f.networkID), family(s.Address), s.Address, protocol, strings.Join(ports, ", ")))
			}
		}
	}
	return rules
}

// protectHost keeps clients at the address of a Service away from the programs of the host that listen on all addresses. The
// host answers ping, and questions for the MAC address of an IPv6 address: nft reads the name of ICMPv6, 58, from a file that a host can lack.
func (f firewall) protectHost() (rules []string) {
	of := map[string][]netip.Addr{}
	for _, s := range f.services {
		if s.HostPorts {
			rules = append(rules, s.protectPorts()...)
			continue
		}
		of[family(s.Address)] = append(of[family(s.Address)], s.Address)
	}
	for _, ip := range []string{"ip", "ip6"} {
		if len(of[ip]) > 0 {
			rules = append(rules, fmt.Sprintf("%s daddr { %s } meta l4proto != { 1, 58 } ct state != { established, related } drop", ip, join(of[ip])))
		}
	}
	return rules
}

func join[T fmt.Stringer](all []T) string {
	texts := make([]string, 0, len(all))
	for _, a := range all {
		texts = append(texts, a.String())
	}
	return strings.Join(texts, ", ")
}

package nodeconfig

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// CoreDNS contains the user's settings of the cluster's DNS server.
type CoreDNS struct {
	// Upstreams are the servers of other names; empty means the resolvers of the machine. A server is an address, or an address
	// with a port.
	Upstreams []string `json:"upstreams,omitempty"`
	// StubDomains have servers of their own.
	StubDomains []StubDomain `json:"stubDomains,omitempty"`
}

// StubDomain is a domain with servers of its own.
type StubDomain struct {
	Domain  string   `json:"domain"`
	Servers []string `json:"servers"`
}

// reverseZones are the domains of all addresses. CoreDNS answers for the addresses of pods and Services in them.
var reverseZones = []string{"arpa", "in-addr.arpa", "ip6.arpa"}

// Check returns an error unless CoreDNS can work with the settings in the cluster's network. Its configuration contains the
// values as they are, so nothing else may be in them.
func (c *CoreDNS) Check(network Network) error {
	if c == nil {
		return nil
	}
	errs := checkServers("upstreams", c.Upstreams, network)
	for i, stub := range c.StubDomains {
		path := fmt.Sprintf("stubDomains[%d]", i)
		if strings.ContainsFunc(stub.Domain, notOfDomain) || stub.Domain == "" {
			errs = append(errs, fmt.Errorf("%s.domain: expected a domain, found %q", path, stub.Domain))
		}
		if holds(stub.Domain, network.ServiceDomain) || holds(network.ServiceDomain, stub.Domain) || slices.Contains(reverseZones, stub.Domain) {
			errs = append(errs, fmt.Errorf("%s.domain: %q would answer for names of the cluster in %s or for its addresses; expected another domain",
				path, stub.Domain, network.ServiceDomain))
		}
		if len(stub.Servers) == 0 {
			errs = append(errs, fmt.Errorf("%s.servers: expected at least one server", path))
		}
		errs = append(errs, checkServers(path+".servers", stub.Servers, network)...)
	}
	return errors.Join(errs...)
}

func notOfDomain(r rune) bool {
	return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789-_.", r)
}

// holds says whether a domain is the other one, or contains it.
func holds(domain, other string) bool {
	return domain == other || strings.HasSuffix(other, "."+domain)
}

func checkServers(path string, servers []string, network Network) []error {
	var errs []error
	for i, text := range servers {
		server, err := ParseDNSServer(text)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s[%d]: %w", path, i, err))
		case server.Addr().String() == network.DNSServiceIP:
			errs = append(errs, fmt.Errorf("%s[%d]: %s is the address of this DNS server itself; expected another server", path, i, text))
		}
	}
	return errs
}

// ParseDNSServer reads an address, or an address with a port.
func ParseDNSServer(text string) (netip.AddrPort, error) {
	if ip, err := netip.ParseAddr(text); err == nil && ip.Zone() == "" && usable(ip) {
		return netip.AddrPortFrom(ip, 53), nil
	}
	server, err := netip.ParseAddrPort(text)
	if err != nil || server.Port() == 0 || server.Addr().Zone() != "" || !usable(server.Addr()) {
		return netip.AddrPort{}, fmt.Errorf("expected the address of a DNS server such as 10.0.0.53, 10.0.0.53:5353 or [fd00::53]:5353, found %q", text)
	}
	return server, nil
}

func usable(ip netip.Addr) bool { return !ip.IsUnspecified() && !ip.IsMulticast() }

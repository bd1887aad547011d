package provision

import (
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// proxyEnvironment returns the environment of a service that uses the HTTP proxy. Programs read the names in lower or upper case.
func (n *node) proxyEnvironment() []string {
	if n.Proxy == nil {
		return nil
	}
	var out []string
	for _, v := range []struct{ name, value string }{
		{"HTTP_PROXY", n.Proxy.HTTP}, {"HTTPS_PROXY", n.Proxy.HTTPS}, {"NO_PROXY", strings.Join(n.noProxy(), ",")},
	} {
		if v.value != "" {
			out = append(out, v.name+"="+v.value, strings.ToLower(v.name)+"="+v.value)
		}
	}
	return out
}

// apiServerEnvironment returns the environment of the API server.
func (n *node) apiServerEnvironment() []string {
	if n.Proxy == nil || !n.Proxy.ControlPlane {
		return nil
	}
	return n.proxyEnvironment()
}

// noProxy returns everything that is reached without the proxy: the machine itself, its network, the networks of pods and
// Services, the cluster's domain, the endpoint, an external etcd, and the user's list.
func (n *node) noProxy() []string {
	out := []string{"localhost", "127.0.0.0/8", "::1"}
	for _, a := range n.machine.Addresses {
		ip, err := netip.ParseAddr(a.Address)
		if err != nil {
			continue // newNode has refused such an address.
		}
		out = append(out, ip.String())
		if network, err := ip.Prefix(int(a.Prefix)); err == nil && a.Prefix > 0 {
			out = append(out, network.String())
		}
	}
	out = append(out, n.Network.PodCIDRs...)
	out = append(out, n.Network.ServiceCIDRs...)
	out = append(out, ".svc", "."+n.Network.ServiceDomain)
	if host, _, err := net.SplitHostPort(n.Endpoint); err == nil {
		out = append(out, host)
	}
	if n.ControlPlane != nil && n.ControlPlane.ExternalEtcd != nil {
		for _, endpoint := range n.ControlPlane.ExternalEtcd.Endpoints {
			if u, err := url.Parse(endpoint); err == nil && u.Hostname() != "" {
				out = append(out, u.Hostname())
			}
		}
	}
	var unique []string
	for _, entry := range append(out, n.Proxy.NoProxy...) {
		if !slices.Contains(unique, entry) {
			unique = append(unique, entry)
		}
	}
	return unique
}

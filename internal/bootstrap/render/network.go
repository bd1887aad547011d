package render

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/blang/semver/v4"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/cidr"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// Defaults for fields that are empty in the Cluster.
const (
	DefaultPodCIDR       = cidr.DefaultPods
	DefaultServiceCIDR   = "10.96.0.0/16"
	DefaultServiceDomain = "cluster.local"
	DefaultAPIServerPort = 6443
)

// Network returns the networks of a Cluster. It checks that every CIDR is valid, that there is at most one of each
// family, that no two overlap, and that each node can get a pod network.
func Network(cluster *clusterv1.Cluster, config bootstrapv1.ClusterConfiguration) (nodeconfig.Network, error) {
	spec := cluster.Spec.ClusterNetwork
	out := nodeconfig.Network{
		PodCIDRs:      orDefault(spec.Pods.CIDRBlocks, DefaultPodCIDR),
		ServiceCIDRs:  orDefault(spec.Services.CIDRBlocks, DefaultServiceCIDR),
		ServiceDomain: spec.ServiceDomain,
		PodNetwork:    string(config.PodNetwork),
		KubeProxy:     string(config.KubeProxy),
		DNS:           string(config.DNS),
	}
	if out.ServiceDomain == "" {
		out.ServiceDomain = DefaultServiceDomain
	}
	pods, err := prefixes("spec.clusterNetwork.pods", out.PodCIDRs)
	if err != nil {
		return out, err
	}
	services, err := prefixes("spec.clusterNetwork.services", out.ServiceCIDRs)
	if err != nil {
		return out, err
	}
	if problems := validation.IsDNS1123Subdomain(strings.ToLower(out.ServiceDomain)); len(problems) > 0 {
		return out, fmt.Errorf("the Cluster's spec.clusterNetwork.serviceDomain is %q, expected the name of a domain: %s", out.ServiceDomain, strings.Join(problems, ", "))
	}
	for i, s := range services {
		// The API server starts with a larger one, but allocates no address from it.
		if s.Addr().Is6() && s.Bits() < 64 {
			return out, fmt.Errorf("the Cluster's spec.clusterNetwork.services.cidrBlocks[%d] is %s, expected an IPv6 network of /64 or smaller", i, s)
		}
	}
	for _, p := range pods {
		for _, s := range services {
			if p.Overlaps(s) {
				return out, fmt.Errorf("the Cluster's pod network %s and Service network %s overlap: set separate networks in spec.clusterNetwork", p, s)
			}
		}
	}
	if config.PodNetwork == bootstrapv1.PodNetworkRoutes {
		if err := checkNodeNetworks(pods, config.ControllerManager.ExtraArgs); err != nil {
			return out, err
		}
	}
	out.DNSServiceIP, err = nth(services[0], 10)
	return out, err
}

// checkNodeNetworks returns an error for a pod network that kube-controller-manager cannot divide into the networks of nodes: it
// would end at each start. Arguments for this division are the user's responsibility.
func checkNodeNetworks(pods []netip.Prefix, args []bootstrapv1.Arg) error {
	if slices.ContainsFunc(args, func(a bootstrapv1.Arg) bool {
		return strings.HasPrefix(a.Name, "node-cidr-mask-size") || slices.Contains([]string{"allocate-node-cidrs", "cluster-cidr", "controllers"}, a.Name)
	}) {
		return nil
	}
	for i, p := range pods {
		shortest, node, arg := 0, 24, "node-cidr-mask-size-ipv4"
		if p.Addr().Is6() {
			// kube-controller-manager makes at most 2^16 IPv6 networks.
			shortest, node, arg = 48, 64, "node-cidr-mask-size-ipv6"
		}
		if p.Bits() < shortest || p.Bits() > node {
			return fmt.Errorf("the Cluster's spec.clusterNetwork.pods.cidrBlocks[%d] %s cannot be divided into a /%d for each node: expected a prefix length from %d to %d, or the argument %s of the controller manager",
				i, p, node, shortest, node, arg)
		}
	}
	return nil
}

// WithDefaults sets the defaults of empty fields of a ClusterConfiguration.
func WithDefaults(config bootstrapv1.ClusterConfiguration) bootstrapv1.ClusterConfiguration {
	if config.PodNetwork == "" {
		config.PodNetwork = bootstrapv1.PodNetworkRoutes
	}
	if config.KubeProxy == "" {
		config.KubeProxy = bootstrapv1.KubeProxyNFTables
	}
	if config.DNS == "" {
		config.DNS = bootstrapv1.DNSCoreDNS
	}
	return config
}

// Foreign is the ClusterConfiguration of clusters with a control plane of another provider, which also provides the pod
// network, the proxy and DNS.
func Foreign() bootstrapv1.ClusterConfiguration {
	return bootstrapv1.ClusterConfiguration{
		PodNetwork: bootstrapv1.PodNetworkNone,
		KubeProxy:  bootstrapv1.KubeProxyNone,
		DNS:        bootstrapv1.DNSNone,
	}
}

// CheckEndpoint returns an error if an endpoint lies in one of the cluster's own networks.
func CheckEndpoint(host string, network nodeconfig.Network) error {
	addr, err := netip.ParseAddr(strings.Trim(host, "[]"))
	if err != nil {
		return nil // The host is a name.
	}
	for _, cidr := range append(append([]string{}, network.PodCIDRs...), network.ServiceCIDRs...) {
		if prefix, err := netip.ParsePrefix(cidr); err == nil && prefix.Contains(addr) {
			return fmt.Errorf("the control plane endpoint %s lies in the cluster's own network %s: change the Cluster's spec.clusterNetwork or the endpoint", host, cidr)
		}
	}
	return nil
}

// APIServerPort returns the port of the API servers of a Cluster on their machines.
func APIServerPort(cluster *clusterv1.Cluster) int32 {
	if port := cluster.Spec.ClusterNetwork.APIServerPort; port != 0 {
		return port
	}
	return DefaultAPIServerPort
}

// Version validates a Kubernetes version and returns it with a leading v (CP-05).
func Version(version string) (string, error) {
	parsed, err := semver.Parse(strings.TrimPrefix(version, "v"))
	if err != nil {
		return "", fmt.Errorf("%q is not a Kubernetes version: write it as v1.36.3", version)
	}
	return "v" + parsed.String(), nil
}

func prefixes(field string, cidrs []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for i, cidr := range cidrs {
		p, err := netip.ParsePrefix(cidr)
		if err != nil || p != p.Masked() {
			return nil, fmt.Errorf("the Cluster's %s.cidrBlocks[%d] %q is not a network: write it without host bits, for example 10.244.0.0/16", field, i, cidr)
		}
		out = append(out, p)
	}
	if len(out) > 2 || len(out) == 2 && out[0].Addr().Is4() == out[1].Addr().Is4() {
		return nil, fmt.Errorf("the Cluster's %s.cidrBlocks has %d networks: give one, or one IPv4 and one IPv6", field, len(out))
	}
	return out, nil
}

// nth returns the n-th address of a network.
func nth(p netip.Prefix, n int) (string, error) {
	addr := p.Addr()
	for range n {
		addr = addr.Next()
	}
	if !p.Contains(addr) {
		return "", fmt.Errorf("the Cluster's Service network %s is too small: it needs at least %d addresses", p, n+1)
	}
	return addr.String(), nil
}

func orDefault(values []string, value string) []string {
	if len(values) == 0 {
		return []string{value}
	}
	return values
}

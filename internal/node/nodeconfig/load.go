package nodeconfig

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// Values of Network.PodNetwork, KubeProxy and DNS.
const (
	PodNetworkRoutes  = "Routes"
	KubeProxyNFTables = "NFTables"
	DNSCoreDNS        = "CoreDNS"
	None              = "None"
)

// Load reads the file strictly, fills in defaults and validates.
func Load(path string) (*NodeConfiguration, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("the node's configuration, which the bootstrap data writes: %w", err)
	}
	c, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// Parse is Load for data in memory. Errors name fields and never quote the token.
func Parse(data []byte) (*NodeConfiguration, error) {
	c := &NodeConfiguration{}
	if err := yaml.UnmarshalStrict(data, c); err != nil {
		return nil, err
	}
	c.Default()
	err := c.Validate()
	return c, err
}

// Default sets the defaults that the comments of the fields state.
func (c *NodeConfiguration) Default() {
	set := func(field *string, value string) {
		if *field == "" {
			*field = value
		}
	}
	set(&c.Network.ServiceDomain, "cluster.local")
	set(&c.Network.PodNetwork, PodNetworkRoutes)
	set(&c.Network.KubeProxy, KubeProxyNFTables)
	set(&c.Network.DNS, DNSCoreDNS)
	if c.ControlPlane == nil {
		return
	}
	if c.ControlPlane.APIServerPort == 0 {
		c.ControlPlane.APIServerPort = 6443
	}
	if c.ControlPlane.CertificateValidityDays == 0 {
		c.ControlPlane.CertificateValidityDays = 365
	}
}

// Validate returns all problems of the configuration.
func (c *NodeConfiguration) Validate() error {
	var errs []error
	refuse := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.APIVersion != APIVersion || c.Kind != Kind {
		refuse("apiVersion and kind: expected %s %s, found %q %q", APIVersion, Kind, c.APIVersion, c.Kind)
	}
	if c.KubernetesVersion == "" || c.KubernetesVersion[0] != 'v' {
		refuse("kubernetesVersion: expected a version with a leading v, found %q", c.KubernetesVersion)
	}
	if host, port, err := net.SplitHostPort(c.Endpoint); err != nil || host == "" || port == "" {
		refuse("endpoint: expected host:port, found %q", c.Endpoint)
	}
	switch c.Role {
	case RoleInit, RoleControlPlane:
		if c.ControlPlane == nil {
			refuse("controlPlane: required with role %s", c.Role)
		}
	case RoleWorker:
	default:
		refuse("role: expected init, control-plane or worker, found %q", c.Role)
	}
	errs = append(errs, c.Network.validate()...)
	return errors.Join(append(errs, c.CheckSettings()...)...)
}

// CheckSettings returns the problems of the user's settings of components.
func (c *NodeConfiguration) CheckSettings() []error {
	var errs []error
	check := func(field string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", field, err))
		}
	}
	check("kubelet.configuration", CheckKubelet(c.Kubelet.Configuration))
	check("kubelet.configuration", checkClusterDNS(c.Kubelet.Configuration, c.Network.DNS))
	check("proxy", c.Proxy.Check())
	if c.KubeProxy != nil {
		check("kubeProxy.configuration", CheckKubeProxy(c.KubeProxy.Configuration))
		if c.Network.KubeProxy == None {
			errs = append(errs, errors.New("kubeProxy.configuration: the cluster has kubeProxy None, and the machine runs no kube-proxy; remove it"))
		}
	}
	if c.ControlPlane != nil {
		check("cluster.coreDNS", c.ControlPlane.CoreDNS.Check(c.Network))
	}
	return errs
}

func (n Network) validate() []error {
	var errs []error
	check := func(field string, cidrs []string) {
		if len(cidrs) == 0 || len(cidrs) > 2 {
			errs = append(errs, fmt.Errorf("network.%s: expected one network, or one for each IP family", field))
		}
		for _, cidr := range cidrs {
			if _, err := netip.ParsePrefix(cidr); err != nil {
				errs = append(errs, fmt.Errorf("network.%s: %w", field, err))
			}
		}
	}
	if n.PodNetwork == PodNetworkRoutes || len(n.PodCIDRs) > 0 {
		check("podCIDRs", n.PodCIDRs)
	}
	check("serviceCIDRs", n.ServiceCIDRs)
	if _, err := netip.ParseAddr(n.DNSServiceIP); err != nil {
		errs = append(errs, fmt.Errorf("network.dnsServiceIP: %w", err))
	}
	oneOf := func(field, value string, allowed ...string) {
		for _, a := range allowed {
			if value == a {
				return
			}
		}
		errs = append(errs, fmt.Errorf("network.%s: expected one of %v, found %q", field, allowed, value))
	}
	oneOf("podNetwork", n.PodNetwork, PodNetworkRoutes, None)
	oneOf("kubeProxy", n.KubeProxy, KubeProxyNFTables, None)
	oneOf("dns", n.DNS, DNSCoreDNS, None)
	return errs
}

// NodeName returns the node name of a machine with the given host name.
func (c *NodeConfiguration) NodeName(hostname string) string {
	if c.Node.Name != "" {
		return c.Node.Name
	}
	return strings.ToLower(hostname)
}

// KubeletLabels returns the labels that a kubelet can set on its own Node. Cluster API sets the labels that only an
// administrator can set, from those of the Machine.
func (n Node) KubeletLabels() (labels map[string]string, refused []string) {
	labels = map[string]string{}
	for key, value := range n.Labels {
		if kubeletMaySet(key) {
			labels[key] = value
		} else {
			refused = append(refused, key)
		}
	}
	slices.Sort(refused)
	return labels, refused
}

// kubeletMaySet implements the rule of the kubelet's --node-labels and of the NodeRestriction admission.
func kubeletMaySet(key string) bool {
	prefix, _, qualified := strings.Cut(key, "/")
	if !qualified {
		return true
	}
	is := func(domain string) bool { return prefix == domain || strings.HasSuffix(prefix, "."+domain) }
	if !is("kubernetes.io") && !is("k8s.io") {
		return true
	}
	if is("kubelet.kubernetes.io") || is("node.kubernetes.io") {
		return true
	}
	return slices.Contains(kubeletLabels, key)
}

var kubeletLabels = []string{
	"kubernetes.io/hostname", "kubernetes.io/arch", "kubernetes.io/os", "beta.kubernetes.io/arch",
	"beta.kubernetes.io/os", "topology.kubernetes.io/zone", "topology.kubernetes.io/region",
	"failure-domain.beta.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/region",
	"beta.kubernetes.io/instance-type", "node.kubernetes.io/instance-type",
}

// Kubeconfigs that the node agent uses as well.
const (
	AgentKubeconfig   = "/etc/kubernetes/node-agent.conf"
	KubeletKubeconfig = "/etc/kubernetes/kubelet.conf"
)

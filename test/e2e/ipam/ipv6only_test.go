//go:build e2e

package ipam

import (
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// TestIPv6Only creates a cluster in which machines, pods, Services and the endpoint have IPv6 addresses only.
func TestIPv6Only(t *testing.T) {
	const onlySixCIDR, onlySixGateway = "fd00:215:43::/64", "fd00:215:43::1"
	makeServicePools(t, "six")
	t.Setenv("CAPSTAN_MACHINE_IPV6_CIDR", onlySixCIDR)
	c := plane.CreateCluster(t, namespace, "six", "--flavor", "ipv6", "--workers", "2")

	server := "https://[" + onlySixGateway + "]:6443"
	if got := c.MustKubectl(t, "config", "view", "-o", "jsonpath={.clusters[0].cluster.server}"); got != server {
		t.Errorf("the kubeconfig has the server %s, want %s", got, server)
	}
	for _, m := range c.Machines(t) {
		four, _ := eth0(t, m.Spec.ID, netlink.FAMILY_V4)
		six, via := eth0(t, m.Spec.ID, netlink.FAMILY_V6)
		address := m.Spec.Network.Addresses[0].Address
		if four != "" || six != address+"/64" || via != onlySixGateway {
			t.Errorf("%s: eth0 has %q and %q through %s, want only %s/64 through %s", m.Name, four, six, via, address, onlySixGateway)
		}
		if got := nodeIPs(t, c, m.Name); !slices.Equal(got, []string{address}) {
			t.Errorf("%s: the Node reports %v, want %s", m.Name, got, address)
		}
	}
	checkWorkload(t, c, "SingleStack", 1)
	services := &corev1.ServiceList{}
	if err := c.Client.List(t.Context(), services); err != nil {
		t.Fatal(err)
	}
	for _, s := range services.Items {
		if slices.ContainsFunc(s.Spec.ClusterIPs, func(ip string) bool { return !strings.HasPrefix(ip, "fd00:10:96::") }) {
			t.Errorf("the Service %s has the addresses %v", client.ObjectKeyFromObject(&s), s.Spec.ClusterIPs)
		}
	}
	t.Run("Services for clients outside", func(t *testing.T) { checkOutside(t, c, outsideSix) })
}

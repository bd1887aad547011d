//go:build e2e

package ipam

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

const (
	fourCIDR, fourGateway = "10.215.42.0/24", "10.215.42.1"
	sixCIDR, sixGateway   = "fd00:215:42::/64", "fd00:215:42::1"
)

// TestDualStack_IPAM08 creates a cluster whose machines have an IPv4 address from one pool and an IPv6 address from
// another one.
func TestDualStack_IPAM08(t *testing.T) {
	plane.CreatePool(t, namespace, "machines-ipv4", ipamv1.Subnet{CIDR: fourCIDR, Gateway: fourGateway, Ranges: []ipamv1.AddressRange{"10.215.42.10-10.215.42.19"}})
	plane.CreatePool(t, namespace, "machines-ipv6", ipamv1.Subnet{CIDR: sixCIDR, Gateway: sixGateway, Ranges: []ipamv1.AddressRange{"fd00:215:42::10-fd00:215:42::19"}})
	makeServicePools(t, "dual")
	t.Setenv("CAPSTAN_MACHINE_CIDR", fourCIDR)
	t.Setenv("CAPSTAN_MACHINE_IPV6_CIDR", sixCIDR)
	t.Setenv("CAPSTAN_IP_POOL_NAME", "machines-ipv4")
	c := plane.CreateCluster(t, namespace, "dual", "--flavor", "dual-stack", "--workers", "2")

	for _, m := range c.Machines(t) {
		t.Run(m.Name, func(t *testing.T) { checkDualMachine(t, c, m.Name, m.Spec.ID) })
	}
	t.Run("pods and Services", func(t *testing.T) { checkWorkload(t, c, "RequireDualStack", 2) })
	t.Run("Services for clients outside", func(t *testing.T) { checkOutside(t, c, outsideFour, outsideSix) })
	t.Run("the addresses are free after the deletion", func(t *testing.T) {
		c.Delete(t)
		checkAllFree(t, "machines-ipv4", "machines-ipv6", outsideFour.poolOf(c.Name), outsideSix.poolOf(c.Name))
	})
}

// checkDualMachine: eth0 has only the claimed address, prefix and gateway of each family. The Node reports both
// addresses, IPv4 first.
func checkDualMachine(t *testing.T, c *harness.Cluster, name, id string) {
	var want []string
	for n, pool := range []struct {
		cidr, gateway string
		family        int
	}{{fourCIDR, fourGateway, netlink.FAMILY_V4}, {sixCIDR, sixGateway, netlink.FAMILY_V6}} {
		address := claimed(t, fmt.Sprintf("%s-%d", name, n), pool.cidr).Spec
		if address.Gateway != pool.gateway {
			t.Errorf("the pool gave gateway %q, want %s", address.Gateway, pool.gateway)
		}
		have, via := eth0(t, id, pool.family)
		if wanted := fmt.Sprintf("%s/%d", address.Address, *address.Prefix); have != wanted || via != address.Gateway {
			t.Errorf("eth0 has %s through %s, claimed are %s through %s", have, via, wanted, address.Gateway)
		}
		want = append(want, address.Address)
	}
	if got := nodeIPs(t, c, name); !slices.Equal(got, want) {
		t.Errorf("the Node reports %v, claimed are %v", got, want)
	}
}

// checkWorkload: pods have an address of each family. A pod reaches the pod on the other node at all its addresses, the Service
// at all its addresses, on a port of the other node, and by its name.
func checkWorkload(t *testing.T, c *harness.Cluster, policy string, families int) {
	plane.Must(t, "load", "image", harness.Bin()+"/images/echo.tar", "--cluster", c.Name, "--namespace", c.Namespace)
	c.Apply(t, harness.Echo("type: NodePort\n  ipFamilyPolicy: "+policy))
	c.MustKubectl(t, "rollout", "status", "deployment/echo", "--timeout=3m")
	pods := &corev1.PodList{}
	if err := c.Client.List(t.Context(), pods, client.InNamespace("default"), client.MatchingLabels{"app": "echo"}); err != nil {
		t.Fatal(err)
	}
	service := &corev1.Service{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "echo"}, service); err != nil {
		t.Fatal(err)
	}
	if len(pods.Items) != 2 || len(pods.Items[0].Status.PodIPs) != families || len(pods.Items[1].Status.PodIPs) != families || len(service.Spec.ClusterIPs) != families {
		t.Fatalf("want two pods and a Service with %d addresses each, found %+v and %v", families, pods.Items, service.Spec.ClusterIPs)
	}
	asker, other := pods.Items[0].Name, pods.Items[1]
	urls := []string{"http://echo.default.svc.cluster.local"}
	for _, ip := range service.Spec.ClusterIPs {
		urls = append(urls, url(ip, 80))
	}
	for _, ip := range nodeIPs(t, c, other.Spec.NodeName) {
		urls = append(urls, url(ip, uint16(service.Spec.Ports[0].NodePort)))
	}
	for _, ip := range other.Status.PodIPs {
		urls = append(urls, url(ip.IP, 8080))
	}
	for _, url := range urls {
		harness.Eventually(t, "the pod on the other node behind "+url, 30*time.Second, func(context.Context) error {
			out, err := c.Kubectl(t, "exec", asker, "--", "/echo", "get", url)
			if err == nil && strings.TrimSpace(out) != other.Name {
				err = fmt.Errorf("%q answers, want %s", out, other.Name)
			}
			return err
		})
	}
}

func url(ip string, port uint16) string {
	return "http://" + netip.AddrPortFrom(netip.MustParseAddr(ip), port).String()
}

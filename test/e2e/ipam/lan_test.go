//go:build e2e

package ipam

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/test/e2e/harness"
)

const (
	labCIDR, labRouter       = "10.215.44.0/24", "10.215.44.254"
	labIPv6CIDR, labRouterV6 = "fd00:215:44::/64", "fd00:215:44::fe"
	// The host, and with it the management plane, is a station of the LAN with this address.
	labHost = "10.215.44.1/24"
	// The virtual address of the endpoint.
	labEndpoint = "10.215.44.10"
)

// lab is the offer of the LAN to the clusters of the namespace.
var lab = infrav1.LANNetwork{
	Name: "lab", Bridge: "e2e-lab", CIDR: labCIDR, IPv6CIDR: labIPv6CIDR, Addresses: []string{"10.215.44.16/28", "fd00:215:44::20/123"},
	AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{namespace}},
}

var (
	labPool     = ipamv1.Subnet{CIDR: labCIDR, Gateway: labRouter, Ranges: []ipamv1.AddressRange{"10.215.44.20-10.215.44.29"}}
	labIPv6Pool = ipamv1.Subnet{CIDR: labIPv6CIDR, Gateway: labRouterV6, Ranges: []ipamv1.AddressRange{"fd00:215:44::20-fd00:215:44::29"}}
)

// TestLAN creates a dual-stack cluster in a LAN with a router. The nodes reach each other's pods, and the router reaches node ports and the endpoint,
// which the host gives up while its capstand hangs.
func TestLAN(t *testing.T) {
	router := makeLAN(t, labHost, labRouter+"/24", labRouterV6+"/64")
	plane.CreatePool(t, namespace, "lab", labPool)
	plane.CreatePool(t, namespace, "lab-ipv6", labIPv6Pool)
	offerLAN(t, labEndpoint+"/32")
	template := labTemplate(t, "dual-stack", `{lan: {name: lab}, machineIPv6CIDR: "`+labIPv6CIDR+`"}`, func(text string) string {
		text = strings.ReplaceAll(text, "${CAPSTAN_IPV6_POOL_NAME:=machines-ipv6}", "lab-ipv6")
		return strings.ReplaceAll(text, "${CAPSTAN_IP_POOL_NAME:=machines}", "lab")
	})
	c := plane.CreateCluster(t, namespace, "lab", "--from", template, "--workers", "1")

	for _, m := range c.Machines(t) {
		want := []string{claimed(t, m.Name+"-0", labCIDR).Spec.Address, claimed(t, m.Name+"-1", labIPv6CIDR).Spec.Address}
		if got := nodeIPs(t, c, m.Name); !slices.Equal(got, want) {
			t.Errorf("%s: the Node reports %v, claimed are %v", m.Name, got, want)
		}
		if have, via := eth0(t, m.Spec.ID, netlink.FAMILY_V6); have != want[1]+"/64" || via != labRouterV6 {
			t.Errorf("%s has %s through %s", m.Name, have, via)
		}
	}
	// One of the two pods runs on the control plane machine.
	c.MustKubectl(t, "taint", "nodes", "--selector", "node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/control-plane-")
	t.Run("pods and Services", func(t *testing.T) { checkWorkload(t, c, "RequireDualStack", 2) })
	t.Run("node ports for the router", func(t *testing.T) { checkNodePorts(t, c, router) })
	t.Run("the endpoint for the router", func(t *testing.T) { checkLANEndpoint(t, router, labEndpoint) })
	t.Run("nothing remains after the deletion", func(t *testing.T) { checkLANIsFree(t, c) })
}

// checkLANIsFree deletes the cluster, and looks at what it leaves on the host.
func checkLANIsFree(t *testing.T, c *harness.Cluster) {
	c.Delete(t)
	if ports, err := exec.Command("sh", "-c", "ip -o link show master e2e-lab | grep -v e2e-router || true; nft list tables bridge").CombinedOutput(); err != nil || len(ports) > 0 {
		t.Errorf("ports or rules remain: %v: %s", err, ports)
	}
}

// makeLAN makes a bridge with an address of the host, and with a router as its only other station.
func makeLAN(t *testing.T, host string, addresses ...string) *harness.Outside {
	t.Helper()
	sh := func(script string) {
		t.Helper()
		if out, err := exec.Command("sh", "-euc", script).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
	}
	sh("ip link add e2e-lab type bridge; ip addr add " + host + " dev e2e-lab nodad; ip link set e2e-lab up")
	t.Cleanup(func() { sh("ip link del e2e-lab") })
	router := harness.NewOutside(t, "e2e-router")
	sh("ip link set e2e-router master e2e-lab")
	for _, address := range addresses {
		if err := router.In(func() error { return exec.Command("ip", "addr", "add", "dev", "client", address, "nodad").Run() }); err != nil {
			t.Fatal(err)
		}
	}
	return router
}

// offerLAN offers the LAN on the only host, and an address of it for the endpoint.
func offerLAN(t *testing.T, endpoint string) {
	t.Helper()
	hosts := &infrav1.CapstanHostList{}
	if err := plane.Client.List(t.Context(), hosts); err != nil || len(hosts.Items) != 1 {
		t.Fatalf("%d hosts: %v", len(hosts.Items), err)
	}
	set := func(virtual []string, lans ...infrav1.LANNetwork) {
		if err := testenv.Change(context.WithoutCancel(t.Context()), plane.Client, &hosts.Items[0], func(h *infrav1.CapstanHost) {
			h.Spec.VirtualAddresses, h.Spec.LANNetworks = virtual, lans
		}); err != nil {
			t.Error(err)
		}
	}
	set([]string{endpoint}, lab)
	t.Cleanup(func() { set(nil) })
}

// labTemplate is the template of a flavor with a network of the cluster in the LAN, and with another change.
func labTemplate(t *testing.T, flavor, network string, change func(string) string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(testenv.Root(), "templates", "cluster-template-"+flavor+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	changed := regexp.MustCompile(`(?s)  network:\n    machineCIDR:.*?\n---`).ReplaceAllLiteralString(string(text), "  network: "+network+"\n---")
	path := filepath.Join(t.TempDir(), "template.yaml")
	if err := os.WriteFile(path, []byte(change(changed)), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// checkNodePorts: a station reaches the Service at the node port of each node.
func checkNodePorts(t *testing.T, c *harness.Cluster, station *harness.Outside) {
	service := &corev1.Service{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "echo"}, service); err != nil {
		t.Fatal(err)
	}
	for _, m := range c.Machines(t) {
		for _, ip := range nodeIPs(t, c, m.Name) {
			at := url(ip, uint16(service.Spec.Ports[0].NodePort)) + "/info"
			harness.Eventually(t, "the router at "+at, 30*time.Second, func(ctx context.Context) error {
				_, err := clientSeen(ctx, station, at)
				return err
			})
		}
	}
}

// checkLANEndpoint: a station reaches the load balancer at the virtual address. While capstand hangs, the term of the address ends, so that
// another host could have it. The host has it again when capstand continues.
func checkLANEndpoint(t *testing.T, station *harness.Outside, endpoint string) {
	dial := func() error {
		return station.In(func() error {
			conn, err := net.DialTimeout("tcp", net.JoinHostPort(endpoint, "6443"), time.Second)
			if err == nil {
				_ = conn.Close()
			}
			return err
		})
	}
	harness.Eventually(t, "the endpoint", time.Minute, func(context.Context) error { return dial() })
	signal := func(s syscall.Signal) {
		for _, p := range plane.FindRunning(t, "", "capstand", 2) { // with the load balancer
			if slices.Contains(p.Args, "balancer") {
				continue
			}
			if err := syscall.Kill(p.PID, s); err != nil {
				t.Fatal(err)
			}
		}
	}
	signal(syscall.SIGSTOP)
	t.Cleanup(func() { signal(syscall.SIGCONT) })
	harness.Eventually(t, "the end of the address", time.Minute, func(context.Context) error {
		addresses, err := exec.Command("ip", "-o", "addr", "show", "dev", "e2e-lab").Output()
		if err == nil && strings.Contains(string(addresses), " "+endpoint+"/") {
			err = fmt.Errorf("the bridge has %s", addresses)
		}
		return err
	})
	signal(syscall.SIGCONT)
	harness.Eventually(t, "the endpoint again", time.Minute, func(context.Context) error { return dial() })
}

//go:build e2e && rack

package ipam

import (
	"context"
	"net"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/tools/clientcmd"

	"capstan.dev/capstan/test/e2e/harness"
)

// TestLANIPv6Only creates a cluster whose machines are stations of a LAN with IPv6 addresses only. The router reaches its API server and its
// node ports.
func TestLANIPv6Only(t *testing.T) {
	const host, endpoint = "fd00:215:44::1/64", "fd00:215:44::10"
	router := makeLAN(t, host, labRouterV6+"/64")
	plane.CreatePool(t, namespace, "lab-ipv6", labIPv6Pool)
	offerLAN(t, endpoint+"/128")
	template := labTemplate(t, "ipv6", `{lan: {name: lab}, machineCIDR: "`+labIPv6CIDR+`"}`, func(text string) string {
		return regexp.MustCompile(`(?m)^      memory: .*$`).ReplaceAllString(text, "${0}\n      network: {addressesFromPools: [{apiGroup: ipam.capstan.dev, kind: CapstanIPPool, name: lab-ipv6}]}")
	})
	c := plane.CreateCluster(t, namespace, "lab6", "--from", template, "--workers", "1")

	for _, m := range c.Machines(t) {
		want := claimed(t, m.Name+"-0", labIPv6CIDR).Spec.Address
		if got := nodeIPs(t, c, m.Name); !slices.Equal(got, []string{want}) {
			t.Errorf("%s: the Node reports %v, claimed is %s", m.Name, got, want)
		}
		four, _ := eth0(t, m.Spec.ID, netlink.FAMILY_V4)
		if six, via := eth0(t, m.Spec.ID, netlink.FAMILY_V6); four != "" || six != want+"/64" || via != labRouterV6 {
			t.Errorf("%s has %q and %q through %s", m.Name, four, six, via)
		}
	}
	// One of the two pods runs on the control plane machine.
	c.MustKubectl(t, "taint", "nodes", "--selector", "node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/control-plane-")
	t.Run("pods and Services", func(t *testing.T) { checkWorkload(t, c, "SingleStack", 1) })
	t.Run("node ports for the router", func(t *testing.T) { checkNodePorts(t, c, router) })
	t.Run("the API server for the router", func(t *testing.T) { checkAPIServer(t, c, router, endpoint) })
	t.Run("the endpoint for the router", func(t *testing.T) { checkLANEndpoint(t, router, endpoint) })
	t.Run("nothing remains after the deletion", func(t *testing.T) { checkLANIsFree(t, c) })
}

// checkAPIServer: a station uses the kubeconfig of the cluster, whose server is the endpoint.
func checkAPIServer(t *testing.T, c *harness.Cluster, station *harness.Outside, endpoint string) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	if want := "https://" + net.JoinHostPort(endpoint, "6443"); config.Host != want {
		t.Errorf("the kubeconfig has the server %s, want %s", config.Host, want)
	}
	config.Timeout = 2 * time.Second
	config.Dial = func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = station.In(func() error { conn, err = (&net.Dialer{}).DialContext(ctx, network, address); return err })
		return conn, err
	}
	api, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, "the version of the API server", 30*time.Second, func(context.Context) error {
		_, err := api.ServerVersion()
		return err
	})
}

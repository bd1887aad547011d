//go:build e2e

package ipam

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/test/e2e/harness"
)

const (
	namespace = "default"
	cidr      = "10.215.40.0/24"
	gateway   = "10.215.40.1"
)

// TestPool_IPAM07 creates, scales and deletes a cluster whose addresses all come from one pool. Each part depends on the
// previous ones. The pool first contains two addresses, for the endpoint and the control plane machine.
func TestPool_IPAM07(t *testing.T) {
	plane.CreatePool(t, namespace, "machines", ipamv1.Subnet{CIDR: cidr, Gateway: gateway, Ranges: []ipamv1.AddressRange{"10.215.40.10-10.215.40.11"}})
	c := &harness.Cluster{Plane: plane, Namespace: namespace, Name: "pooled"}
	t.Cleanup(func() { c.Delete(t) })
	t.Setenv("CAPSTAN_MACHINE_CIDR", cidr)
	plane.Must(t, "create", "cluster", c.Name, "--namespace", namespace, "--flavor", "ipam", "--workers", "1", "--wait=false")

	for _, part := range []struct {
		name string
		run  func(*testing.T, *harness.Cluster)
	}{
		{"the endpoint has an address of the pool and answers", checkEndpoint},
		{"a machine waits for an exhausted pool", checkExhausted},
		{"a restarted manager keeps the addresses", leaderDies},
		{"the machine comes up when the pool grows", growPool},
		{"machines have exactly the claimed addresses", checkMachines},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.run(t, c) }) {
			t.FailNow()
		}
	}
	t.Run("the addresses are free after the deletion", func(t *testing.T) {
		c.Delete(t)
		checkFree(t, c)
	})
}

func checkEndpoint(t *testing.T, c *harness.Cluster) {
	capstan := &infrav1.CapstanCluster{}
	harness.Eventually(t, "the endpoint", time.Minute, func(ctx context.Context) error {
		if err := plane.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, capstan); err != nil {
			return err
		}
		if capstan.Spec.ControlPlaneEndpoint.Host == "" {
			return fmt.Errorf("no endpoint: %v", capstan.Status.Conditions)
		}
		return nil
	})
	address := claimed(t, c.Name+"-endpoint", cidr)
	if got, want := capstan.Spec.ControlPlaneEndpoint, (clusterv1.APIEndpoint{Host: address.Spec.Address, Port: 6443}); got != want {
		t.Errorf("endpoint is %s, the claim got %s", got.String(), want.String())
	}
	harness.Eventually(t, "the control plane Node, through the endpoint", time.Minute, func(ctx context.Context) error {
		if _, err := plane.Capstan(ctx, "get", "kubeconfig", c.Name, "--namespace", c.Namespace); err != nil {
			return err
		}
		if c.Client == nil {
			c.Connect(t)
		}
		return c.NodesReady(ctx, 1)
	})
	if kubeconfig := plane.Must(t, "get", "kubeconfig", c.Name, "--namespace", c.Namespace); !strings.Contains(kubeconfig, "https://"+address.Spec.Address+":6443") {
		t.Errorf("the kubeconfig does not name %s", address.Spec.Address)
	}
}

func checkExhausted(t *testing.T, c *harness.Cluster) {
	harness.Eventually(t, "the condition of the worker names the pool", time.Minute, func(context.Context) error {
		worker := c.Worker(t)
		condition := conditions.Get(&worker, infrav1.AddressesAssignedCondition)
		if condition == nil || condition.Reason != infrav1.WaitingForIPAddressReason || !strings.Contains(condition.Message, "PoolExhausted") {
			return fmt.Errorf("condition is %v", condition)
		}
		return nil
	})
}

// leaderDies: the leader dies between claims. Allocated addresses stay the same, and the new manager serves further
// claims.
func leaderDies(t *testing.T, c *harness.Cluster) {
	before := inUse(t, c)
	killed := plane.KillManager(t)
	harness.Eventually(t, "another manager", 30*time.Second, func(context.Context) error {
		for _, p := range plane.Find(t, "", "manager") {
			if p.PID != killed.PID {
				return nil
			}
		}
		return fmt.Errorf("no other process")
	})
	if after := inUse(t, c); after != before {
		t.Errorf("addresses were %s, are %s", before, after)
	}
}

// growPool runs right after the kill, so that the new manager finds the change without an event.
func growPool(t *testing.T, c *harness.Cluster) {
	before := inUse(t, c)
	pool := &ipamv1.CapstanIPPool{}
	harness.Eventually(t, "the larger pool", 30*time.Second, func(ctx context.Context) error {
		if err := plane.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: "machines"}, pool); err != nil {
			return err
		}
		pool.Spec.Subnets[0].Ranges = []ipamv1.AddressRange{"10.215.40.10-10.215.40.19"}
		return plane.Client.Update(ctx, pool) // The webhook of the new manager must answer.
	})
	harness.Eventually(t, "both Nodes Ready", 90*time.Second, func(ctx context.Context) error { return c.NodesReady(ctx, 2) })
	if after := inUse(t, c); !strings.HasPrefix(after, before) {
		t.Errorf("addresses were %s, are %s", before, after)
	}
}

// checkMachines: the interface has only the claimed address, prefix and gateway. The Node reports the address.
func checkMachines(t *testing.T, c *harness.Cluster) {
	for _, m := range c.Machines(t) {
		want := claimed(t, m.Name+"-0", cidr).Spec
		if want.Gateway != gateway {
			t.Errorf("%s: the pool gave gateway %q", m.Name, want.Gateway)
		}
		addresses, via := eth0(t, m.Spec.ID, netlink.FAMILY_V4)
		if wanted := fmt.Sprintf("%s/%d", want.Address, *want.Prefix); addresses != wanted || via != want.Gateway {
			t.Errorf("%s: eth0 has %s through %s, claimed are %s through %s", m.Name, addresses, via, wanted, want.Gateway)
		}
		if reported := nodeIPs(t, c, m.Name); len(reported) != 1 || reported[0] != want.Address {
			t.Errorf("%s: the Node reports %v, claimed is %s", m.Name, reported, want.Address)
		}
	}
}

// nodeIPs returns the addresses that a Node reports.
func nodeIPs(t *testing.T, c *harness.Cluster, name string) []string {
	t.Helper()
	node := &corev1.Node{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: name}, node); err != nil {
		t.Fatal(err)
	}
	var reported []string
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			reported = append(reported, a.Address)
		}
	}
	return reported
}

// eth0 returns the addresses of a machine's interface and its default gateway, as the kernel reports them. It omits the
// link-local address that every interface with IPv6 has.
func eth0(t *testing.T, machineID string, family int) (addresses, via string) {
	t.Helper()
	ns, err := netns.GetFromPath(network.Box{Dir: network.DefaultRunDir}.NetNS(machineID))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	inside, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	link, err := inside.LinkByName(network.Interface)
	if err != nil {
		t.Fatal(err)
	}
	all, err := inside.AddrList(link, family)
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, a := range all {
		if !a.IP.IsLinkLocalUnicast() {
			have = append(have, a.IPNet.String())
		}
	}
	routes, err := inside.RouteList(link, family)
	if err != nil {
		t.Fatal(err)
	}
	var gateways []string
	for _, r := range routes {
		if r.Gw != nil && (r.Dst == nil || r.Dst.IP.IsUnspecified()) {
			gateways = append(gateways, r.Gw.String())
		}
	}
	return strings.Join(have, " "), strings.Join(gateways, " ")
}

// claimed returns the address of a claim, and checks that it belongs to the network.
func claimed(t *testing.T, claim, cidr string) *capiipamv1.IPAddress {
	t.Helper()
	address := &capiipamv1.IPAddress{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: claim}, address); err != nil {
		t.Fatal(err)
	}
	if a := netip.MustParseAddr(address.Spec.Address); !netip.MustParsePrefix(cidr).Contains(a) {
		t.Errorf("%s does not belong to the pool", a)
	}
	return address
}

// inUse lists the users of addresses: the endpoint, then the machines, control plane first.
func inUse(t *testing.T, c *harness.Cluster) string {
	t.Helper()
	capstan := &infrav1.CapstanCluster{}
	harness.Eventually(t, "the CapstanCluster", 30*time.Second, func(ctx context.Context) error {
		return plane.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, capstan)
	})
	out := "endpoint " + capstan.Spec.LoadBalancer.Address
	for _, m := range []infrav1.CapstanMachine{c.ControlPlaneMachine(t), c.Worker(t)} {
		for _, a := range m.Spec.Network.Addresses {
			out += ", " + m.Name + " " + a.Address
		}
	}
	return out
}

// checkFree: no object of the cluster and no address of its pool is left.
func checkFree(t *testing.T, c *harness.Cluster) {
	t.Helper()
	checkAllFree(t, "machines")
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, &infrav1.CapstanCluster{}); !apierrors.IsNotFound(err) {
		t.Errorf("the CapstanCluster still exists (%v)", err)
	}
}

// checkAllFree: no claim and no IPAddress is left, and each pool has ten free addresses.
func checkAllFree(t *testing.T, pools ...string) {
	t.Helper()
	claims, addresses := &capiipamv1.IPAddressClaimList{}, &capiipamv1.IPAddressList{}
	for _, list := range []client.ObjectList{claims, addresses} {
		if err := plane.Client.List(t.Context(), list, client.InNamespace(namespace)); err != nil {
			t.Fatal(err)
		}
	}
	if len(claims.Items) > 0 || len(addresses.Items) > 0 {
		t.Errorf("left: %v, %v", claims.Items, addresses.Items)
	}
	for _, name := range pools {
		harness.Eventually(t, "ten free addresses of "+name, 30*time.Second, func(ctx context.Context) error {
			pool := &ipamv1.CapstanIPPool{}
			if err := plane.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, pool); err != nil {
				return err
			}
			if a := pool.Status.Addresses; a == nil || a.Free != "10" || a.Used != 0 {
				return fmt.Errorf("%s counts %+v", name, a)
			}
			return nil
		})
	}
}

//go:build e2e

package ipam

import (
	"context"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/test/e2e/harness"
)

// outsideNetwork is a network outside of the box, the first part of the name of its pool, and the address that the pool gives first.
type outsideNetwork struct {
	harness.OutsideNetwork
	pool, allowed, first string
}

var (
	outsideFour = outsideNetwork{harness.OutsideNetwork{Host: "198.51.100.1", Client: "198.51.100.2", Bits: 24}, "services-ipv4", "198.51.100.96/28", "198.51.100.100"}
	outsideSix  = outsideNetwork{harness.OutsideNetwork{Host: "2001:db8:51::1", Client: "2001:db8:51::2", Bits: 64}, "services-ipv6", "2001:db8:51::100/120", "2001:db8:51::100"}
)

// poolOf is the name of a cluster's own pool: the deletion of a pool takes a moment.
func (n outsideNetwork) poolOf(cluster string) string { return n.pool + "-" + cluster }

// makeServicePools makes the pools of the networks outside. They outlive the cluster.
func makeServicePools(t *testing.T, cluster string) {
	t.Helper()
	plane.CreatePool(t, namespace, outsideFour.poolOf(cluster), ipamv1.Subnet{CIDR: "198.51.100.0/24", Ranges: []ipamv1.AddressRange{"198.51.100.100-198.51.100.109"}})
	plane.CreatePool(t, namespace, outsideSix.poolOf(cluster), ipamv1.Subnet{CIDR: "2001:db8:51::/64", Ranges: []ipamv1.AddressRange{"2001:db8:51::100-2001:db8:51::109"}})
}

// checkOutside: a client outside of the box reaches Services at the addresses of all families of the cluster: those of pools, and those
// of the host. The pods see the address of the client.
func checkOutside(t *testing.T, c *harness.Cluster, networks ...outsideNetwork) {
	var cables []harness.OutsideNetwork
	var own, host []string
	for _, n := range networks {
		cables, own, host = append(cables, n.OutsideNetwork), append(own, n.first), append(host, n.Host)
	}
	o := harness.NewOutside(t, "lan0", cables...)
	publishTo(t, c, networks...)
	shown := slices.Concat(publish(t, c, "own", nil, own), publish(t, c, "ports", ptr.To(infrav1.ServiceHostPortsClass), host))
	for i, address := range shown {
		want := networks[i%len(networks)].Client
		harness.Eventually(t, address+" from outside", time.Minute, func(ctx context.Context) error {
			from, err := clientSeen(ctx, o, url(address, 80)+"/info")
			if err == nil && from != want {
				return fmt.Errorf("the pod sees the client %s, want %s", from, want)
			}
			return err
		})
	}
}

// publishTo lets the cluster publish Services at addresses of pools and at port 80 of the host.
func publishTo(t *testing.T, c *harness.Cluster, networks ...outsideNetwork) {
	t.Helper()
	hosts := &infrav1.CapstanHostList{}
	if err := plane.Client.List(t.Context(), hosts); err != nil || len(hosts.Items) != 1 {
		t.Fatalf("%d hosts: %v", len(hosts.Items), err)
	}
	names := infrav1.AllowedNamespaces{Names: []string{c.Namespace}}
	permission := &infrav1.HostServices{AllowedNamespaces: names, HostPorts: []infrav1.HostPorts{{Protocol: infrav1.HostPortTCP, Port: 80, AllowedNamespaces: names}}}
	lb := &infrav1.ServiceLoadBalancerSpec{HostPorts: ptr.To(true)}
	for _, n := range networks {
		permission.Addresses, permission.HostAddresses = append(permission.Addresses, n.allowed), append(permission.HostAddresses, n.Host)
		pool := infrav1.IPPoolReference{APIGroup: "ipam.capstan.dev", Kind: "CapstanIPPool", Name: n.poolOf(c.Name)}
		if n.pool == outsideSix.pool {
			lb.IPv6AddressesFromPool = pool
		} else {
			lb.AddressesFromPool = pool
		}
	}
	set := func(services *infrav1.HostServices) {
		if err := testenv.Change(context.WithoutCancel(t.Context()), plane.Client, &hosts.Items[0], func(h *infrav1.CapstanHost) { h.Spec.Services = services }); err != nil {
			t.Error(err)
		}
	}
	set(permission)
	t.Cleanup(func() { set(nil) })
	capstan := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name}}
	if err := testenv.Change(t.Context(), plane.Client, capstan, func(c *infrav1.CapstanCluster) { c.Spec.Services.LoadBalancer = lb }); err != nil {
		t.Fatal(err)
	}
}

// publish creates a Service for the echo pods, and waits until its status shows the addresses.
func publish(t *testing.T, c *harness.Cluster, name string, class *string, want []string) (shown []string) {
	t.Helper()
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: class, Selector: map[string]string{"app": "echo"},
			IPFamilyPolicy: ptr.To(corev1.IPFamilyPolicyPreferDualStack), ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
			Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}},
		},
	}
	if err := c.Client.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, "the addresses of the Service "+name, time.Minute, func(ctx context.Context) error {
		if err := c.Client.Get(ctx, client.ObjectKeyFromObject(s), s); err != nil {
			return err
		}
		shown = nil
		for _, i := range s.Status.LoadBalancer.Ingress {
			shown = append(shown, i.IP)
		}
		if !slices.Equal(shown, want) {
			return fmt.Errorf("%s, want %s", shown, want)
		}
		return nil
	})
	return shown
}

// clientSeen asks an echo pod for the address of its client.
func clientSeen(ctx context.Context, o *harness.Outside, url string) (from string, err error) {
	dialer := net.Dialer{Timeout: 2 * time.Second}
	return harness.ClientSeen(ctx, url, func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = o.In(func() error { conn, err = dialer.DialContext(ctx, network, address); return err })
		return conn, err
	})
}

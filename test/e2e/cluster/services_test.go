//go:build e2e

package cluster

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/test/e2e/harness"
)

// The network outside of the box: the host has the first address, and the client the second.
const (
	lanCIDR   = "198.51.100.0/24"
	lanClient = "198.51.100.2"
	lanHost   = "198.51.100.1"
	lanLink   = "lan0"
)

// outside is a client of a cluster's Services.
type outside struct {
	*harness.Outside
	c *harness.Cluster
}

// TestServices publishes Services of a cluster to a client outside of the box. Each part depends on the previous ones. The first one
// is about the metrics of the cluster, and needs the same pods.
func TestServices(t *testing.T) {
	o := &outside{Outside: harness.NewOutside(t, lanLink, harness.OutsideNetwork{Host: lanHost, Client: lanClient, Bits: 24})}
	empty, err := harness.Look()
	if err != nil {
		t.Fatal(err)
	}
	o.c = plane.CreateCluster(t, "default", "open", "--workers", "2", "--from", metricsTemplate(t))
	for _, part := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"metrics", func(t *testing.T) { testMetrics(t, o.c) }},
		{"without a permission nothing is published", o.unpublished},
		{"with it, TCP and UDP reach the pods with the address of the client", o.local},
		{"with the policy Cluster every worker forwards", o.anyNode},
		{"source ranges keep clients out", o.ranges},
		{"ports of the host's own address", o.hostPorts},
		{"a killed capstand interrupts nothing", o.killCapstand},
		{"a reboot", o.reboot},
		{"a deleted Service is closed", o.deleted},
		{"a withdrawn permission closes", o.forbidden},
	} {
		if !t.Run(part.name, part.run) {
			t.FailNow()
		}
	}
	t.Run("the deletion of the cluster closes the rest", func(t *testing.T) {
		o.allow(t, true)
		address := o.published(t, "all")
		o.c.Delete(t)
		nothingLeft(t, empty)
		o.closed(t, "http://"+address+"/info")
		if out := run(t, "ip", "-4", "-o", "addr", "show", "dev", lanLink); strings.Contains(out, address) {
			t.Errorf("the host still has %s: %s", address, out)
		}
		o.allow(t, false)
	})
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
	return string(out)
}

// dial connects from the client. port is its own port; 0 chooses one.
func (o *outside) dial(protocol, address string, port uint16) (conn net.Conn, err error) {
	dialer := net.Dialer{Timeout: 10 * time.Second}
	if from := netip.AddrPortFrom(netip.MustParseAddr(lanClient), port); protocol == "udp" {
		dialer.LocalAddr = net.UDPAddrFromAddrPort(from)
	} else {
		dialer.LocalAddr = net.TCPAddrFromAddrPort(from)
	}
	err = o.In(func() error { conn, err = dialer.DialContext(context.Background(), protocol, address); return err })
	return conn, err
}

// info asks the echo server over TCP for the address of its client.
func (o *outside) info(url string) (from string, err error) {
	return harness.ClientSeen(context.Background(), url, func(_ context.Context, network, address string) (net.Conn, error) {
		return o.dial(network, address, 0)
	})
}

// datagram asks the echo server over UDP for the address of its client.
func (o *outside) datagram(address string, port uint16) (from string, err error) {
	conn, err := o.dial("udp", address, port)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	if _, err := conn.Write([]byte("who?")); err != nil {
		return "", err
	}
	buffer := make([]byte, 64)
	n, err := conn.Read(buffer)
	if err != nil {
		return "", err
	}
	from, _, err = net.SplitHostPort(string(bytes.TrimSpace(buffer[:n])))
	return from, err
}

func (o *outside) reaches(t *testing.T, url, from string) {
	t.Helper()
	harness.Eventually(t, url+" from outside", time.Minute, func(context.Context) error {
		got, err := o.info(url)
		if err == nil && from != "" && got != from {
			return fmt.Errorf("the pod sees the client %s, want %s", got, from)
		}
		return err
	})
}

func (o *outside) closed(t *testing.T, url string) {
	t.Helper()
	if from, err := o.info(url); err == nil {
		t.Errorf("%s answers to %s", url, from)
	}
}

// allow sets or removes the permission of the host.
func (o *outside) allow(t *testing.T, allowed bool) {
	t.Helper()
	hosts := &infrav1.CapstanHostList{}
	if err := plane.Client.List(t.Context(), hosts); err != nil || len(hosts.Items) != 1 {
		t.Fatalf("%d hosts: %v", len(hosts.Items), err)
	}
	if err := testenv.Change(t.Context(), plane.Client, &hosts.Items[0], func(h *infrav1.CapstanHost) {
		h.Spec.Services = nil
		if allowed {
			names := infrav1.AllowedNamespaces{Names: []string{o.c.Namespace}}
			h.Spec.Services = &infrav1.HostServices{
				Addresses: []string{"198.51.100.96/28"}, AllowedNamespaces: names, HostAddresses: []string{lanHost},
				HostPorts: []infrav1.HostPorts{
					{Protocol: infrav1.HostPortTCP, Port: 80, EndPort: 81, AllowedNamespaces: names}, {Protocol: infrav1.HostPortUDP, Port: 53, AllowedNamespaces: names},
					{Protocol: infrav1.HostPortTCP, Port: 30080, AllowedNamespaces: names},
				},
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// service creates a Service for the echo pods, with HTTP at a port.
func (o *outside) service(t *testing.T, name string, port int32, change func(*corev1.Service)) {
	t.Helper()
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, Selector: map[string]string{"app": "echo"},
			Ports: []corev1.ServicePort{{Name: "http", Port: port, TargetPort: intstr.FromInt32(8080)}},
		},
	}
	if change != nil {
		change(s)
	}
	if err := o.c.Client.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

// published returns the address of a Service.
func (o *outside) published(t *testing.T, name string) (address string) {
	t.Helper()
	harness.Eventually(t, "the address of the Service "+name, time.Minute, func(ctx context.Context) error {
		s := &corev1.Service{}
		if err := o.c.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: name}, s); err != nil {
			return err
		}
		if len(s.Status.LoadBalancer.Ingress) != 1 {
			return fmt.Errorf("ingress: %v", s.Status.LoadBalancer.Ingress)
		}
		address = s.Status.LoadBalancer.Ingress[0].IP
		return nil
	})
	return address
}

func (o *outside) unpublished(t *testing.T) {
	pool := &ipamv1.CapstanIPPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.c.Namespace, Name: "services"},
		Spec:       ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: lanCIDR, Ranges: []ipamv1.AddressRange{"198.51.100.100-198.51.100.103"}}}},
	}
	if err := plane.Client.Create(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	capstan := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: o.c.Namespace, Name: o.c.Name}}
	if err := testenv.Change(t.Context(), plane.Client, capstan, func(c *infrav1.CapstanCluster) {
		c.Spec.Services.LoadBalancer = &infrav1.ServiceLoadBalancerSpec{AddressesFromPool: infrav1.IPPoolReference{APIGroup: "ipam.capstan.dev", Kind: "CapstanIPPool", Name: "services"}, HostPorts: ptr.To(true), NodePorts: ptr.To(true)}
	}); err != nil {
		t.Fatal(err)
	}
	o.c.MustKubectl(t, "rollout", "status", "deployment/echo", "--timeout=3m")
	o.service(t, "local", 80, func(s *corev1.Service) {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "udp", Port: 53, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromInt32(8080)})
	})
	harness.Eventually(t, "the condition", time.Minute, func(ctx context.Context) error {
		if err := plane.Client.Get(ctx, client.ObjectKeyFromObject(capstan), capstan); err != nil {
			return err
		}
		if message := conditions.GetMessage(capstan, infrav1.ServicesPublishedCondition); !strings.Contains(message, "no host allows the namespace to publish") {
			return fmt.Errorf("message %q", message)
		}
		return nil
	})
	if out := o.c.MustKubectl(t, "get", "events"); !strings.Contains(out, "no host allows the namespace to publish") {
		t.Errorf("no event on the Service: %s", out)
	}
}

func (o *outside) local(t *testing.T) {
	o.allow(t, true)
	address := o.published(t, "local")
	for range 20 { // both machines
		o.reaches(t, "http://"+address+"/info", lanClient)
	}
	harness.Eventually(t, "an answer over UDP", time.Minute, func(context.Context) error {
		from, err := o.datagram(address+":53", 4000)
		if err == nil && from != lanClient {
			return fmt.Errorf("the pod sees the client %s", from)
		}
		return err
	})
	machine := o.c.Worker(t)
	node := &corev1.Service{}
	if err := o.c.Client.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "local"}, node); err != nil {
		t.Fatal(err)
	}
	port := fmt.Sprint(node.Spec.Ports[0].NodePort)
	o.closed(t, "http://"+net.JoinHostPort(machine.Spec.Network.Addresses[0].Address, port)+"/info")
	o.closed(t, "http://"+net.JoinHostPort(address, port)+"/info")
}

func (o *outside) anyNode(t *testing.T) {
	o.service(t, "all", 443, func(s *corev1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "more", Port: 80, TargetPort: intstr.FromInt32(8080)})
	})
	address := o.published(t, "all")
	if address == o.published(t, "local") {
		t.Errorf("two Services have the address %s", address)
	}
	o.reaches(t, "http://"+address+":443/info", "")
	o.reaches(t, "http://"+address+"/info", "")
}

func (o *outside) ranges(t *testing.T) {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "all"}}
	set := func(ranges ...string) {
		t.Helper()
		if err := testenv.Change(t.Context(), o.c.Client, s, func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = ranges }); err != nil {
			t.Fatal(err)
		}
	}
	address := o.published(t, "all")
	set("203.0.113.0/24")
	harness.Eventually(t, "the end for other clients", time.Minute, func(context.Context) error {
		if from, err := o.info("http://" + address + "/info"); err == nil {
			return fmt.Errorf("an answer to %s", from)
		}
		return nil
	})
	set(lanClient + "/32")
	o.reaches(t, "http://"+address+"/info", "")
	set()
}

// hostPorts publishes a Service at ports of the host, and refuses ports that are not authorised or that a program of the host uses.
func (o *outside) hostPorts(t *testing.T) {
	program, err := net.Listen("tcp", ":81")
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	class := func(s *corev1.Service) {
		s.Spec.LoadBalancerClass, s.Spec.ExternalTrafficPolicy = ptr.To(infrav1.ServiceHostPortsClass), corev1.ServiceExternalTrafficPolicyLocal
	}
	o.service(t, "own", 80, func(s *corev1.Service) {
		class(s)
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "udp", Port: 53, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromInt32(8080)})
	})
	o.service(t, "unauthorised", 82, class)
	o.service(t, "used", 81, class)
	if address := o.published(t, "own"); address != lanHost {
		t.Fatalf("the Service has the address %s", address)
	}
	o.ownPorts(t)
	o.nodePorts(t)
	for name, want := range map[string]string{"unauthorised": "does not authorise TCP port 82", "used": "a program of the host uses TCP port 81"} {
		harness.Eventually(t, "the event on the Service "+name, time.Minute, func(context.Context) error {
			if out := o.c.MustKubectl(t, "get", "events"); !strings.Contains(out, want) {
				return fmt.Errorf("events: %s", out)
			}
			return nil
		})
		o.c.MustKubectl(t, "delete", "service", name, "--timeout=2m")
	}
}

// nodePorts publishes Services of type NodePort. One has an authorised node port.
func (o *outside) nodePorts(t *testing.T) {
	t.Helper()
	nodePort := func(name string, port int32) {
		o.service(t, name, 8080, func(s *corev1.Service) { s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, port })
	}
	nodePort("closed", 30081) // first, so that an answer of the other one shows that this one was seen
	nodePort("node", 30080)
	o.reaches(t, "http://"+lanHost+":30080/info", "")
	o.closed(t, "http://"+lanHost+":30081/info")
	o.c.MustKubectl(t, "delete", "service", "node", "--timeout=2m")
	harness.Eventually(t, "the end of the node port", time.Minute, func(context.Context) error {
		if from, err := o.info("http://" + lanHost + ":30080/info"); err == nil {
			return fmt.Errorf("an answer to %s", from)
		}
		return nil
	})
	o.c.MustKubectl(t, "delete", "service", "closed", "--timeout=2m")
}

// ownPorts expects answers at the ports of the host, for a client and for the host itself.
func (o *outside) ownPorts(t *testing.T) {
	t.Helper()
	o.reaches(t, "http://"+lanHost+"/info", lanClient)
	harness.Eventually(t, "an answer over UDP", time.Minute, func(context.Context) error {
		from, err := o.datagram(lanHost+":53", 4001)
		if err == nil && from != lanClient {
			return fmt.Errorf("the pod sees the client %s", from)
		}
		return err
	})
	harness.Eventually(t, "an answer to the host itself", time.Minute, func(context.Context) error {
		resp, err := (&http.Client{Timeout: 5 * time.Second}).Get("http://" + lanHost + "/info")
		if err != nil {
			return err
		}
		return resp.Body.Close()
	})
}

func (o *outside) killCapstand(t *testing.T) {
	address := o.published(t, "local")
	old := plane.FindRunning(t, "", "capstand", 2) // one balancer
	for _, p := range old {
		harness.Kill(t, p)
		if from, err := o.info("http://" + address + "/info"); err != nil || from != lanClient {
			t.Errorf("after the kill: %q, %v", from, err)
		}
	}
	works(t, o.c)
	o.forgetNeighbours(t)
	o.reaches(t, "http://"+address+"/info", lanClient)
	run(t, "ip", "addr", "del", address+"/32", "dev", lanLink) // another program
	harness.Eventually(t, "the address that another program removed", time.Minute, func(context.Context) error {
		if out := run(t, "ip", "-4", "-o", "addr", "show", "dev", lanLink); !strings.Contains(out, " "+address+"/32 ") {
			return fmt.Errorf("the host has %s", out)
		}
		return nil
	})
	o.reaches(t, "http://"+address+"/info", lanClient)
	o.ownPorts(t)
}

func (o *outside) reboot(t *testing.T) {
	addresses := []string{o.published(t, "local"), o.published(t, "all")}
	machines := o.c.Machines(t)
	before := identity(machines)
	infra := &infrav1.CapstanCluster{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: o.c.Namespace, Name: o.c.Name}, infra); err != nil {
		t.Fatal(err)
	}
	killEverything(t)
	forgetNetworks(t, machines, infra.Spec.ID)
	for _, address := range addresses {
		run(t, "ip", "addr", "del", address+"/32", "dev", lanLink)
	}
	plane.Must(t, "up")
	if err := plane.Connect(); err != nil {
		t.Fatal(err)
	}
	works(t, o.c)
	sameIdentity(t, o.c, before)
	o.forgetNeighbours(t)
	for _, address := range addresses {
		o.reaches(t, "http://"+address+"/info", "")
	}
	o.reaches(t, "http://"+addresses[0]+"/info", lanClient)
	o.ownPorts(t)
}

// forgetNeighbours makes the client ask again for the stations that have the addresses.
func (o *outside) forgetNeighbours(t *testing.T) {
	t.Helper()
	if err := o.In(func() error { return exec.Command("ip", "neigh", "flush", "all").Run() }); err != nil {
		t.Fatal(err)
	}
}

// deleted: the flow of a client that sends from one port ends too, although the kernel tracks it.
func (o *outside) deleted(t *testing.T) {
	address := o.published(t, "local")
	harness.Eventually(t, "an answer over UDP before the deletion", time.Minute, func(context.Context) error {
		_, err := o.datagram(address+":53", 4000)
		return err
	})
	o.c.MustKubectl(t, "delete", "service", "local", "own", "--timeout=2m")
	o.closed(t, "http://"+lanHost+"/info")
	if from, err := o.datagram(lanHost+":53", 4001); err == nil {
		t.Errorf("UDP at the host answers to %s", from)
	}
	o.closed(t, "http://"+address+"/info")
	if from, err := o.datagram(address+":53", 4000); err == nil {
		t.Errorf("UDP answers to %s", from)
	}
	claims := &capiipamv1.IPAddressClaimList{}
	if err := plane.Client.List(t.Context(), claims, client.InNamespace(o.c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: o.c.Name}); err != nil {
		t.Fatal(err)
	}
	if len(claims.Items) != 1 {
		t.Errorf("%d claims exist, want that of the other Service", len(claims.Items))
	}
	s := &corev1.Service{}
	if err := o.c.Client.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "local"}, s); !apierrors.IsNotFound(err) {
		t.Errorf("the Service still exists: %v", err)
	}
}

func (o *outside) forbidden(t *testing.T) {
	address := o.published(t, "all")
	o.allow(t, false)
	harness.Eventually(t, "the end of the publication", time.Minute, func(context.Context) error {
		if from, err := o.info("http://" + address + "/info"); err == nil {
			return fmt.Errorf("an answer to %s", from)
		}
		return nil
	})
}

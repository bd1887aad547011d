//go:build e2e

package host_test

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

const bridgeNetfilter = "/proc/sys/net/bridge/bridge-nf-call-iptables"

// Machines of one cluster reach each other and the outside. Machines of another cluster, and the outside, do not reach
// them. This holds with bridge-nf-call-iptables on and off.
func TestIsolation(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	out := outside(t)
	for _, spec := range []*hostpb.MachineSpec{blue.machine(10), blue.machine(11), green.machine(10)} {
		c.make(spec)
	}
	for _, on := range netfilterSettings(t) {
		t.Run("bridge-nf-call-iptables="+on, func(t *testing.T) {
			setNetfilter(t, on)
			dial := func(from, to string) error {
				code, answer, err := get(from, "/dial", "to", to)
				if err == nil && code != http.StatusOK {
					err = fmt.Errorf("%s", strings.TrimSpace(answer))
				}
				return err
			}
			expect.NoError(t, dial(blue.address(10), blue.address(11)+":6443"))
			expect.NoError(t, dial(blue.address(10), out.address+":80"))
			if err := dial(green.address(10), blue.address(10)+":6443"); err == nil {
				t.Error("green reaches blue")
			}
			if err := out.reaches(blue.address(10)); err == nil {
				t.Error("the outside reaches blue")
			}
			podsOfEqualAddress(t)
		})
	}
	if seen := host(t, "cat "+out.log); strings.Contains(seen, "10.231.") {
		t.Errorf("the outside saw machine addresses: %s", seen)
	}
}

// podsOfEqualAddress gives machines of both clusters the same Pod addresses, and checks that each machine reaches the
// Pod of its own cluster.
func podsOfEqualAddress(t *testing.T) {
	t.Helper()
	for address, pods := range map[string]string{blue.address(10): "10.99.1.1", green.address(10): "10.99.1.1", blue.address(11): "10.99.2.1"} {
		inside(t, address, "ip addr replace "+pods+"/32 dev lo")
	}
	inside(t, blue.address(11), "ip route replace 10.99.1.1/32 via "+blue.address(10))
	inside(t, blue.address(10), "ip route replace 10.99.2.1/32 via "+blue.address(11))
	for range 3 {
		got := inside(t, blue.address(11), "curl -ksS --interface 10.99.2.1 https://10.99.1.1:6443/name")
		if got != "blue-10" {
			t.Errorf("Pod 10.99.1.1 of blue is %q", got)
		}
	}
}

func netfilterSettings(t *testing.T) []string {
	if _, err := os.Stat(bridgeNetfilter); err != nil {
		t.Log("this kernel has no br_netfilter: it is always off")
		return []string{"0"}
	}
	return []string{"0", "1"}
}

// setNetfilter sets bridge-nf-call-iptables until the end of a test.
func setNetfilter(t *testing.T, on string) {
	t.Helper()
	was, err := os.ReadFile(bridgeNetfilter)
	if err != nil {
		return // The setting is always off in this kernel.
	}
	expect.NoError(t, os.WriteFile(bridgeNetfilter, []byte(on), 0))
	t.Cleanup(func() { expect.NoError(t, os.WriteFile(bridgeNetfilter, was, 0)) })
}

// outside creates a network namespace that stands for the network outside of the host.
type world struct{ address, log string }

func outside(t *testing.T) world {
	t.Helper()
	w := world{address: "10.232.0.2", log: t.TempDir() + "/seen"}
	// The clean-up deletes the link by its name. The kernel also removes it with the namespace, but possibly later.
	t.Cleanup(func() { host(t, "ip link del e2e-out; ip netns del capstan-e2e") })
	// Go checks the loopback interface for IPv6.
	host(t, `ip netns add capstan-e2e && ip -n capstan-e2e link set lo up
		ip link add e2e-out type veth peer name eth0 netns capstan-e2e
		ip addr add 10.232.0.1/24 dev e2e-out && ip link set e2e-out up
		ip -n capstan-e2e addr add 10.232.0.2/24 dev eth0 && ip -n capstan-e2e link set eth0 up
		ip -n capstan-e2e route add default via 10.232.0.1`)
	// The server records its clients.
	server := startIn(t, "capstan-e2e", w.log)
	t.Cleanup(server)
	return w
}

func (w world) reaches(address string) error {
	return tryHost("ip netns exec capstan-e2e curl -ksS -m 1 https://" + address + ":6443/name")
}

// capstand restores the rules of a network after their removal, for example by a reload of the host's own firewall.
func TestFirewallRemoved(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	_, err := c.EnsureNetwork(c.ctx(), blue.network())
	expect.NoError(t, err)
	table := "table inet capstan-" + hash(blue.id)
	host(t, "nft delete "+table)
	eventually(t, "the rules exist again", func() error { return tryHost("nft list " + table) })
	_, err = c.DeleteNetwork(c.ctx(), &hostpb.DeleteNetworkRequest{Id: blue.id, Namespace: blue.network().Namespace, Name: blue.network().Name})
	expect.NoError(t, err)
}

// A machine whose link or bridge was removed is connected again, also if capstand did not run at that moment.
func TestLinkRemoved(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	was := c.make(blue.machine(10))
	cable := "cpm" + hash(was.Spec.Id)
	reached := func() error {
		// Without the bridge, packets to the machine's address would leave the host.
		if err := tryHost("ip -o link show master " + bridge(blue) + " | grep " + cable); err != nil {
			return err
		}
		conn, err := net.DialTimeout("tcp", blue.address(10)+":6443", time.Second)
		if err == nil {
			_ = conn.Close()
		}
		return err
	}
	for _, link := range []string{cable, bridge(blue)} {
		host(t, "ip link delete "+link)
		eventually(t, link+" exists again", reached)
	}
	c.kill()
	host(t, "ip link delete "+bridge(blue))
	host(t, "ip link delete "+cable)
	c.start()
	eventually(t, "both links exist again", reached)
	if now := c.await(was.Spec.Id, running(0)); now.Status.Pid != was.Status.Pid {
		t.Errorf("PID 1 was %d, is %d", was.Status.Pid, now.Status.Pid)
	}
}

// Two capstands of one host share the network of a cluster. Their machines reach each other and have different
// addresses. The deletion of the last machine removes the network.
func TestTwoHosts(t *testing.T) {
	leavesNothing(t)
	a, b := newCapstand(t), newCapstand(t)
	a.make(blue.machine(10))
	b.make(blue.machine(11))
	if _, answer, err := get(blue.address(10), "/dial", "to", blue.address(11)+":6443"); err != nil || strings.Contains(answer, "refused") {
		t.Errorf("machines of two hosts: %q %v", answer, err)
	}
	twin := blue.machine(10)
	twin.Id, twin.Name = "e2e-blue-twin", "twin"
	_, err := b.EnsureMachine(b.ctx(), &hostpb.EnsureMachineRequest{Spec: twin})
	refused(t, err, codes.AlreadyExists, blue.address(10))

	a.deleteMachine(blue.machine(10))
	expect.NoError(t, answers(blue.address(11), "blue-11")) // The network still exists.
	_, err = b.EnsureMachine(b.ctx(), &hostpb.EnsureMachineRequest{Spec: twin})
	expect.NoError(t, err) // The address is free now.
	b.deleteMachine(twin)
	b.deleteMachine(blue.machine(11))
	expect.NoError(t, tryHost("! ip link show "+bridge(blue)))
}

// Invalid requests are refused at once, with the code of host.proto and a message that contains the expected and the
// found value. They change no object.
func TestRefusals(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	c.make(blue.machine(10))
	_, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: blue.machine(10)})
	expect.NoError(t, err) // The same request again succeeds.
	c.balancer(blue)
	taken := listenOn(t, blue.address(1))

	for name, test := range map[string]struct {
		change func(*hostpb.MachineSpec)
		code   codes.Code
		says   string
	}{
		"another spec":       {func(s *hostpb.MachineSpec) { *s = *blue.machine(10); s.Cpus = 2 }, codes.InvalidArgument, "another spec"},
		"same name":          {func(s *hostpb.MachineSpec) { s.Name = "blue-10" }, codes.AlreadyExists, "e2e-blue-10"},
		"same address":       {func(s *hostpb.MachineSpec) { s.Addresses[0].Address = blue.address(10) }, codes.AlreadyExists, "blue-10"},
		"gateway":            {func(s *hostpb.MachineSpec) { s.Addresses[0].Address = blue.address(1) }, codes.InvalidArgument, "gateway"},
		"other network":      {func(s *hostpb.MachineSpec) { s.Addresses[0].Address = "10.9.9.9" }, codes.InvalidArgument, "not in the machine network"},
		"no address":         {func(s *hostpb.MachineSpec) { s.Addresses = nil }, codes.InvalidArgument, "no address"},
		"memory":             {func(s *hostpb.MachineSpec) { s.MemoryBytes = 1 << 50 }, codes.ResourceExhausted, "MiB"},
		"no memory":          {func(s *hostpb.MachineSpec) { s.MemoryBytes = 0 }, codes.InvalidArgument, "memory"},
		"cpus":               {func(s *hostpb.MachineSpec) { s.Cpus = 4096 }, codes.InvalidArgument, "4096 cpus"},
		"kubernetes":         {func(s *hostpb.MachineSpec) { s.KubernetesVersion = "v1.2.3" }, codes.FailedPrecondition, version},
		"image":              {func(s *hostpb.MachineSpec) { s.Image = "windows" }, codes.FailedPrecondition, "windows"},
		"bad id":             {func(s *hostpb.MachineSpec) { s.Id = "../../etc" }, codes.InvalidArgument, "id"},
		"bad name":           {func(s *hostpb.MachineSpec) { s.Name = "a b" }, codes.InvalidArgument, "name"},
		"bad CIDR":           {func(s *hostpb.MachineSpec) { s.Network.Cidr = "10.0.0.0" }, codes.InvalidArgument, "CIDR"},
		"other CIDR":         {func(s *hostpb.MachineSpec) { s.Network.Cidr = "10.231.0.0/23"; s.Addresses[0].Prefix = 23 }, codes.FailedPrecondition, blue.cidr},
		"cluster's name":     {func(s *hostpb.MachineSpec) { s.Network.Id = "e2e-other" }, codes.AlreadyExists, blue.id},
		"overlapping a net":  {func(s *hostpb.MachineSpec) { s.Network.Id, s.Network.Name = "e2e-other", "other" }, codes.FailedPrecondition, "overlaps"},
		"overlapping routes": {func(s *hostpb.MachineSpec) { move(s, hostNetwork(t)) }, codes.FailedPrecondition, "route"},
	} {
		spec := blue.machine(20)
		test.change(spec)
		_, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: spec})
		t.Log(name, "→", err)
		refused(t, err, test.code, test.says)
	}

	lb := &hostpb.LoadBalancer{Id: "e2e-lb", Namespace: "default", Name: "other", NetworkId: blue.id, Listen: []string{taken}}
	for name, test := range map[string]struct {
		change func(*hostpb.LoadBalancer)
		code   codes.Code
		says   string
	}{
		"port in use": {func(*hostpb.LoadBalancer) {}, codes.AlreadyExists, taken},
		"other's":     {func(lb *hostpb.LoadBalancer) { lb.Listen = []string{":6443"} }, codes.AlreadyExists, "6443"},
		"no port":     {func(lb *hostpb.LoadBalancer) { lb.Listen = []string{"127.0.0.1"} }, codes.InvalidArgument, "host:port"},
		"loopback":    {func(lb *hostpb.LoadBalancer) { lb.Listen = []string{"127.0.0.1:6443"} }, codes.InvalidArgument, "unicast"},
		"no network":  {func(lb *hostpb.LoadBalancer) { lb.NetworkId = "none" }, codes.NotFound, "none"},
		"same name":   {func(lb *hostpb.LoadBalancer) { lb.Name = blue.name }, codes.AlreadyExists, blue.id},
	} {
		spec := proto.CloneOf(lb)
		test.change(spec)
		_, err := c.EnsureLoadBalancer(c.ctx(), spec)
		t.Log(name, "→", err)
		refused(t, err, test.code, test.says)
	}
	_, err = c.DeleteNetwork(c.ctx(), &hostpb.DeleteNetworkRequest{Id: blue.id, Namespace: "default", Name: blue.name})
	refused(t, err, codes.FailedPrecondition, "blue-10")
	if list, err := c.ListMachines(c.ctx(), &hostpb.ListMachinesRequest{}); err != nil || len(list.Machines) != 1 {
		t.Errorf("refused requests left %v %v", list, err)
	}
}

// A copy of an object in another namespace has the same id. Requests for the copy do not change or remove the original's
// objects on the host. Machines of the copy cannot join its network, also not on another capstand of the host.
func TestCopyInAnotherNamespace_ALL18(t *testing.T) {
	leavesNothing(t)
	a, b := newCapstand(t), newCapstand(t)
	m := a.make(blue.machine(10))
	a.balancer(blue, 10)
	lb := a.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Serving })

	copied := blue.machine(10)
	copied.Namespace, copied.Network.Namespace = "thief", "thief"
	guest := proto.CloneOf(copied)
	guest.Id, guest.Addresses[0].Address = "e2e-guest", blue.address(20)
	neighbour := green.machine(10)
	neighbour.Id, neighbour.Namespace, neighbour.Network.Namespace = m.Spec.Id, "thief", "thief"
	balancer := proto.CloneOf(lb)
	balancer.Namespace, balancer.Backends = "thief", nil
	for name, call := range map[string]func() error{
		"machine": func() error {
			_, err := a.EnsureMachine(a.ctx(), &hostpb.EnsureMachineRequest{Spec: copied})
			return err
		},
		"machine in its network": func() error {
			_, err := a.EnsureMachine(a.ctx(), &hostpb.EnsureMachineRequest{Spec: guest})
			return err
		},
		"machine in its network, another capstand": func() error {
			_, err := b.EnsureMachine(b.ctx(), &hostpb.EnsureMachineRequest{Spec: guest})
			return err
		},
		"machine in a network of its own, another capstand": func() error {
			_, err := b.EnsureMachine(b.ctx(), &hostpb.EnsureMachineRequest{Spec: neighbour})
			return err
		},
		"network":       func() error { _, err := a.EnsureNetwork(a.ctx(), copied.Network); return err },
		"load balancer": func() error { _, err := a.EnsureLoadBalancer(a.ctx(), balancer); return err },
	} {
		err := call()
		t.Log(name, "→", err)
		refused(t, err, codes.AlreadyExists, "default/blue")
	}
	_, err := a.DeleteMachine(a.ctx(), deletion(copied))
	refused(t, err, codes.PermissionDenied, "default/blue-10")
	_, err = a.DeleteLoadBalancer(a.ctx(), &hostpb.DeleteLoadBalancerRequest{Id: blue.id, Namespace: "thief", Name: blue.name})
	refused(t, err, codes.PermissionDenied, "default/blue")
	_, err = a.DeleteNetwork(a.ctx(), &hostpb.DeleteNetworkRequest{Id: blue.id, Namespace: "thief", Name: blue.name})
	refused(t, err, codes.PermissionDenied, "default/blue")
	_, err = a.DeleteMachine(a.ctx(), &hostpb.DeleteMachineRequest{Id: m.Spec.Id})
	refused(t, err, codes.InvalidArgument, "upgrade")

	a.kill()
	a.start() // There is no tombstone, and the owner is still stored.
	a.await(m.Spec.Id, func(now *hostpb.Machine) bool {
		return now.Status.Phase == hostpb.MachineStatus_RUNNING && now.Status.Pid == m.Status.Pid
	})
	_, err = a.DeleteMachine(a.ctx(), deletion(copied))
	refused(t, err, codes.PermissionDenied, "default/blue-10")
	expect.NoError(t, answers(blue.address(1), "blue-10"))
}

func refused(t *testing.T, err error, code codes.Code, says string) {
	t.Helper()
	if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), says) {
		t.Errorf("got %v, want %s with %q", err, code, says)
	}
}

// move moves a machine into another network.
func move(s *hostpb.MachineSpec, cidr string) {
	s.Network = &hostpb.Network{Id: "e2e-moved", Namespace: "default", Name: "moved", Cidr: cidr}
	s.Addresses = []*hostpb.Address{{Address: strings.Split(cidr, "/")[0], Prefix: 24}}
	s.Addresses[0].Address = strings.TrimSuffix(s.Addresses[0].Address, ".0") + ".77"
}

// hostNetwork adds a route on the host, for a network without an interface.
func hostNetwork(t *testing.T) string {
	t.Helper()
	host(t, "ip route add 10.233.0.0/24 dev lo")
	t.Cleanup(func() { host(t, "ip route del 10.233.0.0/24") })
	return "10.233.0.0/24"
}

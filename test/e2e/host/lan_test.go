//go:build e2e

package host_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// inLAN changes the spec of a machine to a dual-stack one in the LAN of the bridge e2e-lab.
func inLAN(spec *hostpb.MachineSpec) *hostpb.MachineSpec {
	spec.Network.Cidr, spec.Network.Ipv6Cidr = "10.234.0.0/24", "fd00:234::/64"
	spec.Network.Lan = &hostpb.LAN{Bridge: "e2e-lab", Pods: []string{"10.244.0.0/16", "fd00:244::/48"}}
	spec.Addresses[0].Address, spec.Addresses[0].Gateway = strings.Replace(spec.Addresses[0].Address, "10.231.", "10.234.", 1), "10.234.0.254"
	last := spec.Addresses[0].Address[strings.LastIndex(spec.Addresses[0].Address, ".")+1:]
	spec.Addresses = append(spec.Addresses[:1], &hostpb.Address{Address: "fd00:234::" + last, Prefix: 64, Gateway: "fd00:234::fe"})
	return spec
}

// Machines in a LAN of the user reach each other and the router with their own addresses. They have no other addresses, also
// while capstand is killed, and after it was started again. The bridge stays when they are removed.
func TestLAN(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	first, second := inLAN(blue.machine(10)), inLAN(blue.machine(11))
	_, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: first})
	refused(t, err, codes.FailedPrecondition, "this host has no bridge e2e-lab")
	seen := t.TempDir() + "/seen"
	t.Cleanup(func() { host(t, "ip link del e2e-router; ip link del e2e-lab; ip netns del capstan-e2e") })
	host(t, `ip link add e2e-lab type bridge && ip addr add 10.234.0.1/24 dev e2e-lab && ip link set e2e-lab up
		ip netns add capstan-e2e && ip -n capstan-e2e link set lo up
		ip link add e2e-router type veth peer name eth0 netns capstan-e2e
		ip link set e2e-router master e2e-lab up
		ip -n capstan-e2e addr add 10.234.0.254/24 dev eth0 && ip -n capstan-e2e addr add fd00:234::fe/64 dev eth0 nodad && ip -n capstan-e2e link set eth0 up`)
	t.Cleanup(startIn(t, "capstan-e2e", seen))
	was := c.make(first)
	c.make(second)
	on := first.Addresses[0].Address
	dial := func(to string) error {
		code, answer, err := get(on, "/dial", "to", to)
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("%s", strings.TrimSpace(answer))
		}
		return err
	}
	expect.NoError(t, dial(second.Addresses[0].Address+":6443"))
	expect.NoError(t, dial("10.234.0.254:80"))
	expect.NoError(t, dial("["+second.Addresses[1].Address+"]:6443"))
	expect.NoError(t, dial("[fd00:234::fe]:80"))
	if got := host(t, "cat "+seen); !strings.Contains(got, "["+first.Addresses[1].Address+"]:") {
		t.Errorf("the router saw %q, want the machine %s", got, first.Addresses[1].Address)
	}
	if route := inside(t, on, "ip -6 route show default"); !strings.Contains(route, "via fd00:234::fe") || strings.Count(route, "default") != 1 {
		t.Errorf("the default route of IPv6 is %q", route)
	}
	if got := host(t, "cat "+seen); !strings.HasPrefix(got, on+":") {
		t.Errorf("the router saw %q, want the machine %s", got, on)
	}
	if route := inside(t, on, "ip route show default"); !strings.Contains(route, "via 10.234.0.254") {
		t.Errorf("the default route is %q", route)
	}

	spoofed := func() {
		inside(t, on, "ip addr add 10.234.0.77/32 dev eth0 && ! curl -sS -m 1 --interface 10.234.0.77 http://10.234.0.254 && ip addr del 10.234.0.77/32 dev eth0")
		inside(t, on, "ip addr add fd00:234::77/128 dev eth0 nodad && ! curl -sS -m 1 --interface fd00:234::77 http://[fd00:234::fe] && ip addr del fd00:234::77/128 dev eth0")
		if got := host(t, "cat "+seen); strings.Contains(got, "10.234.0.77") || strings.Contains(got, "fd00:234::77") {
			t.Errorf("the router saw another address of the machine: %s", got)
		}
	}
	spoofed()
	twin := inLAN(green.machine(10))
	twin.Addresses = first.Addresses
	_, err = c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: twin})
	refused(t, err, codes.AlreadyExists, "belongs to the station 02:ca:")
	for i, address := range []string{"10.234.0.254", "fd00:234::fe"} {
		router := inLAN(green.machine(12))
		router.Addresses[0].Address = "10.234.0.12"
		router.Addresses[i].Address = address
		_, err = c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: router})
		refused(t, err, codes.AlreadyExists, "address "+address+" belongs to the station")
	}

	c.kill()
	expect.NoError(t, dial("10.234.0.254:80"))
	spoofed()
	host(t, "nft delete table bridge capstan-"+hash(blue.id)+"; ip link delete cpm"+hash(first.Id))
	c.start()
	eventually(t, "the machine reaches the router again", func() error {
		if err := tryHost("ip -o link show master e2e-lab | grep cpm" + hash(first.Id)); err != nil {
			return err
		}
		if err := dial("[fd00:234::fe]:80"); err != nil {
			return err
		}
		return dial("10.234.0.254:80")
	})
	spoofed()
	if now := c.await(was.Spec.Id, running(0)); now.Status.Pid != was.Status.Pid {
		t.Errorf("PID 1 was %d, is %d", was.Status.Pid, now.Status.Pid)
	}
	c.deleteMachine(first)
	c.deleteMachine(second)
	if ports := host(t, "ip -o link show master e2e-lab | grep -v e2e-router || true"); ports != "" {
		t.Errorf("the bridge has the ports %s", ports)
	}
	expect.NoError(t, tryHost("! nft list table bridge capstan-"+hash(blue.id)))
}

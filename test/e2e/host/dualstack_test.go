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

const sixCIDR = "fd00:231::/64"

func six(n int) string { return fmt.Sprintf("fd00:231::%d", n) }

// dual returns machine n of the cluster blue, with an additional IPv6 address.
func dual(n int) *hostpb.MachineSpec {
	spec := blue.machine(n)
	spec.Network.Ipv6Cidr = sixCIDR
	spec.Addresses = append(spec.Addresses, &hostpb.Address{Address: six(n), Prefix: 64})
	return spec
}

// IPAM-08: machines with an IPv4 and an IPv6 address reach each other and the outside with both families. The outside
// does not reach them. capstand repairs their network after a restart.
func TestDualStack_IPAM08(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	out := outside(t)
	host(t, `ip addr add fd00:232::1/64 dev e2e-out nodad
		ip -n capstan-e2e addr add fd00:232::2/64 dev eth0 nodad
		ip -n capstan-e2e route add default via fd00:232::1`)
	for n := 10; n <= 11; n++ {
		c.make(dual(n))
	}
	dial := func(from, to string) error {
		code, answer, err := get(from, "/dial", "to", to)
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("%s", strings.TrimSpace(answer))
		}
		return err
	}
	reaches := func() {
		t.Helper()
		expect.NoError(t, answers(blue.address(10), "blue-10"))
		expect.NoError(t, answers(six(10), "blue-10"))
		expect.NoError(t, dial(six(10), "["+six(11)+"]:6443"))
		expect.NoError(t, dial(six(10), "[fd00:232::2]:80"))
		expect.NoError(t, dial(six(10), out.address+":80"))
		if err := out.reaches("[" + six(10) + "]"); err == nil {
			t.Error("the outside reaches blue")
		}
	}
	reaches()
	if seen := host(t, "cat "+out.log); strings.Contains(seen, "fd00:231:") || !strings.Contains(seen, "fd00:232::1") {
		t.Errorf("the outside saw another address than the host's: %s", seen)
	}
	if got := inside(t, six(10), "ip -6 -o addr show dev eth0 scope global | awk '{print $4}'; ip -6 route show default | awk '{print $3}'"); got != six(10)+"/64\nfd00:231::1" {
		t.Errorf("eth0 has %q", got)
	}
	if ra := host(t, "cat /proc/sys/net/ipv6/conf/"+bridge(blue)+"/accept_ra"); ra != "0" {
		t.Errorf("the host accepts router advertisements of machines (accept_ra %s)", ra)
	}

	twin := dual(12)
	twin.Addresses[1].Address = six(11)
	_, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: twin})
	refused(t, err, codes.AlreadyExists, six(11))
	other := green.machine(10)
	other.Network.Ipv6Cidr = "fd00:231::/60"
	_, err = c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: other})
	refused(t, err, codes.FailedPrecondition, sixCIDR)

	c.kill()
	host(t, "ip addr del fd00:231::1/64 dev "+bridge(blue))
	c.start()
	eventually(t, "the host's own address", func() error { return answers(six(10), "blue-10") })
	reaches()
}

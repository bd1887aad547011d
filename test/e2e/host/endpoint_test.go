//go:build e2e

package host_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// bridgeHas reports whether a cluster's bridge has an address with prefix length 32.
func bridgeHas(t *testing.T, k cluster, address string) bool {
	t.Helper()
	return strings.Contains(host(t, "ip -o address show dev "+bridge(k)), " "+address+"/32 ")
}

// A load balancer may listen on an address of the machine network. The bridge has the address as long as the load
// balancer requires it, also after a reboot. No machine can have the address (IPAM-07, IC-10).
func TestBalancerAddress_IPAM07(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	lb := c.balancer(blue, 10)
	c.make(blue.machine(10))
	serving := func(lb *hostpb.LoadBalancer) bool { return lb.Serving && lb.Backends[0].Healthy }
	c.awaitBalancer(blue.id, serving)

	listen := func(address string) error {
		lb.Listen = []string{":6443", address + ":6443"}
		_, err := c.EnsureLoadBalancer(c.ctx(), lb)
		return err
	}
	for address, want := range map[string]struct {
		code codes.Code
		why  string
	}{
		blue.address(10):  {codes.AlreadyExists, "belongs to machine"},
		"192.0.2.77":      {codes.AlreadyExists, "neither this host nor the cluster's machine network"},
		blue.address(255): {codes.InvalidArgument, "broadcast address"},
	} {
		if err := listen(address); status.Code(err) != want.code || !strings.Contains(err.Error(), want.why) {
			t.Errorf("listen on %s: got %v, want %s: %s", address, err, want.code, want.why)
		}
		if bridgeHas(t, blue, address) {
			t.Errorf("the bridge has the refused address %s", address)
		}
	}

	first, second := blue.address(5), blue.address(6)
	expect.NoError(t, listen(first))
	eventually(t, "the first address answers", func() error { return answers(first, "blue-10") })
	expect.NoError(t, answers(blue.address(1), "blue-10"))
	if code, answer, err := get(blue.address(10), "/dial", "to", first+":6443"); err != nil || code != http.StatusOK {
		t.Errorf("the machine does not reach %s: %s %v", first, answer, err)
	}
	taken := blue.machine(5)
	if _, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: taken}); status.Code(err) != codes.AlreadyExists ||
		!strings.Contains(err.Error(), "address "+first+" belongs to load balancer") {
		t.Errorf("a machine with the load balancer's address: %v", err)
	}

	c.kill()
	reboot(t, c, blue, 10)
	c.start()
	eventually(t, "the address after a reboot", func() error {
		if !bridgeHas(t, blue, first) {
			return fmt.Errorf("the bridge does not have %s", first)
		}
		return answers(first, "blue-10")
	})

	expect.NoError(t, listen(second))
	eventually(t, "the second address answers", func() error { return answers(second, "blue-10") })
	eventually(t, "the bridge loses the first address", func() error {
		if bridgeHas(t, blue, first) {
			return fmt.Errorf("the bridge has %s", first)
		}
		return nil
	})
	c.deleteBalancer(lb)
	if bridgeHas(t, blue, second) {
		t.Errorf("the bridge has the address of a deleted load balancer")
	}
	c.make(blue.machine(6)) // The address is free.
}

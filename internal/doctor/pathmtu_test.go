//go:build linux

package doctor

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

func TestPathResult(t *testing.T) {
	for _, tc := range []struct {
		peer  string
		mtu   int
		err   error
		level Level
		says  string
	}{
		{"192.0.2.1", 1500, nil, OK, "MTU 1450"},
		{"2001:db8::1", 1500, nil, OK, "MTU 1430"},
		{"192.0.2.1", 9000, nil, OK, "MTU 8950"},
		{"192.0.2.1", 1400, nil, Warn, "network.mtu of each new CapstanCluster to 1350 at most"},
		{"192.0.2.1", 1329, nil, Fail, "packets of 1330 bytes"},
		{"2001:db8::1", 1350, nil, Warn, "network.mtu of each new CapstanCluster to 1280 at most"},
		{"192.0.2.1", 0, errors.New("no answer"), Fail, "no answer"},
	} {
		r := pathResult(netip.MustParseAddr(tc.peer), tc.mtu, tc.err)
		if r.Level != tc.level || !strings.Contains(r.Found+r.Mend, tc.says) {
			t.Errorf("%+v: %+v", tc, r)
		}
	}
	for _, bad := range []string{"", "box", "127.0.0.1", "ff02::1"} {
		if _, err := ParsePeers([]string{bad}); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// The path leads over a router, and its second link has another MTU than the first one. The router's errors are dropped, as some
// firewalls do.
func TestPathMTU(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	run := func(script string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "/bin/sh", "-euc", script).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	router, peer := holder(t), holder(t)
	in := func(pid int, script string) {
		t.Helper()
		run(fmt.Sprintf("nsenter --target %d --net -- /bin/sh -euc '%s'", pid, script))
	}
	run(fmt.Sprintf(`ip link set lo up
		ip link add first mtu 9000 type veth peer name first mtu 9000 netns %d
		ip addr add 192.0.2.1/24 dev first; ip -6 addr add 2001:db8:1::1/64 dev first nodad; ip link set first up`, router))
	in(router, fmt.Sprintf(`echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
		ip link add second mtu 9000 type veth peer name second mtu 9000 netns %d
		ip addr add 192.0.2.2/24 dev first; ip -6 addr add 2001:db8:1::2/64 dev first nodad; ip link set first up
		ip addr add 198.51.100.1/24 dev second; ip -6 addr add 2001:db8:2::1/64 dev second nodad; ip link set second up
		nft add table inet drops; nft "add chain inet drops output { type filter hook output priority 0; }"
		nft add rule inet drops output icmp type destination-unreachable drop
		nft add rule inet drops output icmpv6 type packet-too-big drop`, peer))
	in(peer, `ip addr add 198.51.100.2/24 dev second; ip -6 addr add 2001:db8:2::2/64 dev second nodad; ip link set second up
		ip route add 192.0.2.0/24 via 198.51.100.1; ip -6 route add 2001:db8:1::/64 via 2001:db8:2::1`)
	run("ip route add 198.51.100.0/24 via 192.0.2.2; ip -6 route add 2001:db8:2::/64 via 2001:db8:1::2")
	for _, mtu := range []int{1500, 1400} {
		in(router, fmt.Sprintf("ip link set second mtu %d", mtu))
		in(peer, fmt.Sprintf("ip link set second mtu %d", mtu))
		for _, address := range []string{"198.51.100.2", "2001:db8:2::2"} {
			if got, err := pathMTU(t.Context(), netip.MustParseAddr(address)); err != nil || got != mtu {
				t.Errorf("%s with MTU %d: %d, %v", address, mtu, got, err)
			}
		}
	}
	if _, err := pathMTU(t.Context(), netip.MustParseAddr("198.51.100.9")); err == nil {
		t.Error("a peer that does not exist answers")
	}
}

// holder returns a process with a network namespace of its own.
func holder(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("unshare", "--net", "/bin/sh", "-c", "ip link set lo up; echo ready; exec sleep infinity")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err == nil {
		_, err = out.Read(make([]byte, 6))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	return cmd.Process.Pid
}

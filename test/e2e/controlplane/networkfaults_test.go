//go:build e2e

package controlplane

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/conditions"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/thread"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/writeload"
)

// cutOff drops all packets of the machine of etcd's leader. The other members elect a leader and continue. When the
// machine is connected again, it is the same member: without a MachineHealthCheck, the control plane replaces no machine.
func cutOff(t *testing.T, s *subject) {
	before := slices.Sorted(maps.Keys(s.mustMachines(t)))
	leader := s.leader(t)
	mend := sync.OnceFunc(addRule(t, leader, "drop"))
	t.Cleanup(mend) // The tests that follow have the same control plane.
	harness.Eventually(t, "the members detect the fault", limit, func(ctx context.Context) error {
		members := &etcdv1.EtcdMemberList{}
		if err := s.etcd.List(ctx, members); err != nil {
			return err
		}
		leads, unhealthy := "", false
		for _, m := range members.Items {
			if m.Name == leader {
				unhealthy = conditions.IsFalse(&m, etcdv1.HealthyCondition)
			} else if ptr.Deref(m.Status.Leader, false) {
				leads = m.Name
			}
		}
		if leads == "" || !unhealthy {
			return fmt.Errorf("new leader %q, the former one is reported as unhealthy: %v", leads, unhealthy)
		}
		return nil
	})
	s.progress(t, 20)
	mend()
	s.settled(t, 3)
	s.wantSameMachines(t, before)
}

// losePackets drops three percent of the packets in both directions on each machine. Writes continue, and no machine is
// replaced, although the fault lasts longer than a MachineHealthCheck waits.
func losePackets(t *testing.T, s *subject) {
	before := slices.Sorted(maps.Keys(s.mustMachines(t)))
	s.checkHealth(t)
	start := time.Now()
	for _, name := range before {
		t.Cleanup(addRule(t, name, "numgen random mod 100 < 3 counter drop"))
	}
	s.progress(t, 50)
	for time.Since(start) < unhealthyTimeout+15*time.Second {
		s.progress(t, 1)
	}
	for _, name := range before {
		dropped(t, name)
	}
	s.wantSameMachines(t, before)
}

// slowMembers delays each message between members of etcd by 100 ms, so that a response takes longer than the interval
// of etcd's heartbeats. Writes continue with an additional delay of at least one exchange each, and no machine is
// replaced.
func slowMembers(t *testing.T, s *subject) {
	const delay, writes = 100 * time.Millisecond, 20
	before := slices.Sorted(maps.Keys(s.mustMachines(t)))
	s.checkHealth(t)
	begin := time.Now()
	for _, name := range before {
		t.Cleanup(delayPeers(t, name, delay))
	}
	// After the first write, all connections from before the fault are closed.
	s.progress(t, 2)
	start := time.Now()
	s.progress(t, writes)
	if took := time.Since(start); took < (writes-1)*(writeload.Interval+2*delay) {
		t.Errorf("%d writes took %s: they were not delayed", writes, took)
	}
	for time.Since(begin) < unhealthyTimeout+15*time.Second {
		s.progress(t, 1)
	}
	s.wantSameMachines(t, before)
}

// peerPort is the port on which members of etcd serve each other.
const peerPort = 2380

// delayPeers delays the messages of a machine's etcd to other members, and their responses. The machine's connections to
// them use a relay in its network namespace, because the kernel may lack netem.
func delayPeers(t *testing.T, machine string, delay time.Duration) (mend func()) {
	t.Helper()
	const mark = 0xca9
	pid, err := strconv.Atoi(pid1(t, machine))
	if err != nil {
		t.Fatal(err)
	}
	dialer := net.Dialer{Timeout: 5 * time.Second, Control: func(_, _ string, c syscall.RawConn) (err error) {
		_ = c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark) })
		return err
	}}
	var listener net.Listener
	err = inNetworkNamespace(pid, func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				var member net.Conn
				to, err := originalDestination(client.(*net.TCPConn))
				if err == nil {
					err = inNetworkNamespace(pid, func() (err error) {
						member, err = dialer.Dial("tcp", to.String())
						return err
					})
				}
				if err != nil {
					_ = client.Close()
					return
				}
				go forwardWithDelay(client, member, delay)
				forwardWithDelay(member, client, delay)
			}()
		}
	}()
	mendRules := rules(t, machine, "slow", fmt.Sprintf(`
	chain relay { type nat hook output priority -150; oifname "eth0" tcp dport %[1]d meta mark != %[2]d redirect to :%[3]d; }
	chain former { type filter hook output priority 0; oifname "eth0" tcp dport %[1]d meta mark != %[2]d reject with tcp reset; }
`, peerPort, mark, listener.Addr().(*net.TCPAddr).Port))
	return func() {
		mendRules()
		_ = listener.Close()
	}
}

// inNetworkNamespace runs f in the network namespace of a process.
func inNetworkNamespace(pid int, f func() error) error {
	ns, err := netns.GetFromPid(pid)
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	thread.Throwaway(func() {
		if err = netns.Set(ns); err == nil {
			err = f()
		}
	})
	return err
}

// originalDestination returns the destination of a redirected connection.
func originalDestination(conn *net.TCPConn) (to netip.AddrPort, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return to, err
	}
	_ = raw.Control(func(fd uintptr) {
		// A sockaddr_in has the size of the first field of this option.
		var answer *unix.IPv6Mreq
		if answer, err = unix.GetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IP, unix.SO_ORIGINAL_DST); err == nil {
			a := answer.Multiaddr
			to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(a[4:8])), binary.BigEndian.Uint16(a[2:4]))
		}
	})
	return to, err
}

// forwardWithDelay forwards each message after the delay, until one side closes its connection.
func forwardWithDelay(from, to net.Conn, delay time.Duration) {
	defer func() { _, _ = from.Close(), to.Close() }()
	data := make([]byte, 64<<10)
	for {
		n, err := from.Read(data)
		time.Sleep(delay)
		if _, writeErr := to.Write(data[:n]); err != nil || writeErr != nil {
			return
		}
	}
}

// progress waits for a number of acknowledged writes.
func (s *subject) progress(t *testing.T, n int) {
	t.Helper()
	before := s.writer.Acknowledged()
	harness.Eventually(t, fmt.Sprintf("%d writes", n), limit, func(context.Context) error {
		if now := s.writer.Acknowledged(); now < before+n {
			return fmt.Errorf("%d were acknowledged", now-before)
		}
		return nil
	})
}

// wantSameMachines checks that no machine was replaced.
func (s *subject) wantSameMachines(t *testing.T, before []string) {
	t.Helper()
	if now := slices.Sorted(maps.Keys(s.mustMachines(t))); !slices.Equal(now, before) {
		t.Errorf("the machines were %v and are %v", before, now)
	}
}

// dropped expects that both rules of addRule with a counter have dropped packets of a machine.
func dropped(t *testing.T, machine string) {
	t.Helper()
	out, err := exec.Command("nsenter", "-n", "-t", pid1(t, machine), "nft", "list", "table", "inet", "spoil").CombinedOutput()
	if err != nil {
		t.Fatalf("nft in %s: %v: %s", machine, err, out)
	}
	if strings.Count(string(out), "counter packets ") != 2 || strings.Contains(string(out), "counter packets 0 ") {
		t.Errorf("no packets of %s were dropped: %s", machine, out)
	}
}

// leader returns the machine of etcd's leader.
func (s *subject) leader(t *testing.T) (name string) {
	t.Helper()
	harness.Eventually(t, "a leader", limit, func(ctx context.Context) error {
		members := &etcdv1.EtcdMemberList{}
		if err := s.etcd.List(ctx, members); err != nil {
			return err
		}
		for _, m := range members.Items {
			if ptr.Deref(m.Status.Leader, false) {
				name = m.Name
				return nil
			}
		}
		return errors.New("there is no leader")
	})
	return name
}

// addRule applies a rule to all packets of a machine, in its own network namespace, until mend is called.
func addRule(t *testing.T, machine, rule string) (mend func()) {
	t.Helper()
	return rules(t, machine, "spoil", fmt.Sprintf(`
	chain input { type filter hook input priority -400; iifname "eth0" %[1]s; }
	chain output { type filter hook output priority -400; oifname "eth0" %[1]s; }
`, rule))
}

// rules adds a table of nftables to a machine, in its own network namespace, until mend is called.
func rules(t *testing.T, machine, table, chains string) (mend func()) {
	t.Helper()
	pid := pid1(t, machine)
	inside := func(rules string) error {
		cmd := exec.Command("nsenter", "-n", "-t", pid, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft in %s: %w: %s", machine, err, out)
		}
		return nil
	}
	if err := inside(fmt.Sprintf("table inet %s {%s}\n", table, chains)); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := inside("delete table inet " + table + "\n"); err != nil {
			t.Error(err)
		}
	}
}

// pid1 returns the process id of a machine's PID 1 on the host.
func pid1(t *testing.T, machine string) (pid string) {
	t.Helper()
	for _, p := range plane.FindRunning(t, machine, "capstan-init", 2) { // PID 1 and the node agent have the same name.
		if len(p.Args) == 1 {
			pid = strconv.Itoa(p.PID)
		}
	}
	return pid
}

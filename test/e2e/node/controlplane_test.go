//go:build e2e

package node

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/writeload"
)

// endpoint is the address of the balancer.
const endpoint = gateway + ":6443"

// balanced is the number of addresses that the balancer checks, starting with the first machine's.
const balanced = 4

// balancer stands for the cluster's load balancer. It listens on the gateway's address and forwards each connection to
// the first machine that accepts it.
type balancer struct {
	w     *testNetwork
	mu    sync.Mutex
	next  int
	gone  map[string]bool // addresses
	conns map[net.Conn]bool
}

func newBalancer(w *testNetwork) *balancer {
	w.t.Helper()
	b := &balancer{w: w, gone: map[string]bool{}, conns: map[net.Conn]bool{}}
	var listener net.Listener
	var err error
	w.inside(w.bridge, func() { listener, err = net.Listen("tcp", endpoint) })
	expect.NoError(w.t, err)
	var wait sync.WaitGroup
	wait.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			wait.Go(func() { b.serve(conn) })
		}
	})
	w.t.Cleanup(func() {
		_ = listener.Close()
		b.mu.Lock()
		for conn := range b.conns {
			_ = conn.Close()
		}
		b.mu.Unlock()
		wait.Wait()
	})
	return b
}

// forget removes an address that no machine has. Connections to it would time out.
func (b *balancer) forget(ip string, gone bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone[ip] = gone
}

func (b *balancer) serve(conn net.Conn) {
	defer conn.Close()
	server := b.dial()
	if server == nil {
		return
	}
	defer server.Close()
	b.mu.Lock()
	b.conns[conn], b.conns[server] = true, true
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		delete(b.conns, conn)
		delete(b.conns, server)
		b.mu.Unlock()
	}()
	var wait sync.WaitGroup
	wait.Go(func() { _, _ = io.Copy(server, conn); _ = server.Close() })
	_, _ = io.Copy(conn, server)
	_ = conn.Close()
	wait.Wait()
}

func (b *balancer) dial() net.Conn {
	b.mu.Lock()
	b.next++
	first, gone := b.next, maps.Clone(b.gone)
	b.mu.Unlock()
	for i := range balanced {
		ip := fmt.Sprintf("10.77.0.%d", 2+(first+i)%balanced)
		if gone[ip] {
			continue
		}
		var conn net.Conn
		var err error
		b.w.inside(b.w.bridge, func() { conn, err = net.DialTimeout("tcp", ip+":6443", time.Second) })
		if err == nil {
			return conn
		}
	}
	return nil
}

// throughEndpoint runs kubectl on a machine, against the load balancer.
func (h *host) throughEndpoint(args ...string) (string, error) {
	return h.kubectl(append([]string{"--server=https://" + endpoint, "--request-timeout=10s"}, args...)...)
}

// untilThroughEndpoint repeats throughEndpoint until it succeeds. Requests fail while members change, etcd elects a
// leader, or the balancer checks the machines. The command must be safe to repeat.
func (h *host) untilThroughEndpoint(args ...string) (out string) {
	h.t.Helper()
	harness.Wait(h.t, "an answer through the endpoint", time.Minute, func() (err error) {
		out, err = h.throughEndpoint(args...)
		return err
	})
	return out
}

// etcdMembers lists the EtcdMembers through the load balancer.
func (h *host) etcdMembers() (map[string]etcdv1.EtcdMember, error) {
	if h.members == nil {
		client, err := dynamic.NewForConfig(h.administrator(endpoint))
		if err != nil {
			return nil, err
		}
		h.members = client.Resource(kube.EtcdMembers)
	}
	found, err := h.members.List(h.t.Context(), metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var list etcdv1.EtcdMemberList
	if err := apiruntime.DefaultUnstructuredConverter.FromUnstructured(found.UnstructuredContent(), &list); err != nil {
		return nil, err
	}
	members := map[string]etcdv1.EtcdMember{}
	for _, m := range list.Items {
		members[m.Name] = m
	}
	return members, nil
}

// untilMembers waits until the EtcdMembers are exactly the named ones, all are healthy voters, and one of them is the
// leader.
func (h *host) untilMembers(timeout time.Duration, names ...string) map[string]etcdv1.EtcdMember {
	h.t.Helper()
	slices.Sort(names)
	var members map[string]etcdv1.EtcdMember
	harness.Wait(h.t, fmt.Sprintf("healthy members %q with a leader", names), timeout, func() error {
		var err error
		if members, err = h.etcdMembers(); err != nil {
			return err
		}
		var healthy []string
		leaders := 0
		for name, m := range members {
			if apimeta.IsStatusConditionTrue(m.Status.Conditions, etcdv1.JoinedCondition) && apimeta.IsStatusConditionTrue(m.Status.Conditions, etcdv1.HealthyCondition) {
				healthy = append(healthy, name)
			}
			if m.Status.Leader != nil && *m.Status.Leader {
				leaders++
			}
		}
		slices.Sort(healthy)
		if !slices.Equal(healthy, names) || leaders != 1 {
			text, _ := json.Marshal(members)
			return fmt.Errorf("healthy members %v with %d leaders, want %v: %s", healthy, leaders, names, text)
		}
		return nil
	})
	return members
}

func leader(members map[string]etcdv1.EtcdMember) string {
	for name, m := range members {
		if m.Status.Leader != nil && *m.Status.Leader {
			return name
		}
	}
	return ""
}

// writer writes to the cluster through the load balancer all the time, like a client with ordinary retries.
type writer struct{ *writeload.Writer }

func (h *host) startWriter() writer {
	h.t.Helper()
	w, err := writeload.Start(context.WithoutCancel(h.t.Context()), h.administrator(endpoint), patience)
	expect.NoError(h.t, err)
	h.t.Cleanup(w.Stop)
	return writer{w}
}

// finish checks that each acknowledged write is stored.
func (w writer) finish(t *testing.T) {
	t.Helper()
	w.Stop()
	t.Logf("%d writes, longest gap %s", w.Acknowledged(), w.LongestGap().Round(time.Millisecond))
	if w.Acknowledged() == 0 {
		t.Error("no write was acknowledged: this test proves nothing")
	}
	for _, f := range w.Failed() {
		t.Error(f)
	}
	var lost []string
	harness.Wait(t, "the writes of the client are read", time.Minute, func() (err error) {
		lost, err = w.Lost(t.Context())
		return err
	})
	if len(lost) > 0 {
		t.Errorf("acknowledged writes that are lost: %v", lost)
	}
}

// TestControlPlane scales a control plane from one machine to three. Then its machines restart, leave, die, and are
// replaced. Row CP-01.
func TestControlPlane(t *testing.T) {
	before := leftovers(t)
	t.Cleanup(func() {
		if after := leftovers(t); after != before {
			t.Errorf("left behind:\nbefore %s\nafter  %s", before, after)
		}
	})
	w := newTestNetwork(t)
	b := newBalancer(w)
	c := newCluster(t, endpoint)
	hosts := map[string]*host{}
	for i, name := range []string{"a", "b", "c"} {
		hosts[name] = w.newMachine(name, fmt.Sprintf("10.77.0.%d", 2+i))
	}
	first, spare := hosts["a"], w.newMachine("d", "10.77.0.5")

	start := time.Now()
	first.start(c.data(nodeconfig.RoleInit))
	first.untilBootstrapped()
	t.Logf("first machine after %s", time.Since(start))
	first.untilMembers(10*time.Second, "a")
	t.Logf("its EtcdMember after %s", time.Since(start))

	// Two machines that join at the same time.
	start = time.Now()
	for _, name := range []string{"b", "c"} {
		hosts[name].start(c.data(nodeconfig.RoleControlPlane))
	}
	for _, name := range []string{"b", "c"} {
		hosts[name].untilBootstrapped()
	}
	t.Logf("two more machines after %s", time.Since(start))
	members := first.untilMembers(10*time.Second, "a", "b", "c")
	t.Logf("their EtcdMembers after %s", time.Since(start))
	for name, m := range members {
		if m.Status.CertificatesExpire == nil || time.Until(m.Status.CertificatesExpire.Time) < 360*24*time.Hour {
			t.Errorf("%s: certificates expire %v", name, m.Status.CertificatesExpire)
		}
	}
	for _, name := range []string{"a", "b", "c"} {
		logSteps(t, hosts[name])
	}
	for _, service := range first.until("ready", time.Minute, allReady).Services {
		out, err := first.exec("/bin/sh", "-c", fmt.Sprintf("grep VmRSS /proc/%d/status", service.PID))
		expect.NoError(t, err)
		t.Logf("memory of %s: %s", service.Name, strings.Join(strings.Fields(out)[1:], " "))
	}
	lease := first.untilThroughEndpoint("get", "lease", "-n", etcdv1.CareLeaseNamespace, etcdv1.CareLeaseName, "-o", "jsonpath={.spec.holderIdentity}")
	if lease != leader(members) {
		t.Errorf("%s manages etcd, %s is the leader", lease, leader(members))
	}

	p := &plane{testNetwork: w, cluster: c, hosts: hosts, spare: spare, balancer: b}
	for _, part := range []struct {
		name string
		test func(*testing.T, *plane)
	}{
		{"a machine restarts", testMachineRestarts},
		{"certificates are renewed in place CP-15", testRenewal},
		{"the leader leaves", testLeaderLeaves},
		{"a new machine with a reused address joins", testReusedAddress},
		{"a dead machine leaves", testDeadLeaves},
		{"a machine dies while it joins", testJoinKilled},
		{"down to one", testDownToOne},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.test(t, p) }) {
			return
		}
	}
}

// plane is a control plane under test. hosts contains the machines whose member must exist.
type plane struct {
	*testNetwork
	cluster  *cluster
	balancer *balancer
	hosts    map[string]*host
	spare    *host
	// gone is the address of a machine that left.
	gone string
}

// other returns a machine that is not the named one.
func (p *plane) other(t *testing.T, name string) *host {
	t.Helper()
	for _, n := range slices.Sorted(maps.Keys(p.hosts)) {
		if n != name {
			return p.hosts[n].with(t)
		}
	}
	t.Fatal("no machine is left")
	return nil
}

func (p *plane) names() []string { return slices.Collect(maps.Keys(p.hosts)) }

// leave does the steps of the control plane provider before it deletes a Machine.
func (p *plane) leave(t *testing.T, name string) {
	t.Helper()
	h := p.other(t, name)
	start := time.Now()
	h.untilThroughEndpoint("patch", "etcdmember", name, "--type=merge", `-p={"spec":{"leave":true}}`)
	h.untilLeft(name)
	t.Logf("%s left after %s", name, time.Since(start).Round(time.Millisecond))
}

func (h *host) untilLeft(name string) {
	h.t.Helper()
	harness.Wait(h.t, name+" has left", time.Minute, func() error {
		members, err := h.etcdMembers()
		if err != nil {
			return err
		}
		c := apimeta.FindStatusCondition(members[name].Status.Conditions, etcdv1.JoinedCondition)
		if c == nil || c.Reason != etcdv1.LeftReason {
			text, _ := json.Marshal(members[name])
			return fmt.Errorf("%s has not left: %s", name, text)
		}
		return nil
	})
}

// forget removes a machine whose member has left, and its object.
func (p *plane) forget(t *testing.T, name string) {
	t.Helper()
	h := p.hosts[name].with(t)
	h.kill()
	h.inside(h.ns, func() {
		link, err := netlink.LinkByName("eth0")
		expect.NoError(t, err)
		expect.NoError(t, netlink.LinkDel(link))
	})
	p.gone = h.ip
	p.balancer.forget(h.ip, true)
	delete(p.hosts, name)
	p.other(t, "").untilThroughEndpoint("delete", "etcdmember", name, "--ignore-not-found")
}

// testMachineRestarts: a machine that is switched off and on becomes a member again.
func testMachineRestarts(t *testing.T, p *plane) {
	h := p.hosts["b"].with(t)
	writer := p.other(t, "b").startWriter()
	h.kill()
	p.other(t, "b").untilMembers(30*time.Second, "a", "c")
	start := time.Now()
	h.start(nil)
	h.until("ready", time.Minute, allReady)
	p.other(t, "b").untilMembers(30*time.Second, p.names()...)
	t.Logf("a member again after %s", time.Since(start))
	writer.finish(t)
}

// testLeaderLeaves: no write is lost when the leader leaves.
func testLeaderLeaves(t *testing.T, p *plane) {
	name := leader(p.other(t, "").untilMembers(time.Minute, p.names()...))
	writer := p.other(t, name).startWriter()
	p.leave(t, name)
	h := p.hosts[name].with(t)
	for _, service := range []string{"kube-apiserver", "etcd"} {
		h.until(service+" stopped", 20*time.Second, func(s initapi.Status) bool { return find(s, service).State == initapi.StateStopped })
	}
	writer.finish(t)
	p.forget(t, name)
	members := p.other(t, "").untilMembers(time.Minute, p.names()...)
	if len(members) != 2 {
		t.Errorf("members: %v", members)
	}
}

// testReusedAddress: a new machine has the address of a removed one.
func testReusedAddress(t *testing.T, p *plane) {
	h := p.newMachine("e", p.gone)
	p.balancer.forget(h.ip, false)
	start := time.Now()
	h.with(t).start(p.cluster.data(nodeconfig.RoleControlPlane))
	h.with(t).untilBootstrapped()
	t.Logf("joined after %s", time.Since(start))
	logSteps(t, h)
	p.hosts["e"] = h
	p.other(t, "").untilMembers(time.Minute, p.names()...)
}

// testDeadLeaves: the leader's machine is removed without leaving first.
func testDeadLeaves(t *testing.T, p *plane) {
	name := leader(p.other(t, "").untilMembers(time.Minute, p.names()...))
	h := p.other(t, name)
	writer := h.startWriter()
	p.hosts[name].with(t).kill()
	start := time.Now()
	harness.Wait(t, name+" is reported as unreachable", time.Minute, func() error {
		members, err := h.etcdMembers()
		if err != nil {
			return err
		}
		c := apimeta.FindStatusCondition(members[name].Status.Conditions, etcdv1.HealthyCondition)
		if c == nil || c.Reason != etcdv1.UnreachableReason {
			return fmt.Errorf("%s: %+v", name, c)
		}
		return nil
	})
	t.Logf("%s reported as dead after %s", name, time.Since(start).Round(time.Millisecond))
	p.leave(t, name)
	writer.finish(t)
	p.forget(t, name)
	p.other(t, "").untilMembers(time.Minute, p.names()...)
}

// testJoinKilled: a machine dies at any step of its join. It gets its data again.
func testJoinKilled(t *testing.T, p *plane) {
	h := p.spare.with(t)
	data := p.cluster.data(nodeconfig.RoleControlPlane)
	for _, moment := range []struct {
		what string
		is   func(initapi.Status, etcdv1.EtcdMember) bool
	}{
		{"announced", func(_ initapi.Status, m etcdv1.EtcdMember) bool { return m.Name != "" }},
		{"etcd started", func(s initapi.Status, _ etcdv1.EtcdMember) bool { return find(s, "etcd").PID != 0 }},
		{"member added", func(_ initapi.Status, m etcdv1.EtcdMember) bool { return m.Status.MemberID != "" }},
		{"the API server started", func(s initapi.Status, _ etcdv1.EtcdMember) bool { return find(s, "kube-apiserver").PID != 0 }},
	} {
		h.start(data)
		harness.Wait(t, moment.what, time.Minute, func() error {
			members, err := p.other(t, "").etcdMembers()
			if err != nil {
				return err
			}
			status, err := h.client().Status(t.Context())
			if err != nil || status.Bootstrap == initapi.Failed || !moment.is(status, members[h.name]) {
				return fmt.Errorf("not yet: %+v, %w", status, err)
			}
			return nil
		})
		h.kill()
		t.Logf("killed when: %s", moment.what)
	}
	h.start(data)
	h.untilBootstrapped()
	p.hosts[h.name] = p.spare
	p.other(t, "").untilMembers(time.Minute, p.names()...)
}

// testDownToOne: several machines get the request to leave at once. They leave one after the other. The last one stays.
func testDownToOne(t *testing.T, p *plane) {
	names := slices.Sorted(maps.Keys(p.hosts))
	last := p.hosts[names[0]].with(t)
	writer := last.startWriter()
	start := time.Now()
	for _, name := range names {
		if name == last.name {
			continue
		}
		last.untilThroughEndpoint("patch", "etcdmember", name, "--type=merge", `-p={"spec":{"leave":true}}`)
	}
	for _, name := range names[1:] {
		last.untilLeft(name)
	}
	t.Logf("%d left after %s", len(names)-1, time.Since(start).Round(time.Millisecond))
	writer.finish(t)
	for _, name := range names[1:] {
		p.forget(t, name)
	}
	last.untilMembers(time.Minute, last.name)

	last.untilThroughEndpoint("patch", "etcdmember", last.name, "--type=merge", `-p={"spec":{"leave":true}}`)
	harness.Wait(t, "the condition of the last voting member", 20*time.Second, func() error {
		members, err := last.etcdMembers()
		if err != nil {
			return err
		}
		c := apimeta.FindStatusCondition(members[last.name].Status.Conditions, etcdv1.LeavingCondition)
		if c == nil || c.Status != metav1.ConditionFalse || !strings.Contains(c.Message, "last voting member") {
			return fmt.Errorf("condition %+v", c)
		}
		return nil
	})
	harness.Wait(t, "the API server refuses to unset leave", time.Minute, func() error {
		_, err := last.throughEndpoint("patch", "etcdmember", last.name, "--type=merge", `-p={"spec":{"leave":false}}`)
		if err == nil {
			t.Fatal("leave was unset")
		}
		if !strings.Contains(err.Error(), "cannot be unset") {
			return err
		}
		return nil
	})
}

// logSteps logs the duration of each step of `node up`.
func logSteps(t *testing.T, h *host) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(h.root, "var/log/capstan/bootstrap.log"))
	expect.NoError(t, err)
	t.Logf("%s:\n%s", h.name, data)
}

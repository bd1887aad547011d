//go:build e2e

package host_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// awaitBalancer follows the Watch stream until the load balancer has the wanted state.
func (c *capstand) awaitBalancer(id string, wanted func(*hostpb.LoadBalancer) bool) *hostpb.LoadBalancer {
	c.t.Helper()
	return awaitEvent(c, "load balancer "+id, func(e *hostpb.Event) *hostpb.LoadBalancer {
		if lb := e.GetLoadBalancer(); lb != nil && lb.Id == id {
			return lb
		}
		return nil
	}, wanted)
}

// balancerPID finds the process that listens on a cluster's endpoint.
func balancerPID(t *testing.T, k cluster) int {
	t.Helper()
	var pid int
	eventually(t, "balancer's process", func() error {
		out := host(t, "ss -Hltnp 'src "+k.address(1)+" and sport = 6443' | grep -o 'pid=[0-9]*' | cut -d= -f2")
		_, err := fmt.Sscan(out, &pid)
		return err
	})
	return pid
}

// The load balancer adds and removes backends, holds connections while there is no backend, and distributes connections
// over the backends (IM-06, IC-10).
func TestBalancer(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	lb := c.balancer(blue) // no backends yet
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Serving })

	parked := make(chan error, 1)
	go func() { parked <- answers(blue.address(1), "blue-10") }() // The client connects before there is a machine.
	lb.Backends = []*hostpb.Backend{{Name: "blue-10", Address: blue.address(10) + ":6443"}}
	_, err := c.EnsureLoadBalancer(c.ctx(), lb)
	expect.NoError(t, err)
	c.make(blue.machine(10))
	up := time.Now()
	expect.NoError(t, <-parked)
	t.Logf("waiting connection served %s after the start of the machine", time.Since(up).Round(time.Millisecond))
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Backends[0].Healthy })

	c.make(blue.machine(11))
	lb.Backends = append(lb.Backends, &hostpb.Backend{Name: "blue-11", Address: blue.address(11) + ":6443"})
	_, err = c.EnsureLoadBalancer(c.ctx(), lb)
	expect.NoError(t, err)
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return len(lb.Backends) == 2 && lb.Backends[1].Healthy })
	names := map[string]int{}
	for range 10 {
		_, name, err := get(blue.address(1), "/name")
		expect.NoError(t, err)
		names[name]++
	}
	if names["blue-10"] == 0 || names["blue-11"] == 0 {
		t.Errorf("10 connections reached %v", names)
	}

	// A machine that dies gets no further connections. The kernel can still accept one for the process that ends.
	_, _, _ = get(blue.address(10), "/exit")
	lost := 0
	for range 10 {
		if _, _, err := get(blue.address(1), "/name"); err != nil {
			lost++
			t.Logf("while a backend is down: %v", err)
		}
	}
	if lost > 1 {
		t.Errorf("%d of 10 connections failed while a backend was down", lost)
	}
}

// The balancer continues without capstand. The next capstand adopts it, and restarts it when it dies.
func TestBalancerKilled(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	c.make(blue.machine(10))
	c.balancer(blue, 10)
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Serving && lb.Backends[0].Healthy })
	pid := balancerPID(t, blue)
	if uid := host(t, fmt.Sprintf("stat -c %%u /proc/%d", pid)); uid != "65534" {
		t.Errorf("the balancer runs as user %s", uid)
	}
	if groups := host(t, fmt.Sprintf("cat /proc/%d/cgroup", pid)); !strings.Contains(groups, "/balancer-"+blue.id) {
		t.Errorf("the balancer is in cgroups %s", groups)
	}

	c.kill()
	expect.NoError(t, answers(blue.address(1), "blue-10"))
	c.start()
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Serving && lb.Backends[0].Healthy })
	if now := balancerPID(t, blue); now != pid {
		t.Errorf("the process id of the balancer is %d after a restart of capstand, want %d", now, pid)
	}

	died := time.Now()
	expect.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	eventually(t, "the endpoint answers", func() error { return answers(blue.address(1), "blue-10") })
	t.Logf("endpoint answers again after %s", time.Since(died).Round(time.Millisecond))
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Serving && lb.Backends[0].Healthy })

	// The next capstand completes a deletion that the killed one has started.
	expect.NoError(t, os.WriteFile(filepath.Join(c.root, "balancers", blue.id, "deleted"), nil, 0o600))
	c.kill()
	c.start()
	eventually(t, "balancer is removed", func() error { return gone(filepath.Join(c.root, "balancers", blue.id)) })
	expect.NoError(t, tryHost("! ss -Hltn 'src "+blue.address(1)+"' | grep ."))
}

// A new capstand replaces the previous balancer with its own program. Open connections continue, new connections are
// served all the time, and the previous process ends with its last connection. Row IC-10.
func TestBalancerUpgraded(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	c.make(blue.machine(10))
	c.balancer(blue, 10)
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Serving && lb.Backends[0].Healthy })
	before := balancerPID(t, blue)
	dials := 0
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			dials++
			return (&net.Dialer{}).DialContext(ctx, network, blue.address(1)+":6443")
		},
	}}
	ask := func() {
		t.Helper()
		res, err := client.Get("https://" + blue.address(1) + ":6443/name")
		expect.NoError(t, err)
		_, _ = io.Copy(io.Discard, res.Body)
		expect.NoError(t, res.Body.Close())
	}
	ask()

	stop, failed := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(failed)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, _, err := get(blue.address(1), "/name"); err != nil {
				failed <- err
				return
			}
		}
	}()
	next := filepath.Join(t.TempDir(), "capstand")
	copyFile(t, c.binary, next)
	c.binary = next
	c.kill()
	c.start()
	var now int
	eventually(t, "a new balancer", func() error {
		if now = balancerPID(t, blue); now == before {
			return fmt.Errorf("still process %d", before)
		}
		return nil
	})
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Serving && lb.Backends[0].Healthy })
	ask()
	if dials != 1 {
		t.Errorf("the open connection was lost: %d dials", dials)
	}
	close(stop)
	expect.NoError(t, <-failed)
	expect.NoError(t, syscall.Kill(before, 0)) // it has a connection
	client.CloseIdleConnections()
	eventually(t, "the end of the previous balancer", func() error { return gone(fmt.Sprintf("/proc/%d", before)) })

	// A restart of the same program changes nothing.
	c.kill()
	c.start()
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Serving && lb.Backends[0].Healthy })
	if pid := balancerPID(t, blue); pid != now {
		t.Errorf("the process id of the balancer is %d after a restart of the same capstand, want %d", pid, now)
	}
}

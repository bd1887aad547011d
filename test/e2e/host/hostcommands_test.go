//go:build e2e

package host_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netns"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/thread"
)

// host runs a shell command on the host.
func host(t *testing.T, command string) string {
	t.Helper()
	out, err := exec.Command("/bin/sh", "-c", command).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	return strings.TrimSpace(string(out))
}

// The documentation contains these names of objects on the host.
func hash(s string) string    { sum := sha256.Sum256([]byte(s)); return fmt.Sprintf("%x", sum[:5]) }
func bridge(k cluster) string { return "cap" + hash(k.id) }
func gone(path string) error {
	_, err := os.Lstat(path)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("%s exists", path)
}

func hostID(t *testing.T, c *capstand) string {
	t.Helper()
	id, err := os.ReadFile(filepath.Join(c.root, "host-id"))
	expect.NoError(t, err)
	return strings.TrimSpace(string(id))
}

// killGroup kills every process in the cgroups of a capstand.
func killGroup(t *testing.T, id string) {
	t.Helper()
	eventually(t, "processes of "+id, func() error {
		out := host(t, "find /sys/fs/cgroup -path '*/capstan/"+id+"*' -name cgroup.procs -exec cat {} + | sort -un")
		for _, pid := range strings.Fields(out) {
			var n int
			if _, err := fmt.Sscan(pid, &n); err == nil && n > 1 {
				_ = syscall.Kill(n, syscall.SIGKILL)
			}
		}
		if out != "" {
			return errors.New("remaining: " + out)
		}
		return nil
	})
}

// balancer creates a cluster's load balancer for machines and returns the address on which it listens.
func (c *capstand) balancer(k cluster, machines ...int) *hostpb.LoadBalancer {
	c.t.Helper()
	_, err := c.EnsureNetwork(c.ctx(), k.network())
	expect.NoError(c.t, err)
	lb := &hostpb.LoadBalancer{Id: k.id, Namespace: "default", Name: k.name, NetworkId: k.id, Listen: []string{":6443"}}
	for _, n := range machines {
		lb.Backends = append(lb.Backends, &hostpb.Backend{Name: k.machine(n).Name, Address: k.address(n) + ":6443"})
	}
	_, err = c.EnsureLoadBalancer(c.ctx(), lb)
	expect.NoError(c.t, err)
	return lb
}

// answers checks that the machine of that name answers at an address.
func answers(address, name string) error {
	_, got, err := get(address, "/name")
	if err == nil && got != name {
		err = fmt.Errorf("%s answers as %q, want %q", address, got, name)
	}
	return err
}

// logs reads a log to its end.
func (c *capstand) logs(id, service string, tail int32) string {
	c.t.Helper()
	stream, err := c.Logs(c.ctx(), &hostpb.LogsRequest{Machine: id, Service: service, TailLines: tail})
	expect.NoError(c.t, err)
	var all strings.Builder
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all.String()
		}
		expect.NoError(c.t, err)
		all.Write(chunk.Data)
	}
}

// tryHost runs a shell command on the host that may fail.
func tryHost(command string) error {
	out, err := exec.Command("/bin/sh", "-c", command).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, out)
	}
	return nil
}

// listenOn listens on a port of an address of the host until the end of the test.
func listenOn(t *testing.T, address string) string {
	t.Helper()
	listener, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	expect.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	return listener.Addr().String()
}

// startIn listens on port 80 in a network namespace. It records the address of each client, and returns it to the client.
func startIn(t *testing.T, namespace, log string) (stop func()) {
	t.Helper()
	ns, err := netns.GetFromName(namespace)
	expect.NoError(t, err)
	defer func() { _ = ns.Close() }()
	seen, err := os.Create(log)
	expect.NoError(t, err)
	var listener net.Listener
	thread.Throwaway(func() {
		if err = netns.Set(ns); err == nil {
			listener, err = net.Listen("tcp", ":80")
		}
	})
	expect.NoError(t, err)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = fmt.Fprintln(seen, conn.RemoteAddr())
			_, _ = fmt.Fprintln(conn, conn.RemoteAddr())
			_ = conn.Close()
		}
	}()
	return func() { _, _ = listener.Close(), seen.Close() }
}

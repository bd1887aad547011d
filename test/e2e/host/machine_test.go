//go:build e2e

package host_test

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// A machine starts within its own limits, and its deletion leaves no trace.
func TestMachine(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	m := c.make(blue.machine(10))
	for command, want := range map[string]string{
		"hostname": "blue-10",
		"grep MemTotal /proc/meminfo | tr -s ' '":                "MemTotal: 262144 kB",
		"grep -c ^processor /proc/cpuinfo":                       "1",
		"ls -d /sys/devices/system/node/node0/cpu[0-9]* | wc -l": "1",
		"cat /sys/devices/system/cpu/online":                     "0",
		"cat /proc/sys/vm/overcommit_memory":                     "1",
		"cat /var/lib/bootstrapped":                              "#cloud-config",
		"test -w /dev/kmsg && echo yes":                          "yes",
		"echo 1 > /proc/sys/net/ipv4/ip_forward && echo yes":     "yes",
		"echo 1 > /proc/sys/vm/overcommit_memory || echo no":     "/bin/sh: 1: cannot create /proc/sys/vm/overcommit_memory: Read-only file system\nno",
		"ls --ignore=resolv.conf /run/capstan":                   "init.sock\nmetadata.json",
	} {
		if got := inside(t, blue.address(10), command); got != want {
			t.Errorf("%s: got %q, want %q", command, got, want)
		}
	}
	info, err := c.GetInfo(c.ctx(), &hostpb.GetInfoRequest{})
	expect.NoError(t, err)
	if info.Machines != 1 || info.AllocatedMemoryBytes != m.Spec.MemoryBytes || info.KubernetesVersions[0] != version || info.Driver != "runc" {
		t.Errorf("host: %v", info)
	}
	c.deleteMachine(m.Spec)
	if _, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: blue.machine(10)}); err == nil {
		t.Error("a deleted id was created again")
	}
}

// Logs are read inside the machine: a link in a machine's log folder does not lead to a file of the host.
func TestLogs(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	id := c.make(blue.machine(10)).Spec.Id
	if log := c.logs(id, "test", 2); log != "two\nthree\n" {
		t.Errorf("the last two lines are %q", log)
	}
	inside(t, blue.address(10), "cd /var/log/capstan && ln -s /etc/shadow evil.log && ln -s ../../../../../../../etc/shadow worse.log")
	for service, code := range map[string]codes.Code{
		"evil": codes.Internal, "worse": codes.Internal, "none": codes.NotFound, "../test": codes.InvalidArgument,
	} {
		stream, err := c.Logs(c.ctx(), &hostpb.LogsRequest{Machine: id, Service: service})
		expect.NoError(t, err)
		if chunk, err := stream.Recv(); status.Code(err) != code {
			t.Errorf("%s: got %q, %v; want %s", service, chunk.GetData(), err, code)
		}
	}

	stream, err := c.Logs(c.ctx(), &hostpb.LogsRequest{Machine: id, Service: "test", Follow: true, TailLines: 1})
	expect.NoError(t, err)
	for _, want := range []string{"three\n", "four\n"} {
		chunk, err := stream.Recv()
		expect.NoError(t, err)
		if string(chunk.Data) != want {
			t.Errorf("followed %q, want %q", chunk.Data, want)
		}
		inside(t, blue.address(10), "echo four >> /var/log/capstan/test.log")
	}
}

// Only root, or a configured user and group, can use the socket. A second capstand for the same state does not start.
func TestSocket(t *testing.T) {
	c := newCapstand(t)
	if got := host(t, "stat -c '%a %u' "+c.socket()); got != "600 0" {
		t.Errorf("socket has %s", got)
	}
	c.end(syscall.SIGTERM)
	c.args = append(c.args, "--socket-uid", "1234", "--socket-group", "2345")
	c.start()
	if got := host(t, "stat -c '%a %u %g' "+c.socket()); got != "660 1234 2345" {
		t.Errorf("socket has %s", got)
	}
	out, err := exec.Command(c.cmd.Path, c.args...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "another capstand") {
		t.Errorf("a second capstand: %v %s", err, out)
	}
}

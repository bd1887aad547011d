//go:build e2e

package host_test

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// A machine with a fork bomb reaches its limit. Its neighbour and the host are not affected.
func TestForkBomb(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	spec := blue.machine(10)
	spec.PidsLimit = 300
	c.make(spec)
	c.make(blue.machine(11))
	// The number of processes is bounded, so that the test is harmless if the limit is missing.
	inside(t, blue.address(10), "(for i in $(seq 600); do sleep 1000 & done) >/dev/null 2>&1 </dev/null & sleep 0.1")
	eventually(t, "the limit is reached", func() error {
		// No shell can start in the full machine, so the test reads the limit on the host.
		if n := processes(t, hostID(t, c)+"/"+spec.Id); n < 290 || n > 300 {
			return fmt.Errorf("%d processes", n)
		}
		return nil
	})
	if got := inside(t, blue.address(11), "for i in $(seq 50); do sleep 0 & done; wait; echo forks"); got != "forks" {
		t.Errorf("the neighbour: %s", got)
	}
	c.kill() // A new capstand starts, and removes the full machine with runc.
	c.start()
	c.make(blue.machine(12))
	c.deleteMachine(spec)
}

// withoutDescriptors sets the limit of descriptors of a process so that it cannot open any file. mend restores the
// limit.
func withoutDescriptors(t *testing.T, pid int) (mend func()) {
	t.Helper()
	free := uint64(0) // The kernel uses the lowest free number.
	for gone(fmt.Sprintf("/proc/%d/fd/%d", pid, free)) != nil {
		free++
	}
	var process unix.Stat_t
	expect.NoError(t, unix.Stat(fmt.Sprintf("/proc/%d", pid), &process))
	// The command runs as the process's own user: root needs CAP_SYS_RESOURCE for this.
	prlimit := func(args ...string) string {
		cmd := exec.Command("prlimit", append(args, "--pid", strconv.Itoa(pid))...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: process.Uid, Gid: process.Gid}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("prlimit: %v: %s", err, out)
		}
		return string(out)
	}
	var soft, hard uint64
	_, err := fmt.Sscan(prlimit("--nofile", "--noheadings", "--raw", "--output", "SOFT,HARD"), &soft, &hard)
	expect.NoError(t, err)
	prlimit(fmt.Sprintf("--nofile=%d:%d", free, hard))
	return func() { prlimit(fmt.Sprintf("--nofile=%d:%d", soft, hard)) }
}

// descriptors counts the open files of a process. It omits pipes, because Go keeps used pipes until garbage collection.
func descriptors(t *testing.T, pid int) (n int) {
	t.Helper()
	open, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	expect.NoError(t, err)
	for _, link := range open {
		if target, err := os.Readlink(link); err == nil && !strings.HasPrefix(target, "pipe:") {
			n++
		}
	}
	return n
}

// A capstand that cannot open files refuses new machines with the reason, and running machines continue. When it can
// open files again, it creates the machine and starts the balancer that died meanwhile. It leaks no descriptor.
func TestDescriptorsOfCapstand(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	c.make(blue.machine(10))
	c.balancer(blue, 10)
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Serving && lb.Backends[0].Healthy })
	balancer, pid := balancerPID(t, blue), c.cmd.Process.Pid
	before := descriptors(t, pid)

	mend := withoutDescriptors(t, pid)
	request := &hostpb.EnsureMachineRequest{Spec: blue.machine(11), BootstrapData: []byte("#cloud-config\n")}
	for range 3 {
		if _, err := c.EnsureMachine(c.ctx(), request); err == nil || !strings.Contains(err.Error(), "too many open files") {
			t.Errorf("a machine without descriptors: %v", err)
		}
	}
	list, err := c.ListMachines(c.ctx(), &hostpb.ListMachinesRequest{})
	expect.NoError(t, err)
	if len(list.Machines) != 1 || list.Machines[0].Status.Phase != hostpb.MachineStatus_RUNNING {
		t.Errorf("the machines: %v", list.Machines)
	}
	expect.NoError(t, answers(blue.address(1), "blue-10"))
	expect.NoError(t, syscall.Kill(balancer, syscall.SIGKILL))
	mend()

	eventually(t, "a new balancer serves", func() error {
		if now := balancerPID(t, blue); now == balancer {
			return fmt.Errorf("still process %d", now)
		}
		return answers(blue.address(1), "blue-10")
	})
	c.make(blue.machine(11))
	c.deleteMachine(blue.machine(11))
	eventually(t, "all descriptors are closed", func() error {
		if now := descriptors(t, pid); now > before {
			return fmt.Errorf("%d descriptors, had %d", now, before)
		}
		return nil
	})
}

// A balancer that cannot open files keeps its connections. When it can open files again, it serves the connections that
// clients opened meanwhile, and reads its configuration.
func TestDescriptorsOfBalancer(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	c.make(blue.machine(10))
	c.make(blue.machine(11))
	lb := c.balancer(blue, 10)
	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool { return lb.Serving && lb.Backends[0].Healthy })
	pid := balancerPID(t, blue)
	before := descriptors(t, pid)
	config := &tls.Config{InsecureSkipVerify: true}
	old, err := tls.Dial("tcp", blue.address(1)+":6443", config)
	expect.NoError(t, err)
	defer func() { _ = old.Close() }()

	mend := withoutDescriptors(t, pid)
	late := make(chan error, 1)
	go func() {
		_, _, err := get(blue.address(1), "/name")
		late <- err
	}()
	lb.Backends = []*hostpb.Backend{{Name: "blue-10", Address: blue.address(10) + ":6443"}, {Name: "blue-11", Address: blue.address(11) + ":6443"}}
	_, err = c.EnsureLoadBalancer(c.ctx(), lb)
	expect.NoError(t, err)
	_, err = io.WriteString(old, "GET /name HTTP/1.1\r\nHost: a\r\n\r\n")
	expect.NoError(t, err)
	expect.NoError(t, old.SetReadDeadline(time.Now().Add(patience)))
	answer, err := http.ReadResponse(bufio.NewReader(old), nil)
	if err != nil {
		t.Fatalf("the former connection: %v", err)
	}
	expect.NoError(t, answer.Body.Close())
	select {
	case err := <-late:
		t.Errorf("a connection is served without descriptors: %v", err)
	default:
	}
	mend()

	c.awaitBalancer(blue.id, func(lb *hostpb.LoadBalancer) bool {
		return len(lb.Backends) == 2 && lb.Backends[0].Healthy && lb.Backends[1].Healthy
	})
	expect.NoError(t, <-late)
	expect.NoError(t, old.Close())
	eventually(t, "all descriptors are closed", func() error {
		if now := descriptors(t, pid); now > before+2 { // the second machine's
			return fmt.Errorf("%d descriptors, had %d", now, before)
		}
		return nil
	})
	if now := balancerPID(t, blue); now != pid {
		t.Errorf("the process id of the balancer is %d, want %d", now, pid)
	}
}

// processes returns the count of the pids cgroup, which includes threads.
func processes(t *testing.T, group string) int {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		if data, err := os.ReadFile(filepath.Join(root, "capstan", group, "pids.current")); err == nil {
			n, err := strconv.Atoi(strings.TrimSpace(string(data)))
			expect.NoError(t, err)
			return n
		}
	}
	t.Fatal("the count of processes is missing")
	return 0
}

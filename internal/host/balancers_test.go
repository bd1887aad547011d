package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/balancer"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
)

// The process of a balancer is less privileged than capstand, which reads its status. What it puts there neither blocks capstand, nor uses
// up its memory, nor shows other files.
func TestStatusOfBalancer(t *testing.T) {
	const status = `{"healthy":["192.0.2.1:6443"],"message":"one\ntwo"}`
	outside := filepath.Join(t.TempDir(), "status.json")
	write(t, outside, status)
	for name, test := range map[string]struct {
		make func(path string) error
		ok   bool
	}{
		"a status": {func(p string) error { return os.WriteFile(p, []byte(status), 0o600) }, true},
		"a long message": {func(p string) error {
			return os.WriteFile(p, []byte(`{"healthy":["192.0.2.1:6443"],"message":"one two`+strings.Repeat("x", 2*maxMessage)+`"}`), 0o600)
		}, true},
		"a link": {func(p string) error { return os.Symlink(outside, p) }, false},
		"a pipe": {func(p string) error { return unix.Mkfifo(p, 0o600) }, false},
		"a large file": {func(p string) error {
			return os.WriteFile(p, []byte(status+strings.Repeat(" ", maxReport)), 0o600)
		}, false},
		"a huge file": {func(p string) error {
			return errors.Join(os.WriteFile(p, []byte(status), 0o600), os.Truncate(p, 1<<40))
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			lb := &loadBalancer{dir: t.TempDir()}
			if err := errors.Join(os.Mkdir(lb.shared(), 0o700), test.make(filepath.Join(lb.shared(), balancer.StatusFile))); err != nil {
				t.Fatal(err)
			}
			got, err := lb.reported()
			if (err == nil) != test.ok {
				t.Fatal(err)
			}
			if test.ok && (len(got.Healthy) != 1 || !strings.HasPrefix(got.Message, "one two") || len(got.Message) > maxMessage) {
				t.Errorf("found %+v", got)
			}
		})
	}
}

// An endpoint on an address and port that another program has is refused with both, before anything is made. The load balancer's own
// address, and one that its bridge does not have yet, are accepted.
func TestPortsFree(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	inUse := taken.Addr().String()
	for name, tc := range map[string]struct {
		listen, served, have []string
		roaming              string
		want                 string // a part of the error; empty: free
	}{
		"free":                         {listen: []string{"127.0.0.1:0"}},
		"of another program":           {listen: []string{inUse}, want: inUse + ": bind: address already in use; free the port or choose another"},
		"the second one":               {listen: []string{"127.0.0.1:0", inUse}, want: inUse},
		"its own":                      {listen: []string{inUse}, have: []string{inUse}},
		"not on the bridge yet":        {listen: []string{"192.0.2.1:6443"}, served: []string{"192.0.2.1"}},
		"an address of another host":   {listen: []string{"192.0.2.1:6443"}, want: "192.0.2.1:6443 is an address of neither this host nor the cluster's machine network; choose another"},
		"a virtual address in a LAN":   {listen: []string{"192.0.2.1:6443"}, roaming: "192.0.2.1:6443"},
		"its port has another program": {listen: []string{inUse}, roaming: inUse, want: inUse},
		"served does not hide others":  {listen: []string{"192.0.2.1:6443", inUse}, served: []string{"192.0.2.1"}, want: inUse},
	} {
		t.Run(name, func(t *testing.T) {
			err := portsFree(tc.listen, tc.served, tc.have, tc.roaming)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// A change that failed half-way is carried out by the next call, also if that has the same spec, or the old one. Until then the old spec is
// the one that owners see. A load balancer without a readable record runs from the first description that was carried out.
func TestFailedChangeOfBalancer(t *testing.T) {
	h := recorded(t)
	h.box = network.Box{Dir: t.TempDir()}
	lb := h.balancers.byID["n-1"]
	described := make(chan struct{})
	lb.described = described
	next := goodBalancer()
	next.Backends = []*hostpb.Backend{{Name: "one", Address: "10.1.0.10:6443"}}
	change := func(spec *hostpb.LoadBalancer) error {
		h.mu.Lock()
		defer h.mu.Unlock()
		_, err := h.balancers.change(lb, spec, lb.listen)
		return err
	}
	if err := os.MkdirAll(lb.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, lb.shared(), "no folder")
	for range 2 {
		if err := change(next); err == nil || proto.Equal(lb.snapshot(), next) {
			t.Errorf("a change that is not carried out: %v, %v", err, lb.snapshot())
		}
	}
	if err := os.Remove(lb.shared()); err != nil {
		t.Fatal(err)
	}
	for _, spec := range []*hostpb.LoadBalancer{goodBalancer(), next} {
		if err := change(spec); err != nil || !proto.Equal(lb.currentSpec(), spec) {
			t.Fatal(err, lb.currentSpec())
		}
		for _, file := range []string{specFile(lb.dir), filepath.Join(lb.shared(), balancer.ConfigFile)} {
			if got := read(t, file); strings.Contains(got, "10.1.0.10") != (len(spec.Backends) == 1) {
				t.Errorf("with the backends %v, %s contains %s", spec.Backends, file, got)
			}
		}
		select {
		case <-described:
		default:
			t.Error("the load balancer does not run")
		}
	}
}

// The process of a balancer cannot fill the disk of the host. Its folder is made anew when none of its processes runs, so a full one does not
// stay full, and one that an earlier version made on the disk goes. A running process keeps its folder.
func TestSharedOfBalancer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	h := recorded(t)
	h.id, h.config.BalancerUID = fmt.Sprint("test-", os.Getpid()), 65534
	lb := h.balancers.byID["n-1"]
	full := filepath.Join(lb.shared(), "full")
	if err := os.MkdirAll(lb.shared(), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, full, "on the disk")
	renewed := func(want bool) {
		t.Helper()
		if err := lb.renewShared(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(full); (err != nil) != want {
			t.Fatalf("the folder is new: %t, want %t", err != nil, want)
		}
	}
	renewed(true)
	if err := os.WriteFile(full, make([]byte, 2*sharedLimits.Bytes), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("the folder has no limit: %v", err)
	}
	process := exec.CommandContext(t.Context(), "sleep", "600")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	if err := lb.cgroup().Add(process.Process.Pid); err != nil {
		t.Skip("without cgroups: ", err)
	}
	t.Cleanup(func() { _ = cgroup.Group("/capstan/" + h.id).Remove(context.Background()) })
	renewed(false)
	write(t, lb.startMark(), "")
	_, _ = process.Process.Kill(), process.Wait()
	renewed(false) // A process that was started and then got no cgroup may still run.
	if err := os.Remove(lb.startMark()); err != nil {
		t.Fatal(err)
	}
	renewed(true)
	if err := lb.removeShared(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(lb.shared()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder remains: %v", err)
	}
}

// A capstand that returns with the record of a load balancer leaves the addresses to another capstand of the box, which got the load balancer
// meanwhile.
func TestRecordOfMovedBalancer(t *testing.T) {
	h := recorded(t)
	h.box = network.Box{Dir: t.TempDir(), HostID: "a", HostRoot: t.TempDir()}
	lb := h.balancers.byID["n-1"]
	lb.listen = append(lb.listen, "10.1.0.9:6443")
	hash := strings.TrimPrefix(network.BridgeName("n-1"), "cap")
	if err := os.MkdirAll(filepath.Join(h.box.Dir, "networks", hash, "leases"), 0o700); err != nil {
		t.Fatal(err)
	}
	next := network.Box{Dir: h.box.Dir, HostID: "b", HostRoot: t.TempDir()}
	_ = next.Serve("n-1", "n-1", "default/demo", []string{"10.1.0.9"}) // There is no bridge. The lease comes first.
	var inUse network.InUseError
	if err := lb.serve(); !errors.As(err, &inUse) || inUse.Address != "10.1.0.9" {
		t.Errorf("expected that another capstand has the address, found: %v", err)
	}
}

package host

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/machineapi"
)

// Machines are not trusted. capstand reads only the machine's file, does not block, and accepts at most the term of one Lease.
func TestTermOfMachine(t *testing.T) {
	now := time.Hour
	term := func(until time.Duration) []byte {
		data, _ := json.Marshal(machineapi.EndpointTerm{Until: until})
		return data
	}
	secret := filepath.Join(t.TempDir(), "secret")
	write(t, secret, string(term(now+time.Second)))
	for name, tc := range map[string]struct {
		make func(path string) error
		want time.Duration
	}{
		"a term":       {func(p string) error { return os.WriteFile(p, term(now+time.Second), 0o600) }, now + time.Second},
		"a long term":  {func(p string) error { return os.WriteFile(p, term(1<<62), 0o600) }, now + machineapi.EndpointLease},
		"a past term":  {func(p string) error { return os.WriteFile(p, term(now-time.Second), 0o600) }, now - time.Second},
		"no file":      {func(string) error { return nil }, 0},
		"a link":       {func(p string) error { return os.Symlink(secret, p) }, 0},
		"a pipe":       {func(p string) error { return unix.Mkfifo(p, 0o600) }, 0},
		"a folder":     {func(p string) error { return os.Mkdir(p, 0o700) }, 0},
		"a large file": {func(p string) error { return os.WriteFile(p, make([]byte, 1<<20), 0o600) }, 0},
		"a bad number": {func(p string) error { return os.WriteFile(p, []byte(`{"until":"never"}`), 0o600) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := tc.make(filepath.Join(dir, machineapi.EndpointLeaseFile)); err != nil {
				t.Fatal(err)
			}
			if got := termOf([]string{dir, filepath.Join(dir, "missing")}, now); got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
		})
	}
}

// An offer replaces a link of the machine in its place and does not follow the link.
func TestOfferDoesNotFollowLinks(t *testing.T) {
	dir, secret := t.TempDir(), filepath.Join(t.TempDir(), "secret")
	write(t, secret, "secret")
	if err := os.Symlink(secret, filepath.Join(dir, machineapi.EndpointOfferFile)); err != nil {
		t.Fatal(err)
	}
	if err := writeOffer(dir, time.Hour); err != nil {
		t.Fatal(err)
	}
	if got := read(t, secret); got != "secret" {
		t.Errorf("a file of the host is %q", got)
	}
	if got := read(t, filepath.Join(dir, machineapi.EndpointOfferFile)); got != `{"until":3600000000000}` {
		t.Errorf("the offer is %q", got)
	}
}

// After a reboot of the host, the clock is behind the term of the last holder. Another host may hold the Lease. The folder is on the disk if
// an earlier version made it, and still mounted if only the record of the boot was lost.
func TestTermOfAnotherBoot(t *testing.T) {
	for name, create := range map[string]func(s store) error{
		"in memory":   func(s store) error { return s.makeRunDir("m-1", metadata(goodSpec(), 0), nil, nil) },
		"on the disk": func(s store) error { return os.Mkdir(s.path(runDir, "m-1"), 0o700) },
	} {
		h := recorded(t)
		h.runc.Root = h.store.path("runc")
		dir := h.machines.byID["m-1"].runDir()
		data, err := json.Marshal(machineapi.EndpointTerm{Until: 240 * time.Hour})
		if err = errors.Join(err, h.forgetOtherBoot(), create(h.store)); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, machineapi.EndpointLeaseFile), string(data))
		now := 20 * time.Second
		if err := h.forgetOtherBoot(); err != nil || termOf([]string{dir}, now) == 0 {
			t.Errorf("%s: a restart of capstand removes the term: %v", name, err)
		}
		write(t, h.store.path("boot-id"), "another boot")
		if err := h.forgetOtherBoot(); err != nil || termOf([]string{dir}, now) != 0 {
			t.Errorf("%s: the term of another boot counts until %s: %v", name, termOf([]string{dir}, now), err)
		}
	}
}

// While a change of the host waits for a disk, the host keeps the virtual addresses of load balancers that are not deleted.
func TestCandidatesWhileTheDiskHangs(t *testing.T) {
	h := recorded(t)
	lb := h.balancers.byID["n-1"]
	lb.spec.VirtualAddress = &hostpb.VirtualAddress{Address: "192.0.2.1"}
	h.machines.byID["m-1"].spec.ControlPlane = true
	seen := h.candidates(nil)
	if c := seen["n-1"]; len(seen) != 1 || c.lb != lb || len(c.electors) != 1 {
		t.Fatalf("candidates: %v", seen)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if again := h.candidates(seen); again["n-1"].lb != lb {
		t.Errorf("candidates while the lock is held: %v", again)
	}
	lb.delete()
	if again := h.candidates(seen); len(again) != 0 {
		t.Errorf("candidates after the deletion: %v", again)
	}
}

// The deletion is the last event of an object. The host gives up the virtual address of a load balancer after it has removed the load
// balancer, and calls that delete a machine report its phase.
func TestDeletionIsTheLastEvent(t *testing.T) {
	h := recorded(t)
	lb, m := h.balancers.byID["n-1"], h.machines.byID["m-1"]
	lb.spec.VirtualAddress, lb.holds = &hostpb.VirtualAddress{Address: "192.0.2.1"}, true
	watcher, end := h.broadcaster.Subscribe()
	defer end()
	h.balancers.forget(lb)
	(&virtualAddress{lb: lb}).end(nil)
	if err := h.machines.forget(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	m.setStatus(func(s *hostpb.MachineStatus) { s.Phase = hostpb.MachineStatus_DELETING })
	all, err := watcher.Take(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	last := map[string]hostpb.Event_Type{}
	for _, event := range all {
		last[event.GetLoadBalancer().GetId()+event.GetMachine().GetSpec().GetId()] = event.Type
	}
	if last["n-1"] != hostpb.Event_DELETED || last["m-1"] != hostpb.Event_DELETED {
		t.Errorf("last events: %v", last)
	}
}

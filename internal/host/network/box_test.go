package network

import (
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/atomicfile"
)

func box(t *testing.T, dir, id string) Box {
	t.Helper()
	root := filepath.Join(t.TempDir(), id)
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	return Box{Dir: dir, HostID: id, HostRoot: root}
}

// All capstands of a box share the leases. Two capstands never lease the same address. A capstand that was removed
// from the disk has no leases.
func TestLeases(t *testing.T) {
	dir := t.TempDir()
	a, b := box(t, dir, "a"), box(t, dir, "b")
	if err := os.MkdirAll(filepath.Join(a.dir("n"), "leases"), 0o755); err != nil {
		t.Fatal(err)
	}
	lease := func(from Box, machine string, addresses ...string) error {
		return from.Lease("n", machine, "default/"+machine, addresses)
	}
	var inUse InUseError
	if err := lease(a, "one", "10.0.0.2", "10.0.0.3"); err != nil {
		t.Fatal(err)
	}
	if err := lease(a, "one", "10.0.0.2", "10.0.0.3"); err != nil {
		t.Errorf("the same lease again: %v", err)
	}
	if err := lease(b, "two", "10.0.0.4", "10.0.0.3"); !errors.As(err, &inUse) {
		t.Errorf("another machine's address: %v", err)
	}
	if err := lease(b, "three", "10.0.0.4"); err != nil {
		t.Errorf("a refused request took an address: %v", err)
	}
	if err := b.KeepLeases("n", nil); err != nil { // b has no record of machine three. It must keep the leases of a.
		t.Fatal(err)
	}
	if err := lease(a, "four", "10.0.0.4"); err != nil {
		t.Errorf("the lease of a machine without a record: %v", err)
	}
	if err := lease(b, "two", "10.0.0.2"); !errors.As(err, &inUse) {
		t.Errorf("b dropped the lease of another capstand: %v", err)
	}
	if err := a.Unlease("n", "one"); err != nil {
		t.Fatal(err)
	}
	if err := lease(b, "two", "10.0.0.2"); err != nil {
		t.Errorf("a released lease: %v", err)
	}
	if err := os.RemoveAll(a.HostRoot); err != nil {
		t.Fatal(err)
	}
	if err := lease(b, "five", "10.0.0.4"); err != nil {
		t.Errorf("a lease of a removed capstand: %v", err)
	}
}

// A network's id belongs to one cluster of the box, for all capstands.
func TestNetworkOfAnotherCluster_ALL18(t *testing.T) {
	dir := t.TempDir()
	a, b := box(t, dir, "a"), box(t, dir, "b")
	own := Network{ID: "n", CIDR: "10.231.7.0/24", Cluster: "default/demo"}
	if err := os.MkdirAll(a.dir("n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := atomicfile.WriteJSON(filepath.Join(a.dir("n"), "network.json"), own, 0o644); err != nil {
		t.Fatal(err)
	}
	copied := own
	copied.Cluster = "thief/demo"
	var inUse InUseError
	if err := b.Ensure(t.Context(), copied); !errors.As(err, &inUse) || !strings.Contains(err.Error(), own.Cluster) {
		t.Errorf("another cluster's network: %v", err)
	}
}

// A machine's id belongs to one machine of the box, in all networks, because the box names its link and network namespace by it.
func TestMachineOfAnotherHost_ALL18(t *testing.T) {
	dir := t.TempDir()
	a, b := box(t, dir, "a"), box(t, dir, "b")
	for _, network := range []string{"n", "other"} {
		if err := os.MkdirAll(filepath.Join(a.dir(network), "leases"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Lease("n", "one", "default/one", []string{"10.0.0.2"}); err != nil {
		t.Fatal(err)
	}
	var inUse InUseError
	for _, network := range []string{"n", "other"} {
		if err := b.Lease(network, "one", "thief/one", []string{"10.0.0.3"}); !errors.As(err, &inUse) || !strings.Contains(err.Error(), "default/one") {
			t.Errorf("the id of a machine of another host, network %s: %v", network, err)
		}
	}
	if err := os.RemoveAll(a.HostRoot); err != nil {
		t.Fatal(err)
	}
	if err := b.Lease("other", "one", "default/one", []string{"10.0.0.3"}); err != nil {
		t.Errorf("a machine of a removed capstand: %v", err)
	}
}

// Two ids whose short hashes are equal would share a bridge, or a network namespace.
func TestIDsWithTheSameHash(t *testing.T) {
	const victim, found = "id-00103777", "id-00797616"
	if !sameNames(victim, found) || sameNames(victim, "id-00000000") {
		t.Fatal("the ids of this test have other hashes")
	}
	b := box(t, t.TempDir(), "a")
	if err := os.MkdirAll(filepath.Join(b.dir(victim), "leases"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := atomicfile.WriteJSON(filepath.Join(b.dir(victim), "network.json"), Network{ID: victim, CIDR: "10.231.7.0/24", Cluster: "default/demo"}, 0o644); err != nil {
		t.Fatal(err)
	}
	var inUse InUseError
	if err := b.Ensure(t.Context(), Network{ID: found, CIDR: "10.231.8.0/24", Cluster: "thief/demo"}); !errors.As(err, &inUse) || strings.Contains(err.Error(), "default/demo") {
		t.Errorf("a network: %v", err)
	}
	if err := b.Lease(victim, victim, "default/one", []string{"10.231.7.2"}); err != nil {
		t.Fatal(err)
	}
	if err := b.Lease(victim, found, "thief/one", []string{"10.231.7.3"}); !errors.As(err, &inUse) || strings.Contains(err.Error(), "default/one") {
		t.Errorf("a machine: %v", err)
	}
	if err := b.Lease(victim, victim, "default/one", []string{"10.231.7.2"}); err != nil {
		t.Errorf("the same machine again: %v", err)
	}
}

// A crash during the write of a lease leaves a file that does not count as a lease.
func TestHalfWrittenLease(t *testing.T) {
	a := box(t, t.TempDir(), "a")
	half := a.lease("n", ".new-1")
	if err := os.MkdirAll(filepath.Dir(half), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := atomicfile.WriteJSON(half, Lease{Machine: "one", Bridge: true}, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := a.Unlease("n", "one"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(half); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the half-written lease still exists: %v", err)
	}
}

func TestUsers(t *testing.T) {
	dir := t.TempDir()
	a, b := box(t, dir, "a"), box(t, dir, "b")
	hosts := filepath.Join(a.dir("n"), "hosts")
	if err := os.MkdirAll(hosts, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"a": `{"host":"a","root":"` + a.HostRoot + `"}`, "b": `{"host":"b","root":"/nowhere"}`, ".new-1": "", ".new-2": `{"host":"a","root":"` + a.HostRoot + `"}`} {
		if err := os.WriteFile(filepath.Join(hosts, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	users, err := b.users("n")
	if err != nil || len(users) != 1 || users[0].Host != "a" {
		t.Errorf("users %v, %v", users, err)
	}
}

// A damaged lease belongs to an unknown holder, and no new machine gets its address. The machine that has the address in its
// capstand's record writes the lease again.
func TestDamagedLease(t *testing.T) {
	for name, content := range map[string]string{"empty": "", "cut off": `{"machine":"on`, "garbage": "\x00\x00\x00\x00", "another type": `["one"]`} {
		t.Run(name, func(t *testing.T) {
			a := box(t, t.TempDir(), "a")
			addresses := []string{"10.0.0.2"}
			for _, dir := range []string{"hosts", "leases"} {
				if err := os.MkdirAll(filepath.Join(a.dir("n"), dir), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if err := a.Lease("n", "one", "default/one", addresses); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(a.lease("n", addresses[0]), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			var inUse InUseError
			if err := a.Lease("n", "two", "default/two", addresses); !errors.As(err, &inUse) || !strings.Contains(err.Error(), "cannot be read") {
				t.Errorf("another machine takes the address: %v", err)
			}
			if err := a.Renew("n", "one", "default/one", addresses); err != nil {
				t.Errorf("the machine that has the address: %v", err)
			}
			if err := a.Lease("n", "two", "default/two", addresses); !errors.As(err, &inUse) || !strings.Contains(err.Error(), "default/one") {
				t.Errorf("another machine, after the repair: %v", err)
			}
		})
	}
}

// A network with a damaged file keeps its leases as long as a capstand uses it.
func TestDamagedNetwork(t *testing.T) {
	for name, content := range map[string]string{"empty": "", "cut off": `{"id":`, "garbage": "\x00\x00"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			a, b := box(t, dir, "a"), box(t, dir, "b")
			for _, sub := range []string{"hosts", "leases"} {
				if err := os.MkdirAll(filepath.Join(a.dir("n"), sub), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if err := atomicfile.WriteJSON(filepath.Join(a.dir("n"), "hosts", "a"), a.me(), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := a.Lease("n", "one", "default/one", []string{"10.0.0.2"}); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(a.dir("n"), "network.json"), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := b.list(); err != nil {
				t.Fatal(err)
			}
			var inUse InUseError
			if err := b.Lease("n", "two", "default/two", []string{"10.0.0.2"}); !errors.As(err, &inUse) {
				t.Errorf("the address of a running machine is given to another: %v", err)
			}
			if err := os.RemoveAll(a.HostRoot); err != nil { // The network has no user any more.
				t.Fatal(err)
			}
			if _, err := b.list(); err != nil {
				t.Fatal(err)
			}
			if atomicfile.Exists(a.dir("n")) {
				t.Error("a damaged network without a user still exists")
			}
		})
	}
}

// A damaged folder does not keep a capstand from its other networks. The guards report it.
func TestDamagedFolder(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"a file instead of the users": func(dir string) error { return os.WriteFile(filepath.Join(dir, "hosts"), nil, 0o600) },
		"a folder as user":            func(dir string) error { return os.MkdirAll(filepath.Join(dir, "hosts", "a", "b"), 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			a := box(t, t.TempDir(), "a")
			damaged := filepath.Join(a.Dir, "networks", "0")
			err := errors.Join(os.MkdirAll(damaged, 0o700), damage(damaged), os.MkdirAll(filepath.Join(a.dir("n"), "leases"), 0o700),
				atomicfile.WriteJSON(filepath.Join(a.dir("n"), "network.json"), Network{ID: "n"}, 0o600))
			if err = errors.Join(err, a.Lease("n", "one", "default/one", []string{"10.0.0.2"})); err != nil {
				t.Fatal(err)
			}
			if err := a.UnleaseAll("one"); err != nil || atomicfile.Exists(a.lease("n", "10.0.0.2")) {
				t.Errorf("the lease of a machine in another network: %v", err)
			}
			if networks, err := a.list(); err != nil || len(networks) != 1 {
				t.Errorf("got %v, %v", networks, err)
			}
			if _, err := a.mendFirewalls(t.Context()); err != nil {
				t.Errorf("the guard of the rules stops: %v", err)
			}
			if reported := a.reportDamage(slog.New(slog.DiscardHandler), ""); !strings.Contains(reported, damaged) {
				t.Errorf("the guard does not report %s: %q", damaged, reported)
			}
			known := func(string) bool { return true }
			if err := a.Sweep(t.Context(), known); err == nil || !strings.Contains(err.Error(), damaged) {
				t.Errorf("the start does not report %s: %v", damaged, err)
			}
		})
	}
}

// A damaged folder can have leases and Services that are unknown: addresses and ports that it may have are refused, and those that were
// given before stay.
func TestDamagedFolderRefuses(t *testing.T) {
	for name, damage := range map[string]func(a Box, dir string) error{
		"unreadable users": func(_ Box, dir string) error { return os.WriteFile(filepath.Join(dir, "hosts"), nil, 0o600) },
		"an unreadable network": func(a Box, dir string) error {
			return errors.Join(os.Mkdir(filepath.Join(dir, "hosts"), 0o700), atomicfile.WriteJSON(filepath.Join(dir, "hosts", a.HostID), a.me(), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := box(t, t.TempDir(), "a")
			damaged := filepath.Join(a.Dir, "networks", "0")
			if err := errors.Join(os.MkdirAll(damaged, 0o700), damage(a, damaged)); err != nil {
				t.Fatal(err)
			}
			refusesBeside(t, a, damaged)
		})
	}
}

func refusesBeside(t *testing.T, a Box, damaged string) {
	address := netip.MustParseAddr("127.0.0.1")
	ports := Service{Name: "ns/s", HostPorts: true, Address: address, Ports: []ServicePort{{"tcp", 4443, 30443}}}
	pool := Service{Address: netip.MustParseAddr("203.0.113.7"), Ports: ports.Ports}
	err := errors.Join(os.MkdirAll(filepath.Join(a.dir("n"), "hosts"), 0o700), os.Mkdir(filepath.Join(a.dir("n"), "leases"), 0o700),
		atomicfile.WriteJSON(filepath.Join(a.dir("n"), "network.json"), Network{ID: "n", LAN: &LAN{Bridge: "br"}}, 0o600),
		atomicfile.WriteJSON(filepath.Join(a.dir("n"), "hosts", a.HostID), a.me(), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	lent := func() error { return a.lentElsewhere("n", []string{"10.0.0.2"}) }
	_, errBalancer := a.PortPublished(netip.AddrPortFrom(address, 4443))
	_, errPool := a.published("n").publisher(pool.Address)
	for name, err := range map[string]error{
		"an address of a LAN": lent(), "a port of a Service": a.published("n").portsFlaw(ports), "a port of a load balancer": errBalancer, "an address of a Service": errPool,
	} {
		if err == nil || !strings.Contains(err.Error(), damaged) {
			t.Errorf("%s: %v, want the damage of %s", name, err, damaged)
		}
	}
	if err := errors.Join(a.take("n", Lease{Machine: "m", owner: a.me()}, []string{"10.0.0.2"}, false), a.recordServices("n", []Service{ports, pool})); err != nil {
		t.Fatal(err)
	}
	held, err := a.published("n").publisher(pool.Address)
	if err = errors.Join(err, lent(), a.published("n").portsFlaw(ports)); err != nil || !held {
		t.Errorf("the network had the addresses and the port before: %v", err)
	}
}

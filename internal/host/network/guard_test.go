package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

func nft(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "nft", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("nft %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// The guard restores the rules of networks after a reload of the host's firewall. They isolate clusters and route machines
// to the outside, and publish Services. It does not restore rules of other programs and of removed networks.
func TestGuardFirewalls(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	a := box(t, t.TempDir(), "a")
	n := Network{ID: "n", CIDR: "10.231.7.0/24", IPv6CIDR: "fd00:7::/64", Cluster: "default/demo"}
	if err := a.Ensure(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("ip", "addr", "add", ipv4.box+"/32", "dev", "lo").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if refused, err := a.SetServices(t.Context(), n.ID, []Service{hostPorts(ipv4.box, nil)}); err != nil || len(refused) > 0 {
		t.Fatal(refused, err)
	}
	damaged := filepath.Join(a.Dir, "networks", "0") // It is logged once, and the guard still follows the events.
	if err := errors.Join(os.Mkdir(damaged, 0o700), os.WriteFile(filepath.Join(damaged, "hosts"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	whole := nft(t, "list", "ruleset")
	if mended, err := a.mendFirewalls(t.Context()); err != nil || len(mended) > 0 {
		t.Errorf("no rule was missing: mended %v, %v", mended, err)
	}
	unrepairable(t, a, Network{ID: "bad", CIDR: "damaged"}) // It is logged once as well, and does not delay the others.

	ctx, cancel := context.WithCancel(t.Context())
	var others bytes.Buffer
	mended, ended := make(chan struct{}, 100), make(chan struct{})
	go func() {
		defer close(ended)
		a.GuardFirewalls(ctx, slog.New(warningHandler{slog.NewTextHandler(&others, nil), mended}))
	}()
	for _, harm := range [][]string{
		{"flush", "ruleset"},
		{"flush", "table", "inet", TableName(n.ID)},
		{"flush", "chain", "inet", TableName(n.ID), "postrouting"},
	} {
		nft(t, harm...)
		select {
		case <-mended:
		case <-time.After(2 * time.Minute):
			t.Fatalf("the guard did not repair the rules after %v", harm)
		}
		if got := nft(t, "list", "ruleset"); got != whole {
			t.Errorf("after %v: %s, want %s", harm, got, whole)
		}
	}
	cancel()
	<-ended
	if log := others.String(); strings.Count(log, "level=ERROR") != 2 || !strings.Contains(log, damaged) || !strings.Contains(log, "network bad") {
		t.Errorf("expected one error about %s and one about the network bad, found %q", damaged, log)
	}
	if err := os.RemoveAll(a.dir("bad")); err != nil {
		t.Fatal(err)
	}

	if err := a.Release(t.Context(), n.ID); err != nil {
		t.Fatal(err)
	}
	if mended, err := a.mendFirewalls(t.Context()); err != nil || len(mended) > 0 || strings.Contains(nft(t, "list", "ruleset"), TableName(n.ID)) {
		t.Errorf("a removed network: mended %v, %v", mended, err)
	}
}

// The bridge of a network on one box gets its state and its addresses back, also those of load balancers.
func TestGuardBridges(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	a := box(t, t.TempDir(), "a")
	n := Network{ID: "n", CIDR: "10.231.7.0/24", IPv6CIDR: "fd00:7::/64", Cluster: "default/demo"}
	if err := errors.Join(a.Ensure(t.Context(), n), a.Serve(n.ID, "balancer", "default/demo", []string{"10.231.7.9"})); err != nil {
		t.Fatal(err)
	}
	bridge := BridgeName(n.ID)
	for name, harm := range map[string][]string{
		"down":                  {"link", "set", bridge, "down"},
		"gateway":               {"addr", "del", "10.231.7.1/24", "dev", bridge},
		"IPv6 gateway":          {"addr", "del", "fd00:7::1/64", "dev", bridge},
		"load balancer address": {"addr", "del", "10.231.7.9/32", "dev", bridge},
		"bridge":                {"link", "del", bridge},
	} {
		guarded(t, a, name, func() error { return ip(harm...) })
		subnets, err := Subnets(n.CIDR, n.IPv6CIDR)
		if err != nil {
			t.Fatal(err)
		}
		if whole, err := a.hasBridge(n, subnets); err != nil || !whole {
			t.Errorf("%s: the bridge is not whole: %v", name, err)
		}
	}
	if mended, err := a.mendAll(a.mendNetwork); err != nil || len(mended) > 0 {
		t.Errorf("nothing was missing: mended %v, %v", mended, err)
	}
}

// A bridge of each family that lost its addresses, also the one for connections to machines across hosts, is whole after one repair.
func TestMendBridges(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	if err := ip("addr", "add", "192.0.2.1/32", "dev", "lo"); err != nil {
		t.Fatal(err)
	}
	for name, n := range map[string]Network{"IPv4": {CIDR: "10.231.7.0/24"}, "IPv6": {CIDR: "fd00:7::/64"}, "both": {CIDR: "10.231.7.0/24", IPv6CIDR: "fd00:7::/64"}} {
		a := box(t, t.TempDir(), "a")
		n.ID, n.Cluster, n.Overlay = "n", "default/demo", &Overlay{VNI: 5000, Address: netip.MustParseAddr("192.0.2.1"), MTU: 1400}
		if err := a.Ensure(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		for _, harm := range [][]string{nil, {"addr", "flush", "dev", BridgeName("n")}, nil, {"link", "set", BridgeName("n"), "down"}, nil} {
			if harm != nil {
				if err := ip(harm...); err != nil {
					t.Fatal(err)
				}
			}
			if mended, err := a.mendAll(a.mendNetwork); err != nil || len(mended) > 0 != (harm != nil) {
				t.Errorf("%s: after %v: mended %v, %v", name, harm, mended, err)
			}
		}
		if err := a.Release(t.Context(), "n"); err != nil {
			t.Fatal(err)
		}
	}
}

// guarded does harm, and waits until the guard of the links reports a repair and has ended.
func guarded(t *testing.T, b Box, name string, harm func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	mended, ended := make(chan struct{}, 100), make(chan struct{})
	go func() {
		defer close(ended)
		b.GuardLinks(ctx, slog.New(warningHandler{slog.DiscardHandler, mended}))
	}()
	if err := harm(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-mended:
	case <-time.After(time.Minute):
		t.Errorf("%s: the guard repaired nothing", name)
	}
	cancel()
	<-ended
}

// ip runs the command ip.
func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// A network that cannot be repaired does not keep the others from their repair, and a tunnel does not keep the VLANs from theirs.
func TestBrokenNetworksAreIndependent(t *testing.T) {
	a := box(t, filepath.Join(t.TempDir(), "["), "a") // No pattern of package filepath: the leases cannot be listed.
	for _, n := range []Network{
		{ID: "tunnel-1", CIDR: "damaged", Overlay: &Overlay{}}, {ID: "tunnel-2", CIDR: "damaged", Overlay: &Overlay{}},
		{ID: "vlan-1", CIDR: "damaged", LAN: &LAN{Bridge: "lo", VLAN: 100}}, {ID: "vlan-2", CIDR: "damaged", LAN: &LAN{Bridge: "lo", VLAN: 100}},
	} {
		unrepairable(t, a, n)
	}
	_, firewalls := a.mendFirewalls(t.Context())
	for what, err := range map[string]error{"links": a.mendLinks(slog.New(slog.DiscardHandler)), "firewalls": firewalls} {
		for _, id := range []string{"tunnel-1", "tunnel-2", "vlan-1", "vlan-2"} {
			if err == nil || !strings.Contains(err.Error(), id) {
				t.Errorf("%s: network %s was not looked at: %v", what, id, err)
			}
		}
	}
}

// unrepairable records a network of a box, whose properties are invalid.
func unrepairable(t *testing.T, b Box, n Network) {
	t.Helper()
	err := os.MkdirAll(filepath.Join(b.dir(n.ID), "hosts"), 0o700)
	err = errors.Join(err, atomicfile.WriteJSON(filepath.Join(b.dir(n.ID), "network.json"), n, 0o600))
	if err = errors.Join(err, atomicfile.WriteJSON(filepath.Join(b.dir(n.ID), "hosts", b.HostID), b.me(), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// TestFolderAmongUsers: a folder beside the records of the capstands that use a network makes the Services of this network unknown, and hides
// no others.
func TestFolderAmongUsers(t *testing.T) {
	a := box(t, t.TempDir(), "a")
	want := Service{Address: netip.MustParseAddr("203.0.113.7")}
	folder := filepath.Join(a.dir("bad"), "hosts", "folder")
	for _, id := range []string{"bad", "good"} {
		unrepairable(t, a, Network{ID: id})
		if err := os.MkdirAll(a.servicesDir(id), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := atomicfile.WriteJSON(filepath.Join(a.servicesDir(id), a.HostID), []Service{want}, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(folder, "content"), 0o700); err != nil {
		t.Fatal(err)
	}
	var seen []string
	damage, err := a.eachService(func(network, host string, s Service) { seen = append(seen, network+" "+host+" "+s.Address.String()) })
	if err != nil || damage == nil || !strings.Contains(damage.Error(), folder) {
		t.Errorf("damage %v, %v, want that of %s", damage, err, folder)
	}
	if !slices.Equal(seen, []string{"good a 203.0.113.7"}) {
		t.Errorf("Services %v, want that of the other network", seen)
	}
}

// warningHandler sends a signal for each warning, and passes on all other records.
type warningHandler struct {
	slog.Handler
	logged chan struct{}
}

func (h warningHandler) Enabled(context.Context, slog.Level) bool { return true }
func (h warningHandler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level != slog.LevelWarn {
		return h.Handler.Handle(ctx, r)
	}
	h.logged <- struct{}{}
	return nil
}

// TestRepairs: a failure sets the time of the next attempt, and is logged again only after a success or as another one.
func TestRepairs(t *testing.T) {
	var log bytes.Buffer
	r := repairs{log: slog.New(slog.NewTextHandler(&log, nil))}
	busy, full := errors.New("busy"), errors.New("full")
	for n, c := range []struct {
		failure error
		logged  int
	}{{busy, 1}, {busy, 1}, {full, 2}, {nil, 2}, {full, 3}} {
		before := time.Now()
		next := r.next(c.failure)
		if c.failure == nil && !next.IsZero() || c.failure != nil && next.Before(before.Add(guardPause)) {
			t.Errorf("%d: the next attempt is at %s", n, next)
		}
		if logged := strings.Count(log.String(), "Cannot repair"); logged != c.logged {
			t.Errorf("%d: logged %d times, want %d", n, logged, c.logged)
		}
	}
}

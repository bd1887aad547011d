package network

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// TestRedirectAfterError: a redirection whose rules were not written is no record, so the next attempt writes them. The same is true for the
// peers of an overlay.
func TestRedirectAfterError(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	b := box(t, t.TempDir(), "a")
	run(t, "ip link set lo up; ip addr add 192.0.2.1/24 dev lo")
	overlay := &Overlay{VNI: 7, Address: netip.MustParseAddr("192.0.2.1"), MTU: 1400}
	if err := b.Ensure(t.Context(), Network{ID: "n", CIDR: "10.231.7.0/24", Cluster: "default/n", Overlay: overlay}); err != nil {
		t.Fatal(err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel() // nft does not run
	for name, test := range map[string]struct {
		change func(context.Context) error
		rule   string
	}{
		"redirection": {func(ctx context.Context) error {
			return b.Redirect(ctx, "n", Redirect{Balancer: "n", Endpoint: netip.MustParseAddrPort("203.0.113.100:6443"), To: netip.MustParseAddrPort("10.231.7.1:7443")})
		}, "10.231.7.1:7443"},
		"peers": {func(ctx context.Context) error {
			return b.SetPeers(ctx, "n", Peers{Machines: []Peer{{Addresses: []netip.Addr{netip.MustParseAddr("10.231.7.9")}, Host: netip.MustParseAddr("192.0.2.9")}}})
		}, "192.0.2.9"},
	} {
		if err := test.change(cancelled); err == nil {
			t.Errorf("%s: no error without nft", name)
		}
		if err := test.change(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if rules, err := exec.Command("nft", "list", "ruleset").Output(); err != nil || !strings.Contains(string(rules), test.rule) {
			t.Errorf("%s: the rules do not contain %s: %v\n%s", name, test.rule, err, rules)
		}
	}
}

// A load balancer moves to another capstand of the box while its former one does not run. The former one returns with its record and then
// removes its load balancer: the addresses and the redirection of the new one stay.
func TestMovedBalancer(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	dir := t.TempDir()
	former, next := box(t, dir, "a"), box(t, dir, "b")
	run(t, "ip link set lo up; ip addr add 192.0.2.1/24 dev lo")
	n := Network{ID: "n", CIDR: "10.231.7.0/24", Cluster: "default/n", Overlay: &Overlay{VNI: 7, Address: netip.MustParseAddr("192.0.2.1"), MTU: 1400}}
	redirect := Redirect{Balancer: "n", Endpoint: netip.MustParseAddrPort("203.0.113.100:6443"), To: netip.MustParseAddrPort("10.231.7.9:6443")}
	addresses := []string{"10.231.7.9"}
	for _, b := range []Box{former, next} {
		if err := errors.Join(b.Ensure(t.Context(), n), b.Serve("n", "n", "default/n", addresses), b.Redirect(t.Context(), "n", redirect)); err != nil {
			t.Fatal(err)
		}
	}
	intact := func(when string) {
		t.Helper()
		var l Lease
		if err := atomicfile.ReadJSON(next.lease("n", "10.231.7.9"), &l); err != nil || l.Host != "b" {
			t.Errorf("%s: the lease of the address: %+v, %v", when, l, err)
		}
		if up, err := isUp(BridgeName("n"), addresses); err != nil || !up {
			t.Errorf("%s: the bridge has the address: %v, %v", when, up, err)
		}
		if have, err := next.redirect("n"); err != nil || have.Host != "b" {
			t.Errorf("%s: the redirection: %+v, %v", when, have, err)
		}
	}
	intact("moved")
	var inUse InUseError
	if err := former.ServeAgain("n", "n", "default/n", addresses); !errors.As(err, &inUse) {
		t.Errorf("the former capstand returns: %v", err)
	}
	if err := former.RedirectAgain(t.Context(), "n", redirect); err != nil {
		t.Error(err)
	}
	intact("the former capstand returned")
	remove := func(b Box) error {
		return errors.Join(b.Serve("n", "n", "", nil), b.Redirect(t.Context(), "n", Redirect{Balancer: "n"}))
	}
	if err := remove(former); err != nil {
		t.Fatal(err)
	}
	intact("the former capstand removed its load balancer")

	// It moves again and gets another address: the former one is free.
	if err := errors.Join(former.Serve("n", "n", "default/n", addresses), next.Serve("n", "n", "default/n", []string{"10.231.7.10"})); err != nil {
		t.Fatal(err)
	}
	if err := former.ServeAgain("n", "n", "default/n", addresses); !errors.As(err, &inUse) {
		t.Errorf("the former capstand returns with the former address: %v", err)
	}
	if served, err := next.served("n"); err != nil || !slices.Equal(served, []string{"10.231.7.10"}) {
		t.Errorf("addresses after the move: %v, %v", served, err)
	}

	if err := os.RemoveAll(next.HostRoot); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(former.ServeAgain("n", "n", "default/n", addresses), former.RedirectAgain(t.Context(), "n", redirect), remove(former)); err != nil {
		t.Errorf("the other capstand was removed from the disk: %v", err)
	}
	if served, err := former.served("n"); err != nil || len(served) > 0 {
		t.Errorf("addresses after the removal: %v, %v", served, err)
	}
	if have, err := former.redirect("n"); err != nil || have != (Redirect{}) {
		t.Errorf("the redirection after the removal: %+v, %v", have, err)
	}
}

package network

import (
	"context"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

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

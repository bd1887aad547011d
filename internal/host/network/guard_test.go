package network

import (
	"context"
	"log/slog"
	"os/exec"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/network/ownnet"
)

func nft(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "nft", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("nft %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// The rules of networks, which keep clusters apart and give machines their way out, come back after a reload of the host's
// firewall; what belongs to others, and to nobody any more, does not.
func TestGuardFirewalls(t *testing.T) {
	if !ownnet.Run(t) {
		return
	}
	a := box(t, t.TempDir(), "a")
	n := Network{ID: "n", CIDR: "10.231.7.0/24", IPv6CIDR: "fd00:7::/64", Cluster: "default/demo"}
	if err := a.Ensure(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	whole := nft(t, "list", "ruleset")
	if mended, err := a.mendFirewalls(t.Context()); err != nil || len(mended) > 0 {
		t.Errorf("nothing was missing: mended %v, %v", mended, err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	mended, ended := make(chan struct{}, 100), make(chan struct{})
	go func() {
		defer close(ended)
		a.GuardFirewalls(ctx, slog.New(warned{slog.DiscardHandler, mended}))
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
			t.Fatalf("nothing was done about %v", harm)
		}
		if got := nft(t, "list", "ruleset"); got != whole {
			t.Errorf("after %v: %s, want %s", harm, got, whole)
		}
	}
	cancel()
	<-ended

	if err := a.Release(t.Context(), n.ID); err != nil {
		t.Fatal(err)
	}
	if mended, err := a.mendFirewalls(t.Context()); err != nil || len(mended) > 0 || strings.Contains(nft(t, "list", "ruleset"), TableName(n.ID)) {
		t.Errorf("a network that is gone: mended %v, %v", mended, err)
	}
}

// warned tells of warnings.
type warned struct {
	slog.Handler
	told chan struct{}
}

func (h warned) Enabled(context.Context, slog.Level) bool { return true }
func (h warned) Handle(_ context.Context, r slog.Record) error {
	if r.Level == slog.LevelWarn {
		h.told <- struct{}{}
	}
	return nil
}

package host

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// capstand makes a version usable again that an interrupted `capstan host versions remove` hid.
func TestHiddenVersion(t *testing.T) {
	h := onBox(t)
	version := goodSpec().KubernetesVersion
	dir := filepath.Join(h.config.Assets, "kubernetes")
	if err := os.Rename(filepath.Join(dir, version), filepath.Join(dir, ".hidden-"+version)); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop() // One look.
	h.machines.keepVersions(ctx)
	if got := h.machines.info().KubernetesVersions; !slices.Contains(got, version) {
		t.Errorf("the host has %v", got)
	}
}

// A machine whose version was removed between its admission and its record is refused, and nothing of it stays.
func TestVersionRemovedDuringRecord(t *testing.T) {
	h := onBox(t)
	err := recordOnly(t, h, func() {
		expect.NoError(t, os.RemoveAll(filepath.Join(h.config.Assets, "kubernetes", goodSpec().KubernetesVersion)))
	})
	wantRefusal(t, err, hostpb.Refusal_NOT_PROVIDED)
	if left := folders(h.store.path(machinesDir)); len(left) > 0 {
		t.Errorf("recorded machines: %v", left)
	}
}

package host

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
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

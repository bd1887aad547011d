package embedded

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// TestPurgeAssets: the build that created the machines removes them. If that build is missing, another one does.
func TestPurgeAssets(t *testing.T) {
	there, gone := t.TempDir(), filepath.Join(t.TempDir(), "gone")
	if err := os.WriteFile(Assets{there}.Capstand(), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	other := t.TempDir()
	if err := os.WriteFile(Assets{other}.Capstand(), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct{ recorded, own, want string }{
		"both exist":                    {there, other, there},
		"the recorded build is missing": {gone, other, other},
	} {
		if got, err := purgeAssets(test.recorded, test.own); got != test.want || err != nil {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
	if _, err := purgeAssets(gone, gone+"-too"); err == nil || !strings.Contains(err.Error(), gone+"-too") || !strings.Contains(err.Error(), "--assets") {
		t.Errorf("both builds are missing: %v", err)
	}
}

// TestDownGivesUp: `capstan down` reports each failed start of capstand and ends after some attempts.
func TestDownGivesUp(t *testing.T) {
	var steps atomic.Int32
	log := filepath.Join(t.TempDir(), "log")
	c := component{name: capstand, path: filepath.Join(t.TempDir(), "capstand"), asRoot: true, ready: alwaysReady}
	err := withCapstand(context.Background(), c, log, newSpawner(), func(string) { steps.Add(1) }, func(context.Context) error {
		t.Error("`capstan down` succeeded without a capstand")
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "cannot start "+c.path) || !strings.Contains(err.Error(), log) || !strings.Contains(err.Error(), "repeat `capstan down`") {
		t.Errorf("the error is %v", err)
	}
	if got := steps.Load(); got != purgeStarts {
		t.Errorf("%d starts were reported, want %d", got, purgeStarts)
	}
}

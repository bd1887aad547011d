package pki

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestNoBoundInReleases: only the recipe of test-expiry bounds the lives of certificates; the binaries in bin/ have no bound.
func TestNoBoundInReleases(t *testing.T) {
	if maxLife != "" || MaxLife() != 0 || Life(time.Hour) != time.Hour || CheckEvery(time.Hour) != time.Hour {
		t.Errorf("this build bounds lives by %q", maxLife)
	}
	root := filepath.Join("..", "..")
	recipes, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(recipes), "\ntest-expiry:")
	recipe, _, _ := strings.Cut(rest, "\n\n")
	if !found || !strings.Contains(recipe, "internal/pki.maxLife=") || strings.Count(string(recipes), "maxLife") != 1 {
		t.Error("the recipe of test-expiry must be the only one that sets internal/pki.maxLife")
	}
	flags, err := os.ReadFile(filepath.Join(root, "bin", ".stamp", "linker-flags"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // make release builds the binaries and runs the same check.
		t.Fatal(err)
	}
	if strings.Contains(string(flags), "maxLife") {
		t.Errorf("the programs in bin/ were built with %s", flags)
	}
}

func TestBound(t *testing.T) {
	before := bound
	t.Cleanup(func() { bound = before })
	bound = parseBound("12m")
	for validity, want := range map[time.Duration]time.Duration{time.Minute: time.Minute, time.Hour: 12 * time.Minute} {
		if got := Life(validity); got != want {
			t.Errorf("the lifetime %s became %s, want %s", validity, got, want)
		}
	}
	if got := CheckEvery(time.Hour); got != 30*time.Second {
		t.Errorf("certificates are checked every %s", got)
	}
	now := time.Now()
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	ca, err := NewAuthority("ca", key, now)
	if err != nil {
		t.Fatal(err)
	}
	leaf, _, err := ca.Issue(Leaf{CommonName: "leaf", Usages: Client}, 24*time.Hour, now)
	if err != nil {
		t.Fatal(err)
	}
	if got := leaf.NotAfter.Sub(leaf.NotBefore); got.Round(time.Minute) != 17*time.Minute {
		t.Errorf("the lifetime of a leaf is %s, want the bound and the tolerance before its creation", got)
	}
	if ca.Cert.NotAfter.Sub(now) < AuthorityValidity-time.Minute {
		t.Error("authorities must have no bound, because some are never renewed")
	}
	defer func() {
		if recover() == nil {
			t.Error("an invalid bound was accepted")
		}
	}()
	parseBound("soon")
}

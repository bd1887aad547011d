package embedded

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/pki"
)

// TestExpiring: a certificate that was not renewed in time is reported. A renewed certificate is not.
func TestExpiring(t *testing.T) {
	l, now := Layout{Root: t.TempDir()}, time.Now()
	dir := l.PKI()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	ca, err := ensureAuthority(l, "ca")
	if err != nil {
		t.Fatal(err)
	}
	id := identity{name: "server", cn: "x", usages: pki.Server}
	if err := ca.ensureLeaf(dir, id, user{os.Getuid(), os.Getgid()}, now); err != nil {
		t.Fatal(err)
	}
	for at, want := range map[time.Duration][]string{
		0: nil, leafValidity*2/3 - time.Hour: nil,
		leafValidity*2/3 + 4*renewalInterval: {"server.crt"}, leafValidity + time.Hour: {"server.crt"},
		pki.AuthorityValidity: {"ca.crt", "server.crt"},
	} {
		found, err := expiring(dir, now.Add(at))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, f := range found {
			name, _, _ := strings.Cut(f, " expires on ")
			names = append(names, name)
		}
		if !slices.Equal(names, want) {
			t.Errorf("after %s: %v, want %v", at, found, want)
		}
	}
	later := now.Add(leafValidity)
	if err := ca.ensureLeaf(dir, id, user{os.Getuid(), os.Getgid()}, later); err != nil {
		t.Fatal(err)
	}
	if found, err := expiring(dir, later); err != nil || len(found) > 0 {
		t.Errorf("after the renewal: %v, %v", found, err)
	}
}

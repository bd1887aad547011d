package embedded

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/pki"
)

// TestExpiring: a leaf certificate that was not renewed in time is reported, and an authority, which is not renewed. A renewed certificate
// and copies of an authority are not.
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
	if err := os.Mkdir(filepath.Join(dir, "etcd"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "etcd", "ca.crt"), ca.certPEM, 0o600); err != nil {
		t.Fatal(err)
	}
	for at, want := range map[time.Duration][2]string{
		0: {}, leafValidity*2/3 - time.Hour: {},
		leafValidity*2/3 + 4*renewalInterval: {"server.crt"}, leafValidity + time.Hour: {"server.crt"},
		pki.AuthorityValidity: {"server.crt", "ca.crt"},
	} {
		dueLeaves, dueAuthorities, err := expiring(dir, now.Add(at))
		if err != nil {
			t.Fatal(err)
		}
		for n, found := range [][]string{dueLeaves, dueAuthorities} {
			name, _, _ := strings.Cut(strings.Join(found, ", "), " expires on ")
			if name != want[n] || len(found) > 1 {
				t.Errorf("after %s: %v, want %v", at, found, want[n])
			}
		}
	}
	later := now.Add(leafValidity)
	if err := ca.ensureLeaf(dir, id, user{os.Getuid(), os.Getgid()}, later); err != nil {
		t.Fatal(err)
	}
	if found, _, err := expiring(dir, later); err != nil || len(found) > 0 {
		t.Errorf("after the renewal: %v, %v", found, err)
	}
}

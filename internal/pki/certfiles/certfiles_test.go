package certfiles

import (
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/pki"
)

func writeCA(t *testing.T, dir, name string) {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	keyPEM, err := pki.EncodeKey(key)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := pki.NewAuthority(name, key, time.Now().Add(-7*24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	for file, data := range map[string][]byte{name + ".crt": pki.EncodeCert(ca.Cert), name + ".key": keyPEM} {
		if err := WriteFile(filepath.Join(dir, file), data); err != nil {
			t.Fatal(err)
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// A leaf is created once. It is created again only for a reason, and with the same key.
func TestEnsure(t *testing.T) {
	const day = 24 * time.Hour
	now := time.Now().Add(time.Minute) // The CAs are created during the test.
	base := Leaf{Name: "sub/leaf", CA: "ca", Leaf: pki.Leaf{CommonName: "cn", Organization: []string{"o"}, DNSNames: []string{"a", "b"}, IPs: []net.IP{net.ParseIP("10.0.0.1")}, Usages: pki.Both}}
	tests := map[string]struct {
		change func(t *testing.T, dir string, leaf *Leaf)
		later  time.Duration
		again  bool
	}{
		"nothing":              {func(*testing.T, string, *Leaf) {}, 0, false},
		"other order of names": {func(_ *testing.T, _ string, l *Leaf) { l.DNSNames = []string{"b", "a"} }, 0, false},
		"before two thirds":    {func(*testing.T, string, *Leaf) {}, 19 * day, false},
		"after two thirds":     {func(*testing.T, string, *Leaf) {}, 21 * day, true},
		"not yet valid":        {func(*testing.T, string, *Leaf) {}, -3 * day, true},
		"another address":      {func(_ *testing.T, _ string, l *Leaf) { l.IPs = append(l.IPs, net.ParseIP("10.0.0.2")) }, 0, true},
		"another name":         {func(_ *testing.T, _ string, l *Leaf) { l.DNSNames = []string{"a"} }, 0, true},
		"another user":         {func(_ *testing.T, _ string, l *Leaf) { l.CommonName = "other" }, 0, true},
		"another group":        {func(_ *testing.T, _ string, l *Leaf) { l.Organization = nil }, 0, true},
		"another usage":        {func(_ *testing.T, _ string, l *Leaf) { l.Usages = pki.Client }, 0, true},
		"another CA":           {func(t *testing.T, dir string, _ *Leaf) { writeCA(t, dir, "ca") }, 0, true},
		"damaged certificate": {func(_ *testing.T, dir string, _ *Leaf) {
			_ = os.WriteFile(filepath.Join(dir, "sub/leaf.crt"), []byte("x"), 0o600)
		}, 0, true},
		"missing certificate": {func(_ *testing.T, dir string, _ *Leaf) { _ = os.Remove(filepath.Join(dir, "sub/leaf.crt")) }, 0, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			writeCA(t, dir, "ca")
			leaf := base
			renew, err := leaf.Ensure(dir, 30*day, now)
			if err != nil {
				t.Fatal(err)
			}
			if d := renew.Sub(now); d < 19*day || d > 20*day {
				t.Errorf("to be renewed after %s", d)
			}
			crt, key := filepath.Join(dir, "sub/leaf.crt"), filepath.Join(dir, "sub/leaf.key")
			oldCert, oldKey := read(t, crt), read(t, key)
			tt.change(t, dir, &leaf)
			if _, err := leaf.Ensure(dir, 30*day, now.Add(tt.later)); err != nil {
				t.Fatal(err)
			}
			if again := read(t, crt) != oldCert; again != tt.again {
				t.Errorf("created again: %v", again)
			}
			if read(t, key) != oldKey {
				t.Error("the key changed")
			}
			verify(t, dir, leaf, now.Add(tt.later))
			for path, mode := range map[string]os.FileMode{crt: 0o644, key: 0o600} {
				if info, _ := os.Stat(path); info.Mode().Perm() != mode { // CP-23
					t.Errorf("%s has mode %s", path, info.Mode())
				}
			}
		})
	}
}

func verify(t *testing.T, dir string, leaf Leaf, now time.Time) {
	t.Helper()
	roots, err := cert.NewPool(filepath.Join(dir, leaf.CA+".crt"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := pki.ReadCert(filepath.Join(dir, leaf.Name+".crt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, usage := range leaf.Usages {
		if _, err := c.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage}}); err != nil {
			t.Error(err)
		}
	}
}

// A leaf does not outlive its CA.
func TestEndsWithItsCA(t *testing.T) {
	dir := t.TempDir()
	writeCA(t, dir, "ca")
	leaf := Leaf{Name: "leaf", CA: "ca", Leaf: pki.Leaf{CommonName: "cn", Usages: pki.Client}}
	if _, err := leaf.Ensure(dir, 100*365*24*time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	ca, _ := pki.ReadCert(filepath.Join(dir, "ca.crt"))
	c, _ := pki.ReadCert(filepath.Join(dir, "leaf.crt"))
	if !c.NotAfter.Equal(ca.NotAfter) {
		t.Errorf("leaf until %s, CA until %s", c.NotAfter, ca.NotAfter)
	}
}

func TestMissingCA(t *testing.T) {
	if _, err := (Leaf{Name: "leaf", CA: "ca"}).Ensure(t.TempDir(), time.Hour, time.Now()); err == nil {
		t.Error("a leaf was created without a CA")
	}
}

// TestChain: after a rotation, the leaf file also contains the new authority, signed by the previous one. Clients that
// trust only the previous authority can therefore verify the leaf.
func TestChain(t *testing.T) {
	dir := t.TempDir()
	writeCA(t, dir, "old")
	writeCA(t, dir, "ca")
	authority, err := loadCA(dir, "old")
	if err != nil {
		t.Fatal(err)
	}
	old := authority.Cert
	ca, err := loadCA(dir, "ca")
	if err != nil {
		t.Fatal(err)
	}
	made, err := authority.SignAuthority(ca.Cert)
	if err != nil {
		t.Fatal(err)
	}
	leaf := Leaf{Name: "leaf", CA: "ca", Leaf: pki.Leaf{CommonName: "cn", DNSNames: []string{"a"}, Usages: pki.Server}}
	for _, c := range []struct {
		name  string
		cross *x509.Certificate
		want  int
	}{{"before any rotation", nil, 1}, {"another authority", old, 1}, {"this authority", made, 2}} {
		t.Run(c.name, func(t *testing.T) {
			if c.cross != nil {
				if err := WriteFile(filepath.Join(dir, "cross-ca.crt"), pki.EncodeCert(c.cross)); err != nil {
					t.Fatal(err)
				}
			}
			_ = os.Remove(filepath.Join(dir, "leaf.crt"))
			if _, err := leaf.Ensure(dir, time.Hour, time.Now()); err != nil {
				t.Fatal(err)
			}
			certs, err := cert.CertsFromFile(filepath.Join(dir, "leaf.crt"))
			if err != nil || len(certs) != c.want {
				t.Fatalf("%d certificates, %v", len(certs), err)
			}
			options := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool()}
			options.Roots.AddCert(old)
			for _, c := range certs[1:] {
				options.Intermediates.AddCert(c)
			}
			if _, err := certs[0].Verify(options); (err == nil) != (c.want == 2) {
				t.Errorf("verification with only the previous authority: %v", err)
			}
		})
	}
}

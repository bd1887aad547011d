package provision

import (
	"bytes"
	"crypto"
	"os"
	"path/filepath"
	"testing"
	"time"

	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
)

// testCA is a certificate authority.
type testCA struct {
	pem []byte
	key crypto.Signer
}

func newTestCA(t *testing.T, name string) testCA {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	ca, err := pki.NewAuthority(name, key, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return testCA{pki.EncodeCert(ca.Cert), key}
}

func bundleOf(authorities ...testCA) []byte {
	var out []byte
	for _, ca := range authorities {
		out = append(out, ca.pem...)
	}
	return out
}

// trusting returns a machine that trusts the authorities of a bundle.
func trusting(t *testing.T, bundle []byte) trust {
	t.Helper()
	dir := t.TempDir()
	out := trust{caFile: filepath.Join(dir, "ca.crt"), challengeFile: filepath.Join(dir, "challenge")}
	if err := os.WriteFile(out.caFile, bundle, 0o600); err != nil {
		t.Fatal(err)
	}
	return out
}

// answer returns the signature of a provider with this key for the machine's current challenge.
func (t trust) answer(test *testing.T, key crypto.Signer, bundle []byte) string {
	test.Helper()
	challenge, err := t.challenge()
	if err != nil {
		test.Fatal(err)
	}
	signature, err := nodeconfig.SignAuthorities(key, bundle, challenge)
	if err != nil {
		test.Fatal(err)
	}
	return signature
}

func (t trust) is(test *testing.T, want []byte) {
	test.Helper()
	if got, err := os.ReadFile(t.caFile); err != nil || !bytes.Equal(got, want) {
		test.Errorf("the machine does not trust the expected authorities (%v)", err)
	}
}

// TestTrustChanges_CP15: an authority that the machine trusts in one phase of a rotation signs the bundle of the next phase.
func TestTrustChanges_CP15(t *testing.T) {
	old, next := newTestCA(t, "old"), newTestCA(t, "next")
	machine := trusting(t, bundleOf(old))
	for _, phase := range []struct {
		name   string
		bundle []byte
		signer testCA
	}{{"TrustingNew", bundleOf(old, next), old}, {"SigningNew", bundleOf(next, old), next}, {"DroppingOld", bundleOf(next), next}} {
		if has, err := machine.has(phase.bundle); has || err != nil {
			t.Fatalf("%s: the machine trusts the bundle already: %v", phase.name, err)
		}
		if err := machine.change(phase.bundle, machine.answer(t, phase.signer.key, phase.bundle)); err != nil {
			t.Fatalf("%s: %v", phase.name, err)
		}
		machine.is(t, phase.bundle)
		if has, err := machine.has(phase.bundle); !has || err != nil {
			t.Errorf("%s: the machine does not trust the bundle: %v", phase.name, err)
		}
	}
}

// TestTrustRefuses_CP15: write access to Nodes is not enough to add an authority to a machine, even a former one.
func TestTrustRefuses_CP15(t *testing.T) {
	old, next, evil := newTestCA(t, "old"), newTestCA(t, "next"), newTestCA(t, "evil")
	both, forged := bundleOf(next, old), bundleOf(next, evil)
	machine := trusting(t, both)
	replayed := machine.answer(t, next.key, both)
	if err := machine.change(bundleOf(next), machine.answer(t, next.key, bundleOf(next))); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		bundle    []byte
		signature string
	}{
		"unsigned":                      {forged, ""},
		"signed by a stranger":          {forged, machine.answer(t, evil.key, forged)},
		"signature for another bundle":  {forged, machine.answer(t, next.key, bundleOf(next))},
		"signed by a former authority":  {both, machine.answer(t, old.key, both)},
		"replayed":                      {both, replayed},
		"signature for another machine": {both, trusting(t, both).answer(t, next.key, both)},
	} {
		t.Run(name, func(t *testing.T) {
			if err := machine.change(c.bundle, c.signature); err == nil {
				t.Error("the machine accepted the bundle")
			}
			machine.is(t, bundleOf(next))
		})
	}
}

// TestTrustAfterCrash: the machine dies after it used its challenge. The next answer completes the change.
func TestTrustAfterCrash(t *testing.T) {
	old, next := newTestCA(t, "old"), newTestCA(t, "next")
	machine, both := trusting(t, bundleOf(old)), bundleOf(old, next)
	first := machine.answer(t, old.key, both)
	if _, err := machine.newChallenge(); err != nil {
		t.Fatal(err)
	}
	if err := machine.change(both, first); err == nil {
		t.Error("a challenge was used twice")
	}
	if err := machine.change(both, machine.answer(t, old.key, both)); err != nil {
		t.Error(err)
	}
	machine.is(t, both)
}

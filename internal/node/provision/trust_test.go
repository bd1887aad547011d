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

// trusting is a machine that trusts some authorities.
func trusting(t *testing.T, bundle []byte) trust {
	t.Helper()
	dir := t.TempDir()
	out := trust{caFile: filepath.Join(dir, "ca.crt"), challengeFile: filepath.Join(dir, "challenge")}
	if err := os.WriteFile(out.caFile, bundle, 0o600); err != nil {
		t.Fatal(err)
	}
	return out
}

// answer is what a provider with a key would sign now for the machine.
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
		test.Errorf("it trusts something else than it should (%v)", err)
	}
}

// TestTrustChanges_CP15: through a rotation each phase is signed by what the machine trusts in the one before.
func TestTrustChanges_CP15(t *testing.T) {
	old, next := newTestCA(t, "old"), newTestCA(t, "next")
	machine := trusting(t, bundleOf(old))
	for _, phase := range []struct {
		name   string
		bundle []byte
		signer testCA
	}{{"TrustingNew", bundleOf(old, next), old}, {"SigningNew", bundleOf(next, old), next}, {"DroppingOld", bundleOf(next), next}} {
		if has, err := machine.has(phase.bundle); has || err != nil {
			t.Fatalf("%s: there already: %v", phase.name, err)
		}
		if err := machine.change(phase.bundle, machine.answer(t, phase.signer.key, phase.bundle)); err != nil {
			t.Fatalf("%s: %v", phase.name, err)
		}
		machine.is(t, phase.bundle)
		if has, err := machine.has(phase.bundle); !has || err != nil {
			t.Errorf("%s: not there: %v", phase.name, err)
		}
	}
}

// TestTrustRefuses_CP15: whoever may write Nodes cannot have a machine trust an authority, not even a former one.
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
		"unsigned":             {forged, ""},
		"signed by a stranger": {forged, machine.answer(t, evil.key, forged)},
		"signed for less":      {forged, machine.answer(t, next.key, bundleOf(next))},
		"signed by the former": {both, machine.answer(t, old.key, both)},
		"replayed":             {both, replayed},
		"of another machine":   {both, trusting(t, both).answer(t, next.key, both)},
	} {
		t.Run(name, func(t *testing.T) {
			if err := machine.change(c.bundle, c.signature); err == nil {
				t.Error("was taken over")
			}
			machine.is(t, bundleOf(next))
		})
	}
}

// TestTrustAfterCrash: when the machine dies after the challenge is used up, the next answer brings it there.
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

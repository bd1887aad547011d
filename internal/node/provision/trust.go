package provision

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki/certfiles"
)

// trust contains the authorities that a machine trusts, and their changes: a trusted authority must sign the new authorities together with
// a challenge of the machine, which is used only once.
type trust struct{ caFile, challengeFile string }

// machineTrust returns the trust of the machine that this process runs on.
var machineTrust = trust{caFile: caFile, challengeFile: "/etc/capstan/authorities-challenge"}

// challenge returns the challenge that the next signature must cover.
func (t trust) challenge() (string, error) {
	data, err := os.ReadFile(t.challengeFile)
	if errors.Is(err, fs.ErrNotExist) {
		return t.newChallenge()
	}
	return strings.TrimSpace(string(data)), err
}

func (t trust) newChallenge() (string, error) {
	challenge := rand.Text()
	return challenge, certfiles.WriteFile(t.challengeFile, []byte(challenge+"\n"))
}

// has returns whether the bundle contains the authorities that the machine trusts, in the same order.
func (t trust) has(bundle []byte) (bool, error) {
	wanted, err := nodeconfig.Fingerprints(bundle)
	if err != nil {
		return false, fmt.Errorf("the annotation %s of this Node: %w", nodeconfig.AuthoritiesAnnotation, err)
	}
	own, err := os.ReadFile(t.caFile)
	if err != nil {
		return false, err
	}
	has, err := nodeconfig.Fingerprints(own)
	if err != nil {
		return false, fmt.Errorf("%s: %w", t.caFile, err)
	}
	return slices.Equal(wanted, has), nil
}

// change applies a bundle that is signed. It uses up the challenge first: a crash between the two steps requires another
// signature, and no signature is used twice.
func (t trust) change(bundle []byte, signature string) error {
	own, err := cert.CertsFromFile(t.caFile)
	if err != nil {
		return err
	}
	challenge, err := t.challenge()
	if err != nil {
		return err
	}
	if err := nodeconfig.VerifyAuthorities(own, bundle, challenge, signature); err != nil {
		return fmt.Errorf("the annotation %s of this Node is not applied: expected %s to be the control plane provider's signature over %s (it takes seconds and needs this version of Capstan): %w",
			nodeconfig.AuthoritiesAnnotation, nodeconfig.SignatureAnnotation, nodeconfig.ChallengeAnnotation, err)
	}
	if _, err := t.newChallenge(); err != nil {
		return err
	}
	return certfiles.WriteFile(t.caFile, bundle)
}

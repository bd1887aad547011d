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

// trust is what a machine trusts, and how it comes to trust something else: an authority that it trusts has to
// sign that, over a challenge of the machine's that is used only once.
type trust struct{ caFile, challengeFile string }

// machineTrust is that of the machine that this runs on.
var machineTrust = trust{caFile: caFile, challengeFile: "/etc/capstan/authorities-challenge"}

// challenge is what the next signature has to be over.
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

// has says whether the bundle has the authorities, in the order, that the machine trusts.
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

// change takes over a bundle that is signed. The challenge is used up before that, so a crash between the two asks
// for another signature, and never lets one be used twice.
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
		return fmt.Errorf("the annotation %s of this Node is not followed: wanted %s to be the control plane provider's answer to %s (which takes it seconds, if it is of this version of Capstan): %w",
			nodeconfig.AuthoritiesAnnotation, nodeconfig.SignatureAnnotation, nodeconfig.ChallengeAnnotation, err)
	}
	if _, err := t.newChallenge(); err != nil {
		return err
	}
	return certfiles.WriteFile(t.caFile, bundle)
}

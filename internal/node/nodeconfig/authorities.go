package nodeconfig

import (
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"k8s.io/client-go/util/cert"
)

// The certificate authorities of a cluster reach a machine with its bootstrap data, and later, when they are
// rotated, through annotations of its Node: that is all that every kubelet may read and write. Others may write
// Nodes too, so a machine takes over nothing but what an authority that it trusts has signed for it
// (docs/certificates.md).
const (
	// AuthoritiesAnnotation holds the certificate authorities that the machine is to trust, as PEM. The
	// first one signs. The control plane provider writes it.
	AuthoritiesAnnotation = "node.capstan.dev/certificate-authorities"
	// ChallengeAnnotation holds a random text of the machine's, which its agent replaces before it follows
	// a signature over it. So nothing that was signed before is followed again.
	ChallengeAnnotation = "node.capstan.dev/certificate-authorities-challenge"
	// SignatureAnnotation holds a signature over AuthoritiesAnnotation and ChallengeAnnotation with the key of the
	// authority that signs. The control plane provider writes it.
	SignatureAnnotation = "node.capstan.dev/certificate-authorities-signature"
	// TrustedAuthoritiesAnnotation holds the fingerprints of those that the machine trusts, with commas between
	// them. The machine's agent writes it once everything on the machine does.
	TrustedAuthoritiesAnnotation = "node.capstan.dev/trusted-authorities"
	// KubeletAuthorityAnnotation holds the fingerprint of the one that has signed the kubelet's certificates.
	KubeletAuthorityAnnotation = "node.capstan.dev/kubelet-authority"
)

const (
	// SigningCAPath is the first certificate of ca.crt alone: what signs takes no more than one.
	SigningCAPath = PKIDir + "/signing-ca.crt"
	// CrossCAPath is the certificate authority that signs, signed by the one before it: who only trusts that one
	// trusts what has this in its chain. It is there from the first rotation on.
	CrossCAPath = PKIDir + "/cross-ca.crt"
)

// Fingerprints of the certificates in a PEM document, in their order.
func Fingerprints(pem []byte) ([]string, error) {
	certs, err := cert.ParseCertsPEM(pem)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, c := range certs {
		out = append(out, Fingerprint(c.Raw))
	}
	return out, nil
}

// Fingerprint of a certificate: enough to tell those of one cluster apart.
func Fingerprint(der []byte) string {
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:8])
}

// SignAuthorities signs a PEM document with certificate authorities for the machine that has the challenge.
func SignAuthorities(key crypto.Signer, bundle []byte, challenge string) (string, error) {
	_, hash := algorithm(key.Public())
	signature, err := crypto.SignMessage(key, rand.Reader, signedText(bundle, challenge), hash)
	if err != nil {
		return "", fmt.Errorf("signing the certificate authorities: %w", err)
	}
	return base64.StdEncoding.EncodeToString(signature), nil
}

// VerifyAuthorities returns an error unless one of the trusted authorities has signed the PEM document for the
// machine that has the challenge.
func VerifyAuthorities(trusted []*x509.Certificate, bundle []byte, challenge, signature string) error {
	raw, err := base64.StdEncoding.DecodeString(signature)
	if err != nil {
		return fmt.Errorf("the signature is not base64: %w", err)
	}
	text := signedText(bundle, challenge)
	if slices.ContainsFunc(trusted, func(c *x509.Certificate) bool {
		kind, _ := algorithm(c.PublicKey)
		return c.CheckSignature(kind, text, raw) == nil
	}) {
		return nil
	}
	return errors.New("no certificate authority that is trusted now has signed it for this challenge")
}

// signedText is what the key signs. It is no certificate: those begin with another byte. The parts are hashed,
// because whoever may write the Node chooses the challenge, and must not be able to move the line between the two.
func signedText(bundle []byte, challenge string) []byte {
	ofBundle, ofChallenge := sha256.Sum256(bundle), sha256.Sum256([]byte(challenge))
	return slices.Concat([]byte("capstan.dev/certificate-authorities/v1\n"), ofChallenge[:], ofBundle[:])
}

// algorithm of signatures with a key.
func algorithm(public crypto.PublicKey) (x509.SignatureAlgorithm, crypto.Hash) {
	switch public.(type) {
	case *rsa.PublicKey:
		return x509.SHA256WithRSA, crypto.SHA256
	case ed25519.PublicKey:
		return x509.PureEd25519, 0
	}
	return x509.ECDSAWithSHA256, crypto.SHA256
}

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

// The certificate authorities of a cluster reach a machine with its bootstrap data. After a rotation they reach it
// through annotations of its Node, because every kubelet can read and write its Node. Other clients can write Nodes as
// well. A machine therefore accepts only authorities that a trusted authority has signed for this machine
// (docs/certificates.md).
const (
	// AuthoritiesAnnotation contains the certificate authorities that the machine must trust, as PEM. The first one
	// signs. The control plane provider writes it.
	AuthoritiesAnnotation = "node.capstan.dev/certificate-authorities"
	// ChallengeAnnotation contains a random text of the machine. The agent replaces it before it applies a signature
	// over it, so no signature is applied twice.
	ChallengeAnnotation = "node.capstan.dev/certificate-authorities-challenge"
	// SignatureAnnotation contains a signature over AuthoritiesAnnotation and ChallengeAnnotation with the key of the
	// signing authority. The control plane provider writes it.
	SignatureAnnotation = "node.capstan.dev/certificate-authorities-signature"
	// TrustedAuthoritiesAnnotation contains the fingerprints of the authorities that the machine trusts, separated by
	// commas. The agent writes it when all components of the machine trust them.
	TrustedAuthoritiesAnnotation = "node.capstan.dev/trusted-authorities"
	// KubeletAuthorityAnnotation contains the fingerprint of the authority that signed the kubelet's certificates.
	KubeletAuthorityAnnotation = "node.capstan.dev/kubelet-authority"
)

const (
	// SigningCAPath contains only the first certificate of ca.crt, because signers accept a single certificate.
	SigningCAPath = PKIDir + "/signing-ca.crt"
	// CrossCAPath is the certificate of the signing authority, signed by the previous authority. Clients that trust
	// only the previous authority accept chains that contain it. It exists from the first rotation on.
	CrossCAPath = PKIDir + "/cross-ca.crt"
)

// Fingerprints returns the fingerprints of the certificates in a PEM document, in their order.
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

// Fingerprint returns a short hash of a certificate, unique within a cluster.
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
	return errors.New("no trusted certificate authority has signed it for this challenge")
}

// signedText returns the text to sign. It cannot be a certificate, because certificates start with another byte. Both
// parts are hashed, because a client that can write the Node chooses the challenge, and must not be able to shift the
// boundary between the parts.
func signedText(bundle []byte, challenge string) []byte {
	ofBundle, ofChallenge := sha256.Sum256(bundle), sha256.Sum256([]byte(challenge))
	return slices.Concat([]byte("capstan.dev/certificate-authorities/v1\n"), ofChallenge[:], ofBundle[:])
}

// algorithm returns the signature algorithm of a key.
func algorithm(public crypto.PublicKey) (x509.SignatureAlgorithm, crypto.Hash) {
	switch public.(type) {
	case *rsa.PublicKey:
		return x509.SHA256WithRSA, crypto.SHA256
	case ed25519.PublicKey:
		return x509.PureEd25519, 0
	}
	return x509.ECDSAWithSHA256, crypto.SHA256
}

package nodeconfig

import (
	"crypto/sha256"
	"encoding/hex"

	"k8s.io/client-go/util/cert"
)

// The certificate authorities of a cluster reach a machine with its bootstrap data, and later, when they are
// rotated, through annotations of its Node: that is all that every kubelet may read and write.
const (
	// AuthoritiesAnnotation holds the certificate authorities that the machine is to trust, as PEM. The
	// first one signs. The control plane provider writes it.
	AuthoritiesAnnotation = "node.capstan.dev/certificate-authorities"
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

package v1beta2

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AuthoritiesAnnotation on a control plane says which certificate authorities all of the cluster is known to
// have. Those in the secret <cluster>-ca may be a step ahead.
const AuthoritiesAnnotation = "controlplane.capstan.dev/certificate-authorities"

const (
	// CertificateAuthorityRotatingCondition: the cluster's certificate authority is being replaced. Its reason is
	// the phase, its message says what the next one waits for. Not there before the first rotation.
	CertificateAuthorityRotatingCondition = "CertificateAuthorityRotating"
	// TrustingNewReason: everything comes to trust the new certificate authority; the old one signs.
	TrustingNewReason = "TrustingNew"
	// SigningNewReason: everything is signed anew by the new certificate authority; both are trusted.
	SigningNewReason = "SigningNew"
	// DroppingOldReason: the old certificate authority ceases to be trusted.
	DroppingOldReason = "DroppingOld"
	// NotRotatingReason: there is one certificate authority, and everything has it.
	NotRotatingReason = "NotRotating"
	// AuthorityNotOwnedReason: the certificate authority is the user's, who has to do the next step.
	AuthorityNotOwnedReason = "NotOwned"
)

// CertificatesSpec says when the certificate authority of the cluster is replaced.
// +kubebuilder:validation:MinProperties=1
type CertificatesSpec struct {
	// rotateCAAfter replaces the cluster's certificate authority, by which the API servers, the kubelets and all
	// their clients are signed, if it was made before this time, once this time has come. The cluster
	// works all the while; kubeconfigs of before do not work any more in the end. The condition
	// CertificateAuthorityRotating says how far it is.
	// +optional
	RotateCAAfter metav1.Time `json:"rotateCAAfter,omitempty,omitzero"`
}

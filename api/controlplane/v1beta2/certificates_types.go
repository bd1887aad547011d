package v1beta2

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AuthoritiesAnnotation on a control plane lists the certificate authorities that the whole cluster is known to
// have. The Secret <cluster>-ca can be one phase ahead.
const AuthoritiesAnnotation = "controlplane.capstan.dev/certificate-authorities"

// Condition of a CapstanControlPlane about the rotation of its certificate authority, and its reasons.
const (
	// CertificateAuthorityRotatingCondition: the cluster's certificate authority is being replaced. The reason is
	// the phase. The message lists the missing steps. The condition does not exist before the first rotation.
	CertificateAuthorityRotatingCondition = "CertificateAuthorityRotating"
	// TrustingNewReason: all parts of the cluster start to trust the new certificate authority. The old one signs.
	TrustingNewReason = "TrustingNew"
	// SigningNewReason: the new certificate authority signs all certificates again. Both are trusted.
	SigningNewReason = "SigningNew"
	// DroppingOldReason: the old certificate authority is removed from all trust stores.
	DroppingOldReason = "DroppingOld"
	// NotRotatingReason: there is one certificate authority, and all parts of the cluster have it.
	NotRotatingReason = "NotRotating"
	// AuthorityNotOwnedReason: the user provides the certificate authority and must do the next step.
	AuthorityNotOwnedReason = "NotOwned"
)

// CertificatesSpec configures the rotation of the cluster's certificate authority.
// +kubebuilder:validation:MinProperties=1
type CertificatesSpec struct {
	// rotateCAAfter replaces the cluster's certificate authority if it was created before this time, as soon as
	// this time has come. This authority signs the certificates of API servers, kubelets and their clients. The
	// cluster works during the rotation. Kubeconfigs issued before the rotation stop working when it completes.
	// The condition CertificateAuthorityRotating shows the progress.
	// +optional
	RotateCAAfter metav1.Time `json:"rotateCAAfter,omitempty,omitzero"`
}

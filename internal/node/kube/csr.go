package kube

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"

	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

// Request describes a certificate that a machine requests from the cluster: a client certificate, or a serving
// certificate if it has names.
type Request struct {
	// Name is the prefix of the CertificateSigningRequest's name.
	Name string
	// Signer, for example kubernetes.io/kube-apiserver-client.
	Signer       string
	CommonName   string
	Organization []string
	// DNSNames and IPs make it the certificate of a server.
	DNSNames []string
	IPs      []net.IP
	// KeyFile is created if it does not exist. It is kept, so that a retry after a crash finds the same request.
	KeyFile string
	// replaces is the serial number of the certificate that is renewed, or empty for the first certificate. It makes
	// the name of a renewal differ from that of the previous request, which the cluster may still have.
	replaces string
}

// RequestCertificate requests the certificate and waits until it is approved and signed. It retries until the API
// server answers and accepts the credential. A denial is final.
func RequestCertificate(ctx context.Context, client dynamic.Interface, r Request) ([]byte, error) {
	key, err := certfiles.EnsureKey(r.KeyFile)
	if err != nil {
		return nil, err
	}
	der, err := pki.NewRequest(pki.Leaf{CommonName: r.CommonName, Organization: r.Organization, DNSNames: r.DNSNames, IPs: r.IPs}, key)
	if err != nil {
		return nil, err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, err
	}
	name := requestName(r, public)
	csr, err := requestObject(name, r, der)
	if err != nil {
		return nil, err
	}
	var issued []byte
	err = Retry(ctx, fmt.Sprintf("requesting a certificate for %s (CertificateSigningRequest %s)", r.CommonName, name), func(ctx context.Context) error {
		_, err := client.Resource(CSRs).Create(ctx, csr, metav1.CreateOptions{FieldManager: FieldManager})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		return waitWhileThere(ctx, client, CSRs, name, func(o *unstructured.Unstructured) (bool, error) {
			issued, err = issuedCertificate(o)
			return issued != nil, err
		})
	})
	return issued, err
}

// requestName returns a name that depends only on the key, the subject and the renewed certificate.
func requestName(r Request, public []byte) string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%q %q %q", r.Signer, r.CommonName, r.Organization)
	sum.Write(public)
	sum.Write([]byte(r.replaces))
	return r.Name + "-" + hex.EncodeToString(sum.Sum(nil)[:10])
}

func requestObject(name string, r Request, der []byte) (*unstructured.Unstructured, error) {
	purpose := certificatesv1.UsageClientAuth
	if len(r.DNSNames)+len(r.IPs) > 0 {
		purpose = certificatesv1.UsageServerAuth
	}
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&certificatesv1.CertificateSigningRequest{
		TypeMeta:   metav1.TypeMeta{APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequest"},
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pki.EncodeRequest(der),
			SignerName: r.Signer,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, purpose},
		},
	})
	return &unstructured.Unstructured{Object: object}, err
}

// issuedCertificate returns the certificate, or nil as long as the request is open.
func issuedCertificate(o *unstructured.Unstructured) ([]byte, error) {
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		condition, _ := c.(map[string]any)
		switch condition["type"] {
		case string(certificatesv1.CertificateDenied), string(certificatesv1.CertificateFailed):
			return nil, &FinalError{fmt.Errorf("was refused (%v): %v %v", condition["type"], condition["reason"], condition["message"])}
		}
	}
	encoded, _, _ := unstructured.NestedString(o.Object, "status", "certificate")
	if encoded == "" {
		return nil, nil
	}
	return base64.StdEncoding.DecodeString(encoded)
}

// EnsureCertificate requests a certificate and writes it when it is issued.
func EnsureCertificate(ctx context.Context, client dynamic.Interface, r Request, certFile string) error {
	if former, err := pki.ReadCert(certFile); err == nil {
		r.replaces = former.SerialNumber.String()
	}
	certificate, err := RequestCertificate(ctx, client, r)
	if err != nil {
		return err
	}
	key, err := os.ReadFile(r.KeyFile)
	if err != nil {
		return err
	}
	if err := matches(certificate, key); err != nil {
		return fmt.Errorf("the issued certificate for %s: %w", r.CommonName, err)
	}
	return certfiles.WriteFile(certFile, certificate)
}

func matches(certificate, key []byte) error {
	if _, err := tls.X509KeyPair(certificate, key); err != nil {
		return errors.New("does not match its key")
	}
	return nil
}

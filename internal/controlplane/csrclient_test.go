package controlplane

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"net"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// request contains the fields of a certificate request.
type request struct {
	cn, o, dns, ip string
	usage          certificatesv1.KeyUsage
}

// ask creates a request as a user and returns its name.
func ask(t *testing.T, as rest.ImpersonationConfig, signer string, r request) string {
	t.Helper()
	allowRequests(t)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: r.cn}}
	if r.o != "" {
		template.Subject.Organization = []string{r.o}
	}
	if r.dns != "" {
		template.DNSNames = []string{r.dns}
	}
	if r.ip != "" {
		template.IPAddresses = []net.IP{net.ParseIP(r.ip)}
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	config := rest.CopyConfig(env.Config)
	config.Impersonate = as
	c, err := client.New(config, client.Options{Scheme: env.Scheme})
	if err != nil {
		t.Fatal(err)
	}
	csr := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: signer, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, r.usage},
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
		},
	}
	if err := c.Create(context.Background(), csr); err != nil {
		t.Fatal(err)
	}
	return csr.Name
}

// allowRequests lets every user create requests, as the RBAC of a cluster does for nodes and tokens.
func allowRequests(t *testing.T) {
	t.Helper()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "test-ask"}, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{certificatesv1.GroupName}, Resources: []string{"certificatesigningrequests"}, Verbs: []string{"create", "get"},
	}}}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "test-ask"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "test-ask"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:authenticated"}},
	}
	for _, obj := range []client.Object{role, binding} {
		if err := env.Client.Create(context.Background(), obj); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
}

// answer returns the answer to a request: Approved, Denied or "".
func answer(t *testing.T, name string) string {
	t.Helper()
	csr := &certificatesv1.CertificateSigningRequest{}
	if err := env.Client.Get(context.Background(), client.ObjectKey{Name: name}, csr); err != nil {
		t.Fatal(err)
	}
	for _, c := range csr.Status.Conditions {
		return string(c.Type)
	}
	return ""
}

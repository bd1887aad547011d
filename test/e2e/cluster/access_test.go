//go:build e2e

package cluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/test/e2e/harness"
)

// checkUserCertificate follows docs/access.md: CP-25, users outside of Cluster API get their own certificates, with only
// the granted rights.
func checkUserCertificate(t *testing.T, c *harness.Cluster) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	subject := pkix.Name{CommonName: "ada", Organization: []string{"developers"}}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject}, key)
	if err != nil {
		t.Fatal(err)
	}
	request := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: csr}))
	c.Apply(t, fmt.Sprintf(`
apiVersion: certificates.k8s.io/v1
kind: CertificateSigningRequest
metadata: {name: ada}
spec:
  signerName: kubernetes.io/kube-apiserver-client
  usages: [client auth]
  expirationSeconds: 86400
  request: %s
`, request))
	if approved := c.MustKubectl(t, "get", "csr", "ada", "-o", "jsonpath={.status.conditions}"); approved != "" {
		t.Fatalf("a controller has approved or denied the request of a user: %s", approved)
	}
	c.MustKubectl(t, "certificate", "approve", "ada")
	var certificate string
	harness.Eventually(t, "the certificate", 30*time.Second, func(context.Context) error {
		if certificate = c.MustKubectl(t, "get", "csr", "ada", "-o", "jsonpath={.status.certificate}"); certificate == "" {
			return errors.New("not issued yet")
		}
		return nil
	})
	crtFile, keyFile := filepath.Join(t.TempDir(), "ada.crt"), filepath.Join(t.TempDir(), "ada.key")
	crt, err := base64.StdEncoding.DecodeString(certificate)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for path, data := range map[string][]byte{crtFile: crt, keyFile: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c.MustKubectl(t, "config", "set-credentials", "ada", "--client-certificate="+crtFile, "--client-key="+keyFile)
	c.MustKubectl(t, "create", "rolebinding", "developers", "--clusterrole=view", "--group=developers", "--namespace=default")
	harness.Eventually(t, "the user's rights", 10*time.Second, func(context.Context) error {
		_, err := c.Kubectl(t, "--user=ada", "get", "pods", "--namespace=default")
		return err
	})
	if _, err := c.Kubectl(t, "--user=ada", "get", "secrets", "--namespace=kube-system"); err == nil || !strings.Contains(err.Error(), "forbidden") {
		t.Errorf("the user can read Secrets without a role: %v", err)
	}
}

package controlplane

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"path/filepath"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv/expect"
)

// bootstrapper is a user with the rights of a bootstrap token.
func bootstrapper(t *testing.T, token string) client.Client {
	t.Helper()
	config := rest.CopyConfig(env.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:bootstrap:" + token, Groups: []string{"system:bootstrappers", "system:authenticated"}}
	c, err := client.New(config, client.Options{Scheme: env.Client.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// requestKubelet requests the first certificate of a kubelet.
func requestKubelet(t *testing.T, name, token, node string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, err := certfiles.EnsureKey(filepath.Join(t.TempDir(), "key"))
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
	}, key)
	if err != nil {
		t.Fatal(err)
	}
	csr := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}
	if err := bootstrapper(t, token).Create(t.Context(), csr); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = env.Client.Delete(context.Background(), csr) })
	return csr
}

func approved(t *testing.T, csr *certificatesv1.CertificateSigningRequest) bool {
	t.Helper()
	if err := env.Client.Get(t.Context(), client.ObjectKeyFromObject(csr), csr); err != nil {
		t.Fatal(err)
	}
	return len(csr.Status.Conditions) > 0 && csr.Status.Conditions[0].Type == certificatesv1.CertificateApproved
}

// TestKubeletRequests: in a real cluster, a bootstrap token gets the kubelet certificate of its own machine soon, and never that
// of another machine. The Machine and its bootstrap data can appear after the request.
func TestKubeletRequests(t *testing.T) {
	if err := env.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "test-bootstrappers"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:node-bootstrapper"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:bootstrappers"}},
	}); err != nil {
		t.Fatal(err)
	}
	w, _, _ := connected(t, nil)
	join := func(name, token string) {
		t.Helper()
		w.cluster.Machine(name, func(m *clusterv1.Machine) {
			m.Labels = map[string]string{clusterv1.ClusterNameLabel: w.cluster.Name}
			m.Spec.Bootstrap.DataSecretName = ptr.To(name + "-data")
		}, nil)
		w.cluster.Create(&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: w.cluster.Namespace, Name: name + "-data", Labels: map[string]string{clusterv1.ClusterNameLabel: w.cluster.Name},
				Annotations: map[string]string{bootstrapv1.TokenIDsAnnotation: token},
			},
			Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"value": []byte("x")},
		})
	}
	join("requests-a", "aaaaaa")
	early := requestKubelet(t, "early", "bbbbbb", "requests-b")
	foreign := requestKubelet(t, "foreign", "bbbbbb", "requests-a")
	own := requestKubelet(t, "own", "aaaaaa", "requests-a")
	start := time.Now()
	expect.True(t, "the request for its own machine", func() bool { return approved(t, own) })
	t.Logf("approved after %s", time.Since(start))
	if approved(t, early) {
		t.Error("approved for a Machine that does not exist")
	}
	join("requests-b", "bbbbbb")
	expect.True(t, "the request for its own machine, after the Machine exists", func() bool { return approved(t, early) })
	if approved(t, foreign) {
		t.Error("a token got the kubelet certificate of another machine")
	}
}

package infrastructure_test

import (
	"encoding/json"
	"net"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/joining"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
)

// joinToken creates a token as `capstan host token create` does, and returns a client with it.
func joinToken(g *WithT, terms joining.Terms) (*corev1.Secret, client.Client) {
	data, err := json.Marshal(terms)
	g.Expect(err).NotTo(HaveOccurred())
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: providerNamespace, Name: infrav1.HostJoinServiceAccount}}
	role := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: infrav1.HostJoinServiceAccount},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{"certificates.k8s.io"}, Resources: []string{"certificatesigningrequests"}, Verbs: []string{"create", "get"}}},
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: account.Namespace, Name: account.Name}},
	}
	for _, o := range []client.Object{account, role, binding} {
		g.Expect(client.IgnoreAlreadyExists(env.Client.Create(ctx, o))).To(Succeed())
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: providerNamespace, GenerateName: "host-token-", Labels: map[string]string{infrav1.HostTokenLabel: ""}},
		Type:       joining.SecretType, Data: map[string][]byte{joining.KeyTerms: data},
	}
	g.Expect(env.Client.Create(ctx, secret)).To(Succeed())
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: secret.Name, UID: secret.UID},
	}}
	g.Expect(env.Client.SubResource("token").Create(ctx, account, request)).To(Succeed())
	claims, err := joining.Token{Bearer: request.Status.Token}.Claims()
	g.Expect(err).NotTo(HaveOccurred())
	before := secret.DeepCopy()
	secret.Data[joining.KeyID] = []byte(claims.ID)
	g.Expect(env.Client.Patch(ctx, secret, client.MergeFrom(before))).To(Succeed())
	config := rest.AnonymousClientConfig(env.Config)
	config.BearerToken = request.Status.Token
	c, err := client.New(config, client.Options{Scheme: env.Client.Scheme()})
	g.Expect(err).NotTo(HaveOccurred())
	return secret, c
}

// joinAs creates the request of a host, and returns it with the decision.
func joinAs(g *WithT, c client.Client, keyPEM []byte, r joining.Request) *certificatesv1.CertificateSigningRequest {
	key, err := pki.ParseKey(keyPEM)
	g.Expect(err).NotTo(HaveOccurred())
	host, err := r.Host()
	g.Expect(err).NotTo(HaveOccurred())
	der, err := pki.NewRequest(pki.Leaf{IPs: []net.IP{net.ParseIP(host)}}, key)
	g.Expect(err).NotTo(HaveOccurred())
	csr := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "capstan-host-", Annotations: map[string]string{infrav1.HostJoinAnnotation: r.Encode()}},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: infrav1.HostSignerName, Request: pki.EncodeRequest(der),
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}
	g.Expect(c.Create(ctx, csr)).To(Succeed())
	g.Eventually(func(g Gomega) {
		g.Expect(c.Get(ctx, client.ObjectKeyFromObject(csr), csr)).To(Succeed())
		g.Expect(csr.Status.Conditions).NotTo(BeEmpty())
		if csr.Status.Conditions[0].Type == certificatesv1.CertificateApproved {
			g.Expect(csr.Status.Certificate).NotTo(BeEmpty())
		}
	}).WithTimeout(expect.Patience).Should(Succeed())
	return csr
}

// A host joins with a token: it gets a certificate for its key, and a CapstanHost with the terms of the token. The same key joins
// again, with the same result. Another key does not, and an administrator's own request is not signed.
func TestHostJoins(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	secret, c := joinToken(g, joining.Terms{
		Expires: metav1.NewTime(time.Now().Add(time.Hour)), Hosts: 1, FailureDomain: "row-2", Labels: map[string]string{"disk": "fast"},
		AllowedNamespaces: []string{"nobody"}, Validity: metav1.Duration{Duration: time.Hour},
	})
	key, err := pki.NewEncodedKey()
	g.Expect(err).NotTo(HaveOccurred())
	r := joining.Request{Name: "joins", Address: "198.18.9.1:7443", BoxID: "joins", TunnelAddress: "198.18.9.1", Version: "v9", ProtocolVersion: 99}
	csr := joinAs(g, c, key, r)
	g.Expect(csr.Status.Conditions[0].Message).To(ContainSubstring("found 99 (capstand v9): upgrade the manager first"))
	g.Expect(csr.Status.Certificate).To(BeEmpty())
	r.ProtocolVersion = hostpb.ProtocolVersion
	var first credentials.Managed
	for try := range 2 {
		csr := joinAs(g, c, key, r)
		chain, err := cert.ParseCertsPEM(csr.Status.Certificate)
		g.Expect(err).NotTo(HaveOccurred(), "%+v", csr.Status)
		g.Expect(chain).To(HaveLen(2))
		own, err := pki.ParseKey(key)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(pki.HasKey(chain[0], own)).To(BeTrue())
		g.Expect(chain[0].CheckSignatureFrom(chain[1])).To(Succeed())
		g.Expect(chain[0].VerifyHostname("198.18.9.1")).To(Succeed())
		stored := &corev1.Secret{}
		g.Expect(env.Client.Get(ctx, client.ObjectKey{Namespace: providerNamespace, Name: "joins-credentials"}, stored)).To(Succeed())
		m, err := credentials.AuthorityFromSecret(stored.Data)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(m.Authority.Cert.Equal(chain[1])).To(BeTrue())
		if try == 0 {
			first = m
		}
		g.Expect(m.Client.Equal(first.Client)).To(BeTrue(), "a repeated join replaced the credentials")
	}
	host := &infrav1.CapstanHost{}
	g.Expect(env.Client.Get(ctx, client.ObjectKey{Name: "joins"}, host)).To(Succeed())
	t.Cleanup(func() { _ = env.Client.Delete(ctx, host) })
	g.Expect(host.Spec.Address).To(Equal(r.Address))
	g.Expect(host.Spec.TunnelAddress).To(Equal("198.18.9.1"))
	g.Expect(host.Spec.FailureDomain).To(Equal("row-2"))
	g.Expect(host.Spec.AllowedNamespaces.Names).To(Equal([]string{"nobody"}))
	g.Expect(host.Labels).To(HaveKeyWithValue("disk", "fast"))

	stolen, err := pki.NewEncodedKey()
	g.Expect(err).NotTo(HaveOccurred())
	for _, name := range []string{"thief", "joins"} {
		csr := joinAs(g, c, stolen, joining.Request{Name: name, Address: "198.18.9.2:7443"})
		g.Expect(csr.Status.Conditions[0].Message).To(ContainSubstring("used by another host"))
		g.Expect(csr.Status.Certificate).To(BeEmpty())
	}
	g.Expect(apierrors.IsForbidden(c.List(ctx, &certificatesv1.CertificateSigningRequestList{}))).To(BeTrue(), "a token lists requests")
	g.Expect(apierrors.IsForbidden(c.Get(ctx, client.ObjectKeyFromObject(secret), secret))).To(BeTrue(), "a token reads Secrets")
}

// A host whose CapstanHost was deleted does not join again with its token, and the Secret that gave access to it is its dependent.
func TestDeletedHostDoesNotReturn(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	_, c := joinToken(g, joining.Terms{
		Expires: metav1.NewTime(time.Now().Add(time.Hour)), Hosts: 2, AllowedNamespaces: []string{"nobody"}, Validity: metav1.Duration{Duration: time.Hour},
	})
	key, err := pki.NewEncodedKey()
	g.Expect(err).NotTo(HaveOccurred())
	r := joining.Request{Name: "leaves", Address: "198.18.9.3:7443", BoxID: "leaves"}
	g.Expect(joinAs(g, c, key, r).Status.Certificate).NotTo(BeEmpty())
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "leaves"}}
	secret := &corev1.Secret{}
	g.Eventually(func(g Gomega) {
		g.Expect(env.Client.Get(ctx, client.ObjectKeyFromObject(host), host)).To(Succeed())
		g.Expect(host.Finalizers).To(ContainElement(infrav1.HostFinalizer))
		g.Expect(env.Client.Get(ctx, client.ObjectKey{Namespace: providerNamespace, Name: "leaves-credentials"}, secret)).To(Succeed())
		g.Expect(secret.OwnerReferences).To(ContainElement(HaveField("UID", host.UID)))
	}).WithTimeout(expect.Patience).Should(Succeed())
	g.Expect(env.Client.Delete(ctx, host)).To(Succeed())
	g.Eventually(func() bool {
		return apierrors.IsNotFound(env.Client.Get(ctx, client.ObjectKeyFromObject(host), host))
	}).WithTimeout(expect.Patience).Should(BeTrue())
	csr := joinAs(g, c, key, r)
	g.Expect(csr.Status.Conditions[0].Message).To(ContainSubstring("was deleted"))
	g.Expect(csr.Status.Certificate).To(BeEmpty())
	g.Expect(apierrors.IsNotFound(env.Client.Get(ctx, client.ObjectKeyFromObject(host), host))).To(BeTrue(), "the host has returned")
	other, err := pki.NewEncodedKey()
	g.Expect(err).NotTo(HaveOccurred())
	r.Name = "stays"
	g.Expect(joinAs(g, c, other, r).Status.Certificate).NotTo(BeEmpty(), "the token ended for a host that has not used it")
	g.Expect(env.Client.Delete(ctx, &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "stays"}})).To(Succeed())
}

// The Secret of a token is deleted when the token expires.
func TestHostTokenExpires(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	terms := joining.Terms{Expires: metav1.NewTime(time.Now().Add(time.Hour)), Hosts: 1, Validity: metav1.Duration{Duration: time.Hour}}
	secret, _ := joinToken(g, terms)
	terms.Expires = metav1.NewTime(time.Now().Add(time.Second)) // not before the token exists
	data, err := json.Marshal(terms)
	g.Expect(err).NotTo(HaveOccurred())
	before := secret.DeepCopy()
	secret.Data[joining.KeyTerms] = data
	g.Expect(env.Client.Patch(ctx, secret, client.MergeFrom(before))).To(Succeed())
	g.Eventually(func() bool {
		return apierrors.IsNotFound(env.Client.Get(ctx, client.ObjectKeyFromObject(secret), &corev1.Secret{}))
	}).WithTimeout(expect.Patience).Should(BeTrue())
}

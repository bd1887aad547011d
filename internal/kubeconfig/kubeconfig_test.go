package kubeconfig

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientcmdv1 "k8s.io/client-go/tools/clientcmd/api/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

var here = clusterv1.APIEndpoint{Host: "10.0.0.1", Port: 6443}

// secretText stands for all values of a kubeconfig that messages must not contain.
const secretText = "hunter2"

// pair returns a self-signed certificate and its key.
func pair(t testing.TB) (cert, key []byte) {
	t.Helper()
	signer, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, signer.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	if key, err = certs.EncodePrivateKeyPEMFromSigner(signer); err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key
}

func aConfig(t testing.TB) *clientcmdv1.Config {
	t.Helper()
	cert, key := pair(t)
	return &clientcmdv1.Config{
		APIVersion: "v1", Kind: "Config", CurrentContext: "x",
		Contexts:  []clientcmdv1.NamedContext{{Name: "x", Context: clientcmdv1.Context{Cluster: "c", AuthInfo: "u"}}},
		Clusters:  []clientcmdv1.NamedCluster{{Name: "c", Cluster: clientcmdv1.Cluster{Server: "https://10.0.0.1:6443", CertificateAuthorityData: cert}}},
		AuthInfos: []clientcmdv1.NamedAuthInfo{{Name: "u", AuthInfo: clientcmdv1.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}}},
	}
}

func marshal(t testing.TB, config *clientcmdv1.Config) []byte {
	t.Helper()
	data, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// hugeAuthority returns a certificate with an RSA key of 9000 bits.
func hugeAuthority(t testing.TB) []byte {
	t.Helper()
	signer, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	n := new(big.Int).Lsh(big.NewInt(1), 8999)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), SubjectKeyId: []byte{1}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &rsa.PublicKey{N: n.SetBit(n, 0, 1), E: 3}, signer)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// TestRefused: a kubeconfig may only connect to its cluster. The error names each other field and contains no value.
func TestRefused(t *testing.T) {
	type (
		cluster = clientcmdv1.Cluster
		user    = clientcmdv1.AuthInfo
		config  = clientcmdv1.Config
	)
	onCluster := func(change func(*cluster)) func(*config) { return func(c *config) { change(&c.Clusters[0].Cluster) } }
	onUser := func(change func(*user)) func(*config) { return func(c *config) { change(&c.AuthInfos[0].AuthInfo) } }
	server := func(s string) func(*config) { return onCluster(func(c *cluster) { c.Server = s }) }
	token := func(s string) func(*config) { return onUser(func(u *user) { *u = user{Token: s} }) }
	_, otherKey := pair(t)
	huge := hugeAuthority(t)
	for name, c := range map[string]struct {
		change func(*config)
		field  string // expected field; "" if the kubeconfig is accepted
	}{
		"certificate":              {func(*config) {}, ""},
		"token":                    {token("abc.def"), ""},
		"server name":              {onCluster(func(c *cluster) { c.TLSServerName = "api.example.com" }), ""},
		"server with a slash":      {server("https://10.0.0.1:6443/"), ""},
		"IPv4-mapped IPv6 address": {server("https://[::ffff:10.0.0.1]:6443"), ""},
		"namespace":                {func(c *config) { c.Contexts[0].Context.Namespace = "n" }, ""},
		"extensions": {func(c *config) {
			c.Extensions = []clientcmdv1.NamedExtension{{Name: "e", Extension: runtime.RawExtension{Raw: []byte(`{"a":1}`)}}}
		}, ""},
		"exec of another context": {func(c *config) {
			c.AuthInfos = append(c.AuthInfos, clientcmdv1.NamedAuthInfo{Name: "v", AuthInfo: user{Exec: &clientcmdv1.ExecConfig{Command: "x"}}})
		}, ""},

		"exec":                    {onUser(func(u *user) { u.Exec = &clientcmdv1.ExecConfig{Command: secretText} }), "user.exec"},
		"exec and token":          {onUser(func(u *user) { *u = user{Token: "t", Exec: &clientcmdv1.ExecConfig{}} }), "user.exec"},
		"auth-provider":           {onUser(func(u *user) { u.AuthProvider = &clientcmdv1.AuthProviderConfig{Name: secretText} }), "user.auth-provider"},
		"tokenFile":               {onUser(func(u *user) { u.TokenFile = secretText }), "user.tokenFile"},
		"client-certificate":      {onUser(func(u *user) { u.ClientCertificate = secretText }), "user.client-certificate"},
		"client-key":              {onUser(func(u *user) { u.ClientKey = secretText }), "user.client-key"},
		"username":                {onUser(func(u *user) { u.Username = secretText }), "user.username"},
		"password":                {onUser(func(u *user) { u.Password = secretText }), "user.password"},
		"as":                      {onUser(func(u *user) { u.Impersonate = secretText }), "user.as"},
		"as-uid":                  {onUser(func(u *user) { u.ImpersonateUID = secretText }), "user.as-uid"},
		"as-groups":               {onUser(func(u *user) { u.ImpersonateGroups = []string{secretText} }), "user.as-groups"},
		"as-user-extra":           {onUser(func(u *user) { u.ImpersonateUserExtra = map[string][]string{"a": {secretText}} }), "user.as-user-extra"},
		"authority of a file":     {onCluster(func(c *cluster) { c.CertificateAuthority = secretText }), "cluster.certificate-authority"},
		"proxy-url":               {onCluster(func(c *cluster) { c.ProxyURL = "http://" + secretText }), "cluster.proxy-url"},
		"insecure":                {onCluster(func(c *cluster) { c.InsecureSkipTLSVerify = true }), "cluster.insecure-skip-tls-verify"},
		"no authority":            {onCluster(func(c *cluster) { c.CertificateAuthorityData = nil }), "cluster.certificate-authority-data"},
		"invalid authority":       {onCluster(func(c *cluster) { c.CertificateAuthorityData = []byte(secretText) }), "cluster.certificate-authority-data"},
		"bad server name":         {onCluster(func(c *cluster) { c.TLSServerName = secretText + "\n" }), "cluster.tls-server-name"},
		"no server":               {server(""), "cluster.server"},
		"http":                    {server("http://10.0.0.1:6443"), "cluster.server"},
		"another server":          {server("https://" + secretText + ":6443"), "cluster.server"},
		"another port":            {server("https://10.0.0.1:6444"), "cluster.server"},
		"no port":                 {server("https://10.0.0.1"), "cluster.server"},
		"path":                    {server("https://10.0.0.1:6443/" + secretText), "cluster.server"},
		"query":                   {server("https://10.0.0.1:6443?" + secretText), "cluster.server"},
		"user in the server":      {server("https://" + secretText + "@10.0.0.1:6443"), "cluster.server"},
		"invalid server":          {server("https://10.0.0.1:6443%" + secretText), "cluster.server"},
		"no credentials":          {onUser(func(u *user) { *u = user{} }), "user.client-certificate-data"},
		"certificate only":        {onUser(func(u *user) { u.ClientKeyData = nil }), "user.client-certificate-data"},
		"a huge authority":        {onCluster(func(c *cluster) { c.CertificateAuthorityData = huge }), "cluster.certificate-authority-data"},
		"a huge key":              {onUser(func(u *user) { u.ClientKeyData = append(u.ClientKeyData, make([]byte, 8<<10)...) }), "user.client-certificate-data"},
		"another key":             {onUser(func(u *user) { u.ClientKeyData = otherKey }), "user.client-certificate-data"},
		"certificate and token":   {onUser(func(u *user) { u.Token = secretText }), "user.token"},
		"token with a line break": {token(secretText + "\nHost: a"), "user.token"},
		"token too long":          {token(strings.Repeat("a", maxToken+1)), "user.token"},
		"no current context":      {func(c *config) { c.CurrentContext = "" }, "current-context"},
		"unknown context":         {func(c *config) { c.CurrentContext = secretText }, "current-context"},
		"unknown cluster":         {func(c *config) { c.Contexts[0].Context.Cluster = secretText }, "context.cluster"},
		"unknown user":            {func(c *config) { c.Contexts[0].Context.AuthInfo = secretText }, "context.user"},
		"two users of one name":   {func(c *config) { c.AuthInfos = append(c.AuthInfos, clientcmdv1.NamedAuthInfo{Name: "u"}) }, "document"},
		"another kind":            {func(c *config) { c.Kind = secretText }, "document"},
		"too large":               {func(c *config) { c.Contexts[0].Context.Namespace = strings.Repeat("a", MaxSize) }, "size"},
	} {
		t.Run(name, func(t *testing.T) {
			config := aConfig(t)
			c.change(config)
			got, err := Load(marshal(t, config), here)
			var refused *RefusedError
			switch {
			case c.field == "" && err != nil:
				t.Fatal(err)
			case c.field == "":
				if got.Host == "" || len(got.CAData) == 0 || got.ExecProvider != nil {
					t.Errorf("loaded %v", got)
				}
			case !errors.As(err, &refused) || refused.Field != c.field:
				t.Fatalf("got %v, want the field %s", err, c.field)
			case strings.Contains(err.Error(), secretText):
				t.Errorf("the error contains a value: %s", err)
			}
		})
	}
}

// TestInvalidDocuments: an invalid document is refused, and the error contains no part of it. A document with an anchor
// is refused before it is decoded.
func TestInvalidDocuments(t *testing.T) {
	for _, data := range []string{"", secretText, "users: " + secretText, "a: &a [" + secretText + "]\nb: *a", "apiVersion: v1\nkind: Config\nclusters: [" + secretText + "]"} {
		if _, err := Load([]byte(data), here); err == nil || strings.Contains(err.Error(), secretText) {
			t.Errorf("%q: %v", data, err)
		}
	}
}

// TestAnchors: the decoder does not get a kubeconfig with anchors. The same kubeconfig without anchors is accepted.
func TestAnchors(t *testing.T) {
	good := marshal(t, aConfig(t))
	if _, err := Load(good, here); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(append(good, "\n# &a\n"...), here); err == nil || !strings.Contains(err.Error(), "anchor") {
		t.Errorf("a kubeconfig with &: %v", err)
	}
}

// TestRewrite: the result contains only the checked fields. It can be loaded again.
func TestRewrite(t *testing.T) {
	config := aConfig(t)
	config.Clusters[0].Cluster.TLSServerName = "api"
	config.AuthInfos = append(config.AuthInfos, clientcmdv1.NamedAuthInfo{Name: "v", AuthInfo: clientcmdv1.AuthInfo{TokenFile: secretText}})
	data, err := Rewrite(marshal(t, config), here)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Load(data, here)
	if err != nil || got.ServerName != "api" || got.Host != "https://10.0.0.1:6443" || strings.Contains(string(data), secretText) {
		t.Errorf("%v, %s", err, data)
	}
}

// serve starts an API server with TLS and returns a client for it.
func serve(t *testing.T, handler http.HandlerFunc) (*http.Client, string) {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	config := aConfig(t)
	config.Clusters[0].Cluster.Server = server.URL
	config.Clusters[0].Cluster.CertificateAuthorityData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	config.AuthInfos[0].AuthInfo = clientcmdv1.AuthInfo{Token: "tok"}
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.ParseInt(u.Port(), 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	loaded, err := Load(marshal(t, config), clusterv1.APIEndpoint{Host: u.Hostname(), Port: int32(port)})
	if err != nil {
		t.Fatal(err)
	}
	c, err := HTTPClient(loaded, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return c, server.URL
}

func get(t *testing.T, c *http.Client, url string) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c.Do(req)
}

// TestClient: the client sends the token, does not follow redirects, and limits the size of a response.
func TestClient(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the redirect was followed") }))
	t.Cleanup(elsewhere.Close)
	c, server := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "Bearer tok":
			w.WriteHeader(http.StatusUnauthorized)
		case r.URL.Path == "/redirect":
			http.Redirect(w, r, elsewhere.URL, http.StatusFound)
		case r.URL.Path == "/endless":
			for chunk := make([]byte, 1<<20); ; {
				if _, err := w.Write(chunk); err != nil {
					return
				}
			}
		}
	})
	for path, want := range map[string]int{"/": http.StatusOK, "/redirect": http.StatusFound} {
		resp, err := get(t, c, server+path)
		if err != nil || resp.StatusCode != want {
			t.Fatalf("%s: %v, %v", path, resp, err)
		}
		resp.Body.Close()
	}
	resp, err := get(t, c, server+"/endless")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if n, err := io.Copy(io.Discard, resp.Body); !errors.Is(err, errTooLong) || n != maxResponse {
		t.Errorf("read %d bytes, %v", n, err)
	}
}

// TestReader: ClusterCache gets the checked kubeconfig for the endpoint of its cluster, or the reason of the refusal.
func TestReader(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, clusterv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "demo"}}
	cluster.Spec.ControlPlaneEndpoint = here
	config := aConfig(t)
	good := marshal(t, config)
	config.Clusters[0].Cluster.ProxyURL = "http://127.0.0.1:1"
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "demo-kubeconfig"}, Data: map[string][]byte{"value": marshal(t, config), "other": []byte("x")}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(cluster, secret).Build()
	r, key := Reader{Secrets: c, Clusters: c}, client.ObjectKeyFromObject(secret)

	var refused *RefusedError
	if err := r.Get(context.Background(), key, &corev1.Secret{}); !errors.As(err, &refused) || refused.Field != "cluster.proxy-url" {
		t.Errorf("a proxy: %v", err)
	}
	secret.Data["value"] = good
	if err := c.Update(context.Background(), secret); err != nil {
		t.Fatal(err)
	}
	got := &corev1.Secret{}
	if err := r.Get(context.Background(), key, got); err != nil || len(got.Data) != 1 {
		t.Fatalf("%v, %v", err, got.Data)
	}
	if _, err := Load(got.Data["value"], here); err != nil {
		t.Error(err)
	}
	if err := r.Get(context.Background(), client.ObjectKey{Namespace: "n", Name: "demo-ca"}, got); err == nil {
		t.Error("reads other Secrets")
	}
}

// FuzzLoad: for any document, an accepted connection uses the endpoint, verified TLS, and inline credentials of one
// kind. It stays the same when it is written and loaded again.
func FuzzLoad(f *testing.F) {
	config := aConfig(f)
	f.Add(marshal(f, config))
	config.AuthInfos[0].AuthInfo = clientcmdv1.AuthInfo{Token: "t"}
	f.Add(marshal(f, config))
	config.AuthInfos[0].AuthInfo.Exec = &clientcmdv1.ExecConfig{Command: "sh"}
	f.Add(marshal(f, config))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := Load(data, here)
		if err != nil {
			if _, ok := errors.AsType[*RefusedError](err); !ok {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		inline := got.CAFile == "" && got.CertFile == "" && got.KeyFile == "" && got.BearerTokenFile == ""
		if !inline || got.Insecure || got.ExecProvider != nil || got.AuthProvider != nil || got.Proxy != nil || got.Username != "" || got.Impersonate.UserName != "" {
			t.Fatalf("accepted %#v", got)
		}
		if !x509.NewCertPool().AppendCertsFromPEM(got.CAData) || (got.BearerToken == "") == (len(got.CertData) == 0) {
			t.Fatalf("no authority, or not exactly one kind of credentials")
		}
		again, err := Rewrite(data, here)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Load(again, here); err != nil {
			t.Fatal(err)
		}
	})
}

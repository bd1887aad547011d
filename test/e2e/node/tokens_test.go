//go:build e2e

package node

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv/expect"
)

const (
	tokenRegistryAddress = gateway + ":5001"
	tokenServerAddress   = gateway + ":5002"
	hostileAddress       = gateway + ":5003"
	// tokenServerName is the host of the token server. Only the proxy has the name.
	tokenServerName = "auth.outside.test"
	tokenService    = "tokens"
	// openRegistry is a registry that only has a plain mirror, and no credentials.
	openRegistry = "open.outside.test"

	tokenUser     = "machines"
	tokenPassword = "issue-me-a-token-6d1b"
	// tenant is a user of the namespace, with an image pull secret.
	tenant         = "tenant"
	tenantPassword = "secret-of-a-pod-93aa"
)

// tokenServer issues tokens as https://distribution.github.io/distribution/spec/auth/token/ and its OAuth2 variant specify. A user may
// pull from repositories below its own name, and everybody from those below `public`. It collects the users that ask for tokens.
type tokenServer struct {
	certificate tls.Certificate
	seen
}

// seen collects texts, each once.
type seen struct {
	mu    sync.Mutex
	texts []string
}

func (s *seen) add(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Contains(s.texts, text) {
		s.texts = append(s.texts, text)
	}
}

func (s *seen) sorted() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(slices.Values(s.texts))
}

func (s *tokenServer) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	service := r.FormValue("service")
	user, password, _ := r.BasicAuth()
	if r.Method == http.MethodPost {
		user, password = r.FormValue("username"), r.FormValue("password")
	}
	if r.Method == http.MethodPost && user == tenant { // as a server without the OAuth2 variant
		http.Error(out, "forms are not supported", http.StatusMethodNotAllowed)
		return
	}
	s.add(service + ": " + r.Method + " " + user)
	if user != "" && password != map[string]string{tokenUser: tokenPassword, tenant: tenantPassword}[user] {
		http.Error(out, "wrong user or password", http.StatusUnauthorized)
		return
	}
	var access []map[string]any
	for _, scope := range strings.Fields(strings.Join(r.Form["scope"], " ")) {
		name := strings.TrimSuffix(strings.TrimPrefix(scope, "repository:"), ":pull")
		if owner, _, _ := strings.Cut(name, "/"); owner == "public" || owner == user {
			access = append(access, map[string]any{"type": "repository", "name": name, "actions": []string{"pull"}})
		}
	}
	token, err := s.sign(map[string]any{
		"iss": tokenService, "aud": service, "sub": user, "access": access, "nbf": time.Now().Unix(), "exp": time.Now().Add(time.Minute).Unix(),
	})
	if err != nil {
		http.Error(out, err.Error(), http.StatusInternalServerError)
		return
	}
	_ = json.NewEncoder(out).Encode(map[string]string{"token": token, "access_token": token})
}

// sign returns a JSON Web Token with the certificate of the server.
func (s *tokenServer) sign(claims map[string]any) (string, error) {
	header, err := json.Marshal(map[string]any{"typ": "JWT", "alg": "ES256", "x5c": [][]byte{s.certificate.Certificate[0]}})
	if err != nil {
		return "", err
	}
	body, err := json.Marshal(claims)
	if err != nil {
		return "", err
	}
	token := base64.RawURLEncoding.EncodeToString(header) + "." + base64.RawURLEncoding.EncodeToString(body)
	hash := sha256.Sum256([]byte(token))
	a, b, err := ecdsa.Sign(rand.Reader, s.certificate.PrivateKey.(*ecdsa.PrivateKey), hash[:])
	if err != nil {
		return "", err
	}
	signature := make([]byte, 64)
	a.FillBytes(signature[:32])
	b.FillBytes(signature[32:])
	return token + "." + base64.RawURLEncoding.EncodeToString(signature), nil
}

// hostileRegistry sends its clients to the token server of the other registry. It collects the schemes with which they log in.
type hostileRegistry struct{ seen }

func (h *hostileRegistry) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	scheme, _, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	h.add(scheme)
	out.Header().Set("WWW-Authenticate", `Bearer realm="https://`+tokenServerName+`/token",service="hostile",scope="repository:`+tokenUser+`/preloaded:pull"`)
	out.WriteHeader(http.StatusUnauthorized)
}

// startTokens starts a registry that issues tokens, its token server, and the hostile registry.
func (o *outside) startTokens(w *testNetwork) {
	w.t.Helper()
	o.tokens.certificate = o.addedCertificate
	w.serve(tokenServerAddress, &o.addedCertificate, &o.tokens)
	w.serve(hostileAddress, &o.certificate, &o.hostile)
	o.runRegistry(w, "tokens", tokenRegistryAddress, `{token: {realm: "https://`+tokenServerName+`/token", service: `+tokenService+`, issuer: `+tokenService+
		`, rootcertbundle: `+o.dir+`/added.crt}}`)
}

// publishTokenImages copies the images of the registry into the one that issues tokens, for each of its users.
func (o *outside) publishTokenImages(t *testing.T) {
	t.Helper()
	const registry, repositories = "docker/registry/v2", "docker/registry/v2/repositories"
	from, to := filepath.Join(o.dir, "registry"), filepath.Join(o.dir, "tokens")
	for source, target := range map[string]string{
		registry + "/blobs": registry + "/blobs", repositories + "/team": repositories + "/" + tokenUser,
	} {
		expect.NoError(t, os.CopyFS(filepath.Join(to, target), os.DirFS(filepath.Join(from, source))))
	}
	for _, owner := range []string{tenant, "public"} {
		expect.NoError(t, os.Symlink(tokenUser, filepath.Join(to, repositories, owner)))
	}
}

const (
	// tokenPreloadedImage is in the configuration of the worker.
	tokenPreloadedImage = tokenRegistryAddress + "/" + tokenUser + "/preloaded:v1"
	// publicImage needs a token too, but no user.
	publicImage = openRegistry + "/public/preloaded:v1"
	// tokenMirroredImage is an image of a registry without credentials, whose mirror issues tokens.
	tokenMirroredImage = "tokens.outside.test/" + tokenUser + "/preloaded:v1"
	// bothImage and originImage are images of a registry whose mirror has other credentials. One is on the mirror, the other is not.
	bothImage   = "both.outside.test/" + tokenUser + "/preloaded:v1"
	originImage = "both.outside.test/team/preloaded:v1"
	// tenantImage is an image of which only the tenant gets a token.
	tenantImage  = tokenRegistryAddress + "/" + tenant + "/preloaded:v1"
	hostileImage = hostileAddress + "/" + tokenUser + "/preloaded:v1"
)

// tenantSecret is the image pull secret of the tenant for the registry that issues tokens.
func tenantSecret(t *testing.T) string {
	t.Helper()
	config, err := json.Marshal(map[string]any{"auths": map[string]any{
		"https://" + tokenRegistryAddress: map[string]string{"username": tenant, "password": tenantPassword},
	}})
	expect.NoError(t, err)
	return fmt.Sprintf("apiVersion: v1\nkind: Secret\nmetadata: {name: tenant}\ntype: kubernetes.io/dockerconfigjson\ndata: {.dockerconfigjson: %q}\n---\n",
		base64.StdEncoding.EncodeToString(config))
}

func withTenantSecret(pod string) string {
	return strings.Replace(pod, "spec:", "spec:\n  imagePullSecrets: [{name: tenant}]", 1)
}

// testTokens: registries that issue tokens get the credentials of the machine, of a mirror's own entry, of a pod, or none. A registry with
// the token server of another one gets no token of its users.
func testTokens(t *testing.T, o *outside, cp *host) {
	cp.apply(tenantSecret(t) + pullPod("issued", "worker", tokenPreloadedImage) + pullPod("public", "worker", publicImage) +
		pullPod("issued-mirror", "worker", tokenMirroredImage) + pullPod("issued-both", "worker", bothImage) + pullPod("origin", "worker", originImage) +
		withTenantSecret(pullPod("tenant", "worker", tenantImage)) + withTenantSecret(pullPod("hostile", "worker", hostileImage)))
	cp.mustKubectl("wait", "--for=condition=Ready", "pod/issued", "pod/public", "pod/issued-mirror", "pod/issued-both", "pod/origin", "pod/tenant", "--timeout=3m")
	untilPullFails(t, cp, "hostile", "401 Unauthorized")
	// containerd sends credentials of the kubelet as a form first, and those of its configuration as a header.
	want := []string{"hostile: GET ", "tokens: GET ", "tokens: GET " + tokenUser, "tokens: GET " + tenant, "tokens: POST " + tokenUser}
	if got := o.tokens.sorted(); !slices.Equal(got, want) {
		t.Errorf("the token server got %q, want %q", got, want)
	}
	if got := o.hostile.sorted(); !slices.Equal(got, []string{"", "Bearer"}) {
		t.Errorf("the hostile registry got the schemes %q", got)
	}
	cp.mustKubectl("delete", "secret/tenant", "pod/issued", "pod/public", "pod/issued-mirror", "pod/issued-both", "pod/origin", "pod/tenant", "pod/hostile", "--wait", "--grace-period=1")
}

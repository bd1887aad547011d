package config_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"

	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/internal/testenv"
)

// hosts contains the servers that clusterctl connects to.
var hosts = []string{"github.com", "api.github.com", "modules.example.org", "gitlab.example.org"}

// internet serves the release like GitHub, a Go module proxy and GitLab. It returns an environment with a proxy and a
// certificate authority, so that a program connects to this server instead of the internet.
func internet(t *testing.T) []string {
	t.Helper()
	ca, certificate := certificates(t)
	assets := http.FileServer(http.Dir(filepath.Join(dist, "assets")))
	serve := func(w http.ResponseWriter, r *http.Request, below string) {
		http.StripPrefix(strings.TrimSuffix(below, "/"), assets).ServeHTTP(w, r)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("modules.example.org/github.com/example/capstan/@v/list", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, releaseVersion)
	})
	mux.HandleFunc("github.com/example/capstan/releases/download/", func(w http.ResponseWriter, r *http.Request) {
		serve(w, r, "/example/capstan/releases/download/")
	})
	// requests for other data than downloads
	mux.HandleFunc("api.github.com/repos/example/capstan/releases/tags/"+releaseVersion, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"tag_name": %q, "assets": []}`, releaseVersion)
	})
	mux.HandleFunc("gitlab.example.org/api/v4/projects/{project}/packages/generic/capstan/{version}/{file}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("project") != "example/capstan" || r.Header.Get("Authorization") != "Bearer of-the-test" {
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		http.ServeFile(w, r, filepath.Join(dist, "assets", path.Base(r.PathValue("version")), path.Base(r.PathValue("file"))))
	})
	sites := httptest.NewUnstartedServer(mux)
	sites.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
	sites.StartTLS()
	t.Cleanup(sites.Close)

	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			http.Error(w, "only CONNECT", http.StatusMethodNotAllowed)
			return
		}
		tunnel(t, w, sites.Listener.Addr().String())
	}))
	t.Cleanup(proxy.Close)
	return []string{"HTTPS_PROXY=" + proxy.URL, "NO_PROXY=", "GOPROXY=https://modules.example.org", "SSL_CERT_FILE=" + ca, "GITLAB_ACCESS_TOKEN=of-the-test"}
}

func tunnel(t *testing.T, w http.ResponseWriter, to string) {
	t.Helper()
	back, err := net.Dial("tcp", to)
	if err != nil {
		t.Error(err)
		return
	}
	front, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		t.Error(err)
		return
	}
	if _, err := io.WriteString(front, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		t.Error(err)
	}
	go func() {
		_, _ = io.Copy(back, front)
		back.Close()
	}()
	go func() {
		_, _ = io.Copy(front, back)
		front.Close()
	}()
}

// certificates creates a certificate for the hosts and the file of its authority. The certificate is self-signed.
func certificates(t *testing.T) (ca string, certificate tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: hosts, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	ca = filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return ca, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// clusterctl runs the real clusterctl without the user's own configuration.
func clusterctl(t *testing.T, environment []string, args ...string) (string, error) {
	t.Helper()
	home := t.TempDir()
	cmd := exec.Command(filepath.Join(testenv.Root(), "bin", "clusterctl"), args...)
	cmd.Env = append([]string{"HOME=" + home, "XDG_CONFIG_HOME=" + home, "PATH=" + os.Getenv("PATH"), "CLUSTERCTL_DISABLE_VERSIONCHECK=true", "KUBECONFIG=/dev/null"}, environment...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("clusterctl %s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return out.String(), nil
}

// configuration returns a configuration with the providers' repositories below a URL.
func configuration(t *testing.T, url func(provider string) string) string {
	t.Helper()
	var text strings.Builder
	text.WriteString("providers:\n")
	for provider, kind := range kindOf {
		fmt.Fprintf(&text, "- name: capstan\n  type: %s\n  url: %s\n", kind, url(provider))
	}
	file := filepath.Join(t.TempDir(), "clusterctl.yaml")
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// CTL-01, CTL-02, CTL-10, CTL-15: the real clusterctl reads the release from all places: a folder, the assets of a
// GitHub release, and a GitLab generic package. Row MP-12.
func TestClusterctlReads_CTL02(t *testing.T) {
	environment := internet(t)
	for name, url := range map[string]func(provider string) string{
		"local": func(provider string) string {
			return filepath.Join(dist, "repository", clusterctlv1.ManifestLabel("capstan", kindOf[provider]), "latest", provider+"-components.yaml")
		},
		"github": func(provider string) string {
			return "https://github.com/example/capstan/releases/latest/" + provider + "-components.yaml"
		},
		"gitlab": func(provider string) string {
			return "https://gitlab.example.org/api/v4/projects/example%2Fcapstan/packages/generic/capstan/" + releaseVersion + "/" + provider + "-components.yaml"
		},
	} {
		t.Run(name, func(t *testing.T) {
			config := configuration(t, url)
			for provider := range kindOf {
				out, err := clusterctl(t, environment, "generate", "provider", "--config", config, "--"+provider, "capstan:"+releaseVersion)
				if err != nil {
					t.Fatal(err)
				}
				if got, err := manifest.Parse([]byte(out)); err != nil || len(got) != len(components(t, provider)) {
					t.Errorf("%s: %d objects, %v", provider, len(got), err)
				}
			}
			generate := []string{
				"generate", "cluster", "demo", "--config", config, "--infrastructure", "capstan:" + releaseVersion,
				"--kubernetes-version", "v1.36.3", "--target-namespace", "elsewhere",
			}
			for _, flavor := range []string{"", "cni", "ha", "machinepool", "topology"} {
				out, err := clusterctl(t, environment, append(generate, "--flavor", flavor)...)
				if err != nil {
					t.Errorf("%q: %v", flavor, err)
				}
				// The class is added to the output.
				if got := strings.Contains(out, "kind: ClusterClass\n"); got != (flavor == "topology") {
					t.Errorf("%q: with a class: %v", flavor, got)
				}
				if strings.Count(out, "namespace: elsewhere\n") < strings.Count(out, "\nkind: ") {
					t.Errorf("%q: not all objects are in the namespace:\n%s", flavor, out)
				}
			}
			// The error names a missing value.
			if _, err := clusterctl(t, environment, append(generate, "--flavor", "ipam")...); err == nil || !strings.Contains(err.Error(), "[CAPSTAN_MACHINE_CIDR] is not set") {
				t.Errorf("ipam: %v", err)
			}
			if _, err := clusterctl(t, append(environment, "CAPSTAN_MACHINE_CIDR=10.200.8.0/21"), append(generate, "--flavor", "ipam")...); err != nil {
				t.Error(err)
			}
			if _, err := clusterctl(t, environment, append(generate, "--flavor", "nonesuch")...); err == nil || !strings.Contains(err.Error(), "template-nonesuch.yaml") {
				t.Errorf("nonesuch: %v", err)
			}
		})
	}
}

// CTL-15: the configuration of the release contains all providers, including Cluster API core.
func TestClusterctlConfiguration_CTL15(t *testing.T) {
	out, err := clusterctl(t, nil, "config", "repositories", "--config", filepath.Join(dist, "clusterctl.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(out, dist) != len(kindOf)+1 {
		t.Errorf("want %d repositories in %s:\n%s", len(kindOf)+1, dist, out)
	}
	versions, err := os.ReadDir(filepath.Join(dist, "repository", "cluster-api"))
	if err != nil || len(versions) != 1 {
		t.Fatalf("%v, %v", versions, err)
	}
	core, err := clusterctl(t, nil, "generate", "provider", "--config", filepath.Join(dist, "clusterctl.yaml"), "--core", "cluster-api:"+versions[0].Name())
	if err != nil {
		t.Fatal(err)
	}
	if want := "image: registry.capstan.dev/cluster-api-controller:" + versions[0].Name() + "\n"; strings.Count(core, "image: ") != 1 || !strings.Contains(core, want) {
		t.Errorf("Cluster API core does not run %s", want)
	}
}

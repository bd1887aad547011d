package pid1

import (
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv/expect"
)

// TestCertificates: the status contains the leaf certificates of the services and the current ones of the kubelet. It changes
// when a certificate is renewed.
func TestCertificates(t *testing.T) {
	root, now := t.TempDir(), time.Now()
	dir, kubelet := filepath.Join(root, nodeconfig.PKIDir), filepath.Join(root, "/var/lib/kubelet/pki")
	expect.NoError(t, certfiles.EnsureAuthority(dir, "ca", "ca", now))
	write := func(name string, validity time.Duration) {
		t.Helper()
		_ = os.Remove(filepath.Join(dir, name+".crt"))
		_, err := certfiles.Leaf{Name: name, CA: "ca", Leaf: pki.Leaf{CommonName: name, Usages: pki.Client}}.Ensure(dir, validity, now)
		expect.NoError(t, err)
	}
	write("apiserver", time.Hour)
	write("clients/kube-proxy", time.Hour)
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "broken.crt"), []byte("x"), 0o600))
	for file, validity := range map[string]time.Duration{"kubelet-client-old.pem": time.Hour, "kubelet-client-new.pem": 2 * time.Hour} {
		pair, err := certfiles.Leaf{CA: "ca", Leaf: pki.Leaf{CommonName: "node", Usages: pki.Client}}.Issue(dir, validity, now)
		expect.NoError(t, err)
		expect.NoError(t, certfiles.WriteFile(filepath.Join(kubelet, file), pair))
	}
	expect.NoError(t, os.Symlink("kubelet-client-new.pem", filepath.Join(kubelet, "kubelet-client-current.pem")))

	m := &manager{log: slog.New(slog.DiscardHandler), changed: make(chan struct{})}
	lives := func() map[string]time.Duration {
		out := map[string]time.Duration{}
		for _, c := range m.bootstrap.Certificates {
			out[c.Name] = c.NotAfter.Sub(c.NotBefore) - pki.Backdate
		}
		return out
	}
	changes := func(want bool) {
		t.Helper()
		before := m.changed
		m.setCertificates(certificatesBelow(root))
		if changed := before != m.changed; changed != want {
			t.Errorf("watchers were woken: %v", changed)
		}
	}
	changes(true)
	want := map[string]time.Duration{"apiserver": time.Hour, "clients/kube-proxy": time.Hour, "kubelet-client": 2 * time.Hour}
	if got := lives(); !reflect.DeepEqual(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
	changes(false)
	write("clients/kube-proxy", 3*time.Hour)
	changes(true)
	want["clients/kube-proxy"] = 3 * time.Hour
	if got := lives(); !reflect.DeepEqual(got, want) {
		t.Errorf("after a renewal: found %v, want %v", got, want)
	}
	m.setBootstrap(initapi.Succeeded, "")
	if len(m.bootstrap.Certificates) != 3 {
		t.Error("a change of the bootstrap state removed the certificates")
	}
}

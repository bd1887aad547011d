package embedded

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/tools/clientcmd"
	certutil "k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
)

func testPKI(t *testing.T) (Layout, State, user) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test needs root to set the owners of folders")
	}
	l := Layout{Root: filepath.Join(t.TempDir(), "root")}
	s := State{PortBase: 20000}
	owner := user{12345, 12345}
	if err := ensurePKI(l, s, owner, time.Now()); err != nil {
		t.Fatal(err)
	}
	return l, s, owner
}

// Files of secrets have mode 0600 and belong to the component that uses them. Other components cannot read them.
func TestPKIModes(t *testing.T) {
	l, _, _ := testPKI(t)
	err := filepath.WalkDir(l.Root, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		secret := !strings.HasSuffix(path, ".crt")
		if secret && info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %s", path, info.Mode())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{l.Etcd(), l.Sockets(), l.Component(apiServer), l.Component(admin), l.Component(installer), l.Logs()} {
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v %v", dir, info.Mode(), err)
		}
	}
}

// TestPKIOfAnotherUser: after an installation of the box on a kept file system, the system user can have another id. It owns the files that
// the former id has owned, and no file behind a link.
func TestPKIOfAnotherUser(t *testing.T) {
	l, s, former := testPKI(t)
	outside, link := filepath.Join(t.TempDir(), "outside"), filepath.Join(l.Etcd(), "member", "link")
	kept := []string{filepath.Join(l.Etcd(), "member", "snap", "db"), l.AuditLog()}
	for _, path := range append(kept, outside) {
		expect.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)))
	}
	expect.NoError(t, os.Symlink(outside, link))
	for _, path := range append(kept, link, filepath.Dir(kept[0]), filepath.Dir(link)) {
		expect.NoError(t, os.Lchown(path, former.uid, former.gid))
	}
	before := owners(t, l.Root)
	now := user{former.uid + 1, former.gid + 1}
	expect.NoError(t, ensurePKI(l, s, now, time.Now()))
	for path, after := range owners(t, l.Root) {
		if want := map[user]user{former: now, {}: {}}[before[path]]; after != want {
			t.Errorf("%s belonged to %v, and now to %v", path, before[path], after)
		}
	}
	if got := owners(t, outside)[outside]; got != (user{}) {
		t.Errorf("a file outside of the folder belongs to %v", got)
	}
}

// owners returns the owner of each file.
func owners(t *testing.T, dir string) map[string]user {
	t.Helper()
	out := map[string]user{}
	expect.NoError(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		var stat unix.Stat_t
		err = errors.Join(err, unix.Lstat(path, &stat))
		out[path] = user{int(stat.Uid), int(stat.Gid)}
		return err
	}))
	return out
}

// RBAC applies to managers: no certificate of theirs is in a group that bypasses RBAC.
func TestPKIIdentities(t *testing.T) {
	l, _, _ := testPKI(t)
	for component, want := range map[string]string{
		coreManager: "system:serviceaccount:capi-system:capi-manager", manager: "system:serviceaccount:capstan-infrastructure-system:capstan-manager",
		controllerManager: "system:kube-controller-manager", admin: "capstan-admin",
	} {
		cert := loadCert(t, filepath.Join(l.Component(component), "client.crt"))
		if cert.Subject.CommonName != want {
			t.Errorf("the identity of %s is %s", component, cert.Subject.CommonName)
		}
		for _, group := range cert.Subject.Organization {
			if group == "system:masters" {
				t.Errorf("%s is in system:masters", component)
			}
		}
	}
	// etcd trusts its own authority: a client certificate of the API server is not valid for etcd.
	pool := x509.NewCertPool()
	pool.AddCert(loadCert(t, filepath.Join(l.PKI(), "etcd-ca.crt")))
	options := x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	if _, err := loadCert(t, filepath.Join(l.Component(installer), "client.crt")).Verify(options); err == nil {
		t.Error("etcd accepts a client certificate of the API server")
	}
	if _, err := loadCert(t, filepath.Join(l.Component(apiServer), "etcd-client.crt")).Verify(options); err != nil {
		t.Errorf("etcd refuses the API server: %v", err)
	}
}

func TestPKIRenewal(t *testing.T) {
	l, s, owner := testPKI(t)
	read := func() map[string]string {
		content := map[string]string{}
		for _, path := range []string{"ca.crt", "kube-apiserver/server.crt", "kube-apiserver/server.key", "kube-apiserver/service-account.key", "kube-apiserver/encryption.yaml", "admin/client.crt"} {
			data, err := os.ReadFile(filepath.Join(l.PKI(), path))
			if err != nil {
				t.Fatal(err)
			}
			content[path] = string(data)
		}
		data, err := os.ReadFile(l.AdminKubeconfig())
		if err != nil {
			t.Fatal(err)
		}
		content["kubeconfig"] = string(data)
		return content
	}
	first := read()
	if err := ensurePKI(l, s, owner, time.Now()); err != nil {
		t.Fatal(err)
	}
	for name, content := range read() {
		if content != first[name] {
			t.Errorf("%s changed without a reason", name)
		}
	}
	if err := ensurePKI(l, s, owner, time.Now().Add(leafValidity*2/3+time.Hour)); err != nil {
		t.Fatal(err)
	}
	for name, content := range read() {
		leaf := name == "kube-apiserver/server.crt" || name == "admin/client.crt" || name == "kubeconfig"
		if (content != first[name]) != leaf {
			t.Errorf("%s: renewed %v, want %v", name, content != first[name], leaf)
		}
	}
	// These certificates are not yet valid: a clock that was ahead created them.
	if err := ensurePKI(l, s, owner, time.Now()); err != nil {
		t.Fatal(err)
	}
	if c := loadCert(t, filepath.Join(l.Component(apiServer), "server.crt")); !pki.ValidAt(c, time.Now()) {
		t.Errorf("after the clock was set back: valid from %s", c.NotBefore)
	}
	// A damaged key is created again.
	if err := os.WriteFile(filepath.Join(l.Component(apiServer), "server.key"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ensurePKI(l, s, owner, time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := tls.LoadX509KeyPair(filepath.Join(l.Component(apiServer), "server.crt"), filepath.Join(l.Component(apiServer), "server.key")); err != nil {
		t.Errorf("the damaged key: %v", err)
	}
	// The kubeconfigs get a new port.
	s.PortBase = 20100
	if err := ensurePKI(l, s, owner, time.Now()); err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.LoadFromFile(l.AdminKubeconfig())
	if err != nil || config.Clusters["capstan"].Server != "https://127.0.0.1:20102" {
		t.Errorf("kubeconfig: %v %v", config.Clusters["capstan"], err)
	}
}

// TestPKIReissuedAuthority: a new certificate of an authority with its former key reaches the components. Their leaf certificates stay and
// are valid.
func TestPKIReissuedAuthority(t *testing.T) {
	l, s, owner := testPKI(t)
	server := filepath.Join(l.Component(apiServer), "server.crt")
	before := loadCert(t, server)
	for _, name := range authorities {
		former, err := ensureAuthority(l, name)
		if err != nil {
			t.Fatal(err)
		}
		made, err := pki.NewAuthority(former.Cert.Subject.CommonName, former.Key, time.Now().Add(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(l.PKI(), name+".crt"), pki.EncodeCert(made.Cert), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := ensurePKI(l, s, owner, time.Now()); err != nil {
		t.Fatal(err)
	}
	for file, copies := range map[string][]string{
		"ca.crt":             {"kube-apiserver/ca.crt", "kube-controller-manager/ca.crt"},
		"etcd-ca.crt":        {"etcd/ca.crt", "kube-apiserver/etcd-ca.crt"},
		"front-proxy-ca.crt": {"kube-apiserver/front-proxy-ca.crt"},
	} {
		want := loadCert(t, filepath.Join(l.PKI(), file))
		for _, name := range copies {
			if !loadCert(t, filepath.Join(l.PKI(), name)).Equal(want) {
				t.Errorf("%s is not the new certificate", name)
			}
		}
	}
	pool := x509.NewCertPool()
	pool.AddCert(loadCert(t, filepath.Join(l.PKI(), "ca.crt")))
	after := loadCert(t, server)
	if _, err := after.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: time.Now().Add(time.Hour)}); err != nil || !after.Equal(before) {
		t.Errorf("the certificate of the API server: the same: %v, %v", after.Equal(before), err)
	}
}

// A lost key is created again only if no data depends on it. This applies at a start and at the renewal of certificates.
func TestPKILostKey(t *testing.T) {
	l, s, owner := testPKI(t)
	keys := []string{
		filepath.Join(l.PKI(), "ca.crt"), filepath.Join(l.PKI(), "ca.key"), filepath.Join(l.PKI(), "etcd-ca.key"),
		filepath.Join(l.PKI(), "front-proxy-ca.key"), l.ServiceAccountKey(), l.EncryptionConfig(),
	}
	for _, data := range []bool{false, true} {
		if data {
			if err := os.Mkdir(filepath.Join(l.Etcd(), "member"), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		for _, path := range keys {
			kept := path + ".kept"
			if err := os.Rename(path, kept); err != nil {
				t.Fatal(err)
			}
			err := ensurePKI(l, s, owner, time.Now())
			_, missing := os.Stat(path)
			switch {
			case data && (err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "capstan restore")):
				t.Errorf("%s is lost and data exists: %v", path, err)
			case data && missing == nil:
				t.Errorf("%s is lost and data exists, but a new key was created", path)
			case !data && (err != nil || missing != nil):
				t.Errorf("%s is lost and no data exists: %v, %v", path, err, missing)
			case data:
				if err := os.Rename(kept, path); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if err := ensurePKI(l, s, owner, time.Now()); err != nil {
		t.Error(err)
	}
}

func loadCert(t *testing.T, path string) *x509.Certificate {
	t.Helper()
	certs, err := certutil.CertsFromFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return certs[0]
}

// An installation whose data is gone does not begin anew. It starts when the data is there again, and a new one starts without data.
func TestMissingData(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	expect.NoError(t, checkData(l))
	expect.NoError(t, os.WriteFile(l.hadData(), nil, 0o600))
	p := newPlane(l, State{}, Supervisor{})
	if err := p.makeComponents(t.Context()); err == nil || !strings.Contains(err.Error(), "expected the data of etcd in "+l.Etcd()+", found none") {
		t.Errorf("without data: %v", err)
	}
	if entries, err := os.ReadDir(l.Root); err != nil || len(entries) != 1 {
		t.Errorf("the start has made %v, %v", entries, err)
	}
	expect.NoError(t, os.MkdirAll(filepath.Join(l.Etcd(), "member"), 0o700))
	expect.NoError(t, checkData(l))
}

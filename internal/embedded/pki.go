package embedded

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	apiserverv1 "k8s.io/apiserver/pkg/apis/apiserver/v1"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/pki"
)

const (
	// leafValidity is the validity of leaf certificates. They are renewed after two thirds of it. Components reload the files.
	leafValidity = 365 * 24 * time.Hour
)

// authorities are the names of the certificate authorities, and of their files.
var authorities = []string{clusterAuthority, etcdAuthority, frontProxyAuthority}

const (
	clusterAuthority    = "ca"
	etcdAuthority       = "etcd-ca"
	frontProxyAuthority = "front-proxy-ca"
)

// authority is a certificate authority whose key only root can read.
type authority struct {
	pki.Authority
	certPEM []byte
}

// identity is the content of a leaf certificate.
type identity struct {
	name   string   // of the files: <name>.crt, <name>.key
	cn     string   // the user name
	groups []string // the user's groups
	usages []x509.ExtKeyUsage
	host   string // another name or IP address of a server, or empty
}

// serviceAccount returns the identity of a manager. Its user name is that of a service account, so that the role bindings of
// the providers apply without a change.
func serviceAccount(namespace, name string) identity {
	return identity{name: "client", cn: "system:serviceaccount:" + namespace + ":" + name, usages: pki.Client}
}

// user is the owner of a file.
type user struct{ uid, gid int }

// ensureAuthority loads a certificate authority. If it does not exist and etcd has no data, it creates one. The files belong
// to root.
func ensureAuthority(l Layout, name string) (*authority, error) {
	certPath, keyPath := filepath.Join(l.PKI(), name+".crt"), filepath.Join(l.PKI(), name+".key")
	for _, path := range []string{certPath, keyPath} {
		lost, err := missing(l, path)
		if err != nil {
			return nil, err
		}
		if !lost {
			continue
		}
		if err := makeAuthority(certPath, keyPath, "capstan-"+name); err != nil {
			return nil, err
		}
	}
	certPEM, err := os.ReadFile(certPath)
	if err != nil {
		return nil, err
	}
	cert, err := pki.ParseCert(certPEM)
	if err != nil {
		return nil, fmt.Errorf("expected a certificate in %s: %w", certPath, err)
	}
	keyPEM, err := os.ReadFile(keyPath)
	if err != nil {
		return nil, damaged(keyPath, err)
	}
	key, err := pki.ParseKey(keyPEM)
	if err != nil {
		return nil, damaged(keyPath, err)
	}
	return &authority{pki.Authority{Cert: cert, Key: key}, certPEM}, nil
}

func makeAuthority(certPath, keyPath, commonName string) error {
	key, err := pki.NewKey()
	if err != nil {
		return err
	}
	made, err := pki.NewAuthority(commonName, key, time.Now())
	if err != nil {
		return err
	}
	if err := writeKey(keyPath, key, user{os.Getuid(), os.Getgid()}); err != nil {
		return err
	}
	return atomicfile.WriteFile(certPath, pki.EncodeCert(made.Cert), 0o644)
}

// missing reports whether a file with a key has to be created. If etcd has data, a missing key is an error: with a new key the
// Secrets would be unreadable, or clients that trust the old key would be disconnected.
func missing(l Layout, path string) (bool, error) {
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	switch has, err := hasData(l); {
	case err != nil:
		return false, err
	case has:
		return false, fmt.Errorf("expected %s, which the data in %s needs, found no such file: put the file back, or restore a backup with `capstan restore ARCHIVE --replace`; Capstan creates a new key only in an installation without data", path, l.Etcd())
	}
	return true, nil
}

// checkData refuses the start of an installation whose data is gone, for example because its file system is not mounted. Etcd would begin
// anew, and backups of the empty plane would replace the good ones.
func checkData(l Layout) error {
	has, err := hasData(l)
	if has || err != nil || !atomicfile.Exists(l.hadData()) {
		return err
	}
	return fmt.Errorf("expected the data of etcd in %s, found none: mount its file system, or restore a backup with `capstan restore ARCHIVE --replace`; to begin without data, remove the plane with `capstan down`", l.Etcd())
}

// recordData records that etcd has had the objects of the plane, once for an installation.
func recordData(l Layout) error {
	if atomicfile.Exists(l.hadData()) {
		return nil
	}
	return atomicfile.WriteFile(l.hadData(), nil, 0o600)
}

// hasData reports whether etcd has data.
func hasData(l Layout) (bool, error) {
	_, err := os.Stat(filepath.Join(l.Etcd(), "member"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// ensureLeaf creates <dir>/<name>.crt and .key, unless the certificate is signed by this authority and not due for renewal.
func (a *authority) ensureLeaf(dir string, id identity, owner user, now time.Time) error {
	certPath, keyPath := filepath.Join(dir, id.name+".crt"), filepath.Join(dir, id.name+".key")
	if a.keeps(certPath, keyPath, id, now) {
		return nil
	}
	leaf := pki.Leaf{CommonName: id.cn, Organization: id.groups, Usages: id.usages}
	if id.usages[0] == x509.ExtKeyUsageServerAuth {
		leaf.DNSNames = []string{"localhost"}
		leaf.IPs = []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	if id.host != "" {
		leaf = leaf.For(id.host)
	}
	key, err := ensureLeafKey(keyPath, owner)
	if err != nil {
		return err
	}
	made, err := a.Sign(leaf, key.Public(), leafValidity, now)
	if err != nil {
		return err
	}
	return atomicfile.WriteFileAs(certPath, pki.EncodeCert(made), 0o644, owner.uid, owner.gid)
}

// ensureLeafKey returns the key of a leaf certificate. It creates one if there is none or if it is damaged. A renewal keeps the
// key. Otherwise a component that reads the files during a renewal could get a key that does not match the certificate.
func ensureLeafKey(path string, owner user) (crypto.Signer, error) {
	if data, err := os.ReadFile(path); err == nil {
		if key, err := pki.ParseKey(data); err == nil {
			return key, nil
		}
	}
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	return key, writeKey(path, key, owner)
}

// keeps reports whether a certificate and its key are still usable.
func (a *authority) keeps(certPath, keyPath string, id identity, now time.Time) bool {
	pair, err := tls.LoadX509KeyPair(certPath, keyPath)
	if err != nil {
		return false
	}
	cert := pair.Leaf
	return cert.CheckSignatureFrom(a.Cert) == nil && cert.Subject.CommonName == id.cn && (id.host == "" || cert.VerifyHostname(id.host) == nil) && pki.ValidAt(cert, now) && now.Before(pki.RenewAt(cert))
}

func writeKey(path string, key crypto.Signer, owner user) error {
	data, err := pki.EncodeKey(key)
	if err != nil {
		return err
	}
	return atomicfile.WriteFileAs(path, data, 0o600, owner.uid, owner.gid)
}

// encryptionConfig returns the configuration that makes API servers encrypt Secrets in etcd.
func encryptionConfig() ([]byte, error) {
	key := make([]byte, 32)
	if _, err := rand.Read(key); err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, `apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets]
  providers:
  - secretbox:
      keys:
      - name: key1
        secret: %s
  - identity: {}
`, base64.StdEncoding.EncodeToString(key)), nil
}

func checkKey(data []byte) error {
	_, err := pki.ParseKey(data)
	return err
}

// checkEncryptionConfig detects a damaged file. The API server validates its content.
func checkEncryptionConfig(data []byte) error {
	var config apiserverv1.EncryptionConfiguration
	if err := yaml.UnmarshalStrict(data, &config); err != nil {
		return err
	}
	if len(config.Resources) == 0 || len(config.Resources[0].Providers) < 2 {
		return errors.New("it contains no key, or is truncated")
	}
	return nil
}

// damaged is the error for a damaged key, which cannot be created again.
func damaged(path string, err error) error {
	return fmt.Errorf("the key in %s cannot be read: %w: put the file back, or restore a backup with `capstan restore ARCHIVE --replace`", path, err)
}

// ensurePKI creates all certificates, keys and kubeconfigs of the installation that are missing or due for renewal.
func ensurePKI(l Layout, s State, owner user, now time.Time) error {
	if err := ensureDirs(l, owner); err != nil {
		return err
	}
	cluster, err := ensureAuthority(l, clusterAuthority)
	if err != nil {
		return err
	}
	etcdCA, err := ensureAuthority(l, etcdAuthority)
	if err != nil {
		return err
	}
	// The API server forwards the requests for logs and shells of machines to the manager. It proves itself with a certificate of
	// an authority that signs nothing else.
	frontProxy, err := ensureAuthority(l, frontProxyAuthority)
	if err != nil {
		return err
	}
	for _, leaf := range leaves(s, cluster, etcdCA, frontProxy, owner) {
		if err := leaf.by.ensureLeaf(l.Component(leaf.component), leaf.id, leaf.owner, now); err != nil {
			return err
		}
	}
	if err := ensureOnce(l, l.ServiceAccountKey(), owner, checkKey, pki.NewEncodedKey); err != nil {
		return err
	}
	if err := ensureOnce(l, l.EncryptionConfig(), owner, checkEncryptionConfig, encryptionConfig); err != nil {
		return err
	}
	if err := ensureContent(l.auditPolicy(), []byte(auditPolicy), 0o600, owner); err != nil {
		return err
	}
	if err := ensureTrust(l, cluster, etcdCA, frontProxy, owner); err != nil {
		return err
	}
	return ensureKubeconfigs(l, s, cluster, owner)
}

// removeTemporary removes incomplete files of a plane that was killed. Some contain keys. Nothing else writes to these folders while a plane
// starts.
func removeTemporary(l Layout) error {
	components, err := os.ReadDir(l.PKI())
	if err := atomicfile.IgnoreMissing(err); err != nil {
		return err
	}
	err = errors.Join(atomicfile.RemoveTemporary(l.Root), atomicfile.RemoveTemporary(l.PKI()))
	for _, c := range components {
		if c.IsDir() {
			err = errors.Join(err, atomicfile.RemoveTemporary(l.Component(c.Name())))
		}
	}
	return err
}

// leaf is a leaf certificate of a component: its authority, its content, and the owner of its files.
type leaf struct {
	by        *authority
	component string
	id        identity
	owner     user
}

// leaves returns the leaf certificates of the management plane.
func leaves(s State, cluster, etcdCA, frontProxy *authority, owner user) []leaf {
	root := user{os.Getuid(), os.Getgid()}
	return []leaf{
		{etcdCA, etcd, identity{name: "server", cn: "etcd", usages: pki.Both}, owner},
		{etcdCA, apiServer, identity{name: "etcd-client", cn: "kube-apiserver", usages: pki.Client}, owner},
		{cluster, apiServer, identity{name: "server", cn: "kube-apiserver", usages: pki.Server, host: s.apiHost()}, owner},
		{frontProxy, apiServer, identity{name: frontProxyClient, cn: frontProxyClient, usages: pki.Client}, owner},
		{cluster, controllerManager, identity{name: "client", cn: "system:kube-controller-manager", usages: pki.Client}, owner},
		{cluster, controllerManager, identity{name: "server", cn: "kube-controller-manager", usages: pki.Server}, owner},
		{cluster, coreManager, serviceAccount(coreNamespace, coreServiceAccount), owner},
		{cluster, coreManager, identity{name: "tls", cn: "capi-webhook", usages: pki.Server}, owner},
		{cluster, manager, serviceAccount(managerNamespace, managerServiceAccount), owner},
		{cluster, manager, identity{name: "tls", cn: "capstan-webhook", usages: pki.Server, host: accessService + "." + managerNamespace + ".svc"}, owner},
		{cluster, admin, identity{name: "client", cn: "capstan-admin", groups: []string{adminGroup}, usages: pki.Client}, root},
		// The only user that needs no role. It creates the binding of the group above.
		{cluster, installer, identity{name: "client", cn: "capstan-installer", groups: []string{"system:masters"}, usages: pki.Client}, root},
	}
}

// ensureTrust writes the authorities that components trust. These are copies, because only root can enter the folder of the
// authorities.
func ensureTrust(l Layout, cluster, etcdCA, frontProxy *authority, owner user) error {
	for component, pem := range map[string][]byte{etcd: etcdCA.certPEM, apiServer: cluster.certPEM, controllerManager: cluster.certPEM, coreManager: cluster.certPEM, manager: cluster.certPEM} {
		if err := ensureContent(filepath.Join(l.Component(component), "ca.crt"), pem, 0o644, owner); err != nil {
			return err
		}
	}
	for name, pem := range map[string][]byte{"etcd-ca.crt": etcdCA.certPEM, "front-proxy-ca.crt": frontProxy.certPEM} {
		if err := ensureContent(filepath.Join(l.Component(apiServer), name), pem, 0o644, owner); err != nil {
			return err
		}
	}
	return nil
}

func ensureDirs(l Layout, owner user) error {
	for _, d := range []struct {
		path  string
		mode  os.FileMode
		owner user
	}{
		{l.Root, 0o711, user{0, 0}},
		{l.PKI(), 0o711, user{0, 0}},
		{l.Logs(), 0o700, user{0, 0}},
		{l.Bin(), 0o711, user{0, 0}},
		{l.Etcd(), 0o700, owner},
		{l.Sockets(), 0o700, owner},
		{l.Audit(), 0o700, owner},
		{l.Component(etcd), 0o700, owner},
		{l.Component(apiServer), 0o700, owner},
		{l.Component(controllerManager), 0o700, owner},
		{l.Component(coreManager), 0o700, owner},
		{l.Component(manager), 0o700, owner},
		{l.Component(admin), 0o700, user{0, 0}},
		{l.Component(installer), 0o700, user{0, 0}},
	} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return err
		}
		if err := errors.Join(os.Chmod(d.path, d.mode), d.owner.take(d.path)); err != nil {
			return err
		}
	}
	return nil
}

// take gives a folder to its user. A box that is installed again on a kept file system can give its system user another id, so the content
// of a folder follows. Folders of root contain those of others.
func (u user) take(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if have := info.Sys().(*syscall.Stat_t); int(have.Uid) == u.uid && int(have.Gid) == u.gid {
		return nil
	}
	if u.uid == 0 {
		return os.Chown(dir, u.uid, u.gid)
	}
	return u.takeTree(dir)
}

// takeTree gives a folder with its content to the user, the folder itself last: an interrupted take is repeated. No link leads out of the
// folder, because the user of the former id can write to it.
func (u user) takeTree(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	var names []string
	if err := fs.WalkDir(root.FS(), ".", func(name string, _ fs.DirEntry, err error) error {
		names = append(names, name)
		return err
	}); err != nil {
		return err
	}
	for _, name := range slices.Backward(names) {
		if err := root.Lchown(name, u.uid, u.gid); err != nil {
			return err
		}
	}
	return nil
}

// ensureKubeconfigs writes a kubeconfig per client. The kubeconfigs of components contain paths; the one for users contains
// the certificates.
func ensureKubeconfigs(l Layout, s State, ca *authority, owner user) error {
	server := fmt.Sprintf("https://127.0.0.1:%d", s.port(portAPIServer))
	for component, owner := range map[string]user{controllerManager: owner, coreManager: owner, manager: owner, installer: {os.Getuid(), os.Getgid()}} {
		dir := l.Component(component)
		config := kubeconfig(component, clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca.certPEM},
			clientcmdapi.AuthInfo{ClientCertificate: filepath.Join(dir, "client.crt"), ClientKey: filepath.Join(dir, "client.key")})
		if err := ensureKubeconfig(l.Kubeconfig(component), config, owner); err != nil {
			return err
		}
	}
	cert, err := os.ReadFile(filepath.Join(l.Component(admin), "client.crt"))
	if err != nil {
		return err
	}
	key, err := os.ReadFile(filepath.Join(l.Component(admin), "client.key"))
	if err != nil {
		return err
	}
	config := kubeconfig("capstan", clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca.certPEM},
		clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key})
	return ensureKubeconfig(l.AdminKubeconfig(), config, user{os.Getuid(), os.Getgid()})
}

func kubeconfig(name string, cluster clientcmdapi.Cluster, auth clientcmdapi.AuthInfo) pki.Kubeconfig {
	return pki.Kubeconfig{ClusterName: name, UserName: name, ContextName: name, Cluster: cluster, User: auth}
}

func ensureKubeconfig(path string, config pki.Kubeconfig, owner user) error {
	data, err := config.Encode()
	if err != nil {
		return err
	}
	return ensureContent(path, data, 0o600, owner)
}

// ensureContent writes a file unless it already has the content.
func ensureContent(path string, data []byte, mode os.FileMode, owner user) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, data) {
		return nil
	}
	return atomicfile.WriteFileAs(path, data, mode, owner.uid, owner.gid)
}

// ensureOnce writes the file of a key if it does not exist and etcd has no data. A damaged file is an error.
func ensureOnce(l Layout, path string, owner user, check func([]byte) error, generate func() ([]byte, error)) error {
	lost, err := missing(l, path)
	if err != nil {
		return err
	}
	if !lost {
		data, err := os.ReadFile(path)
		if err == nil {
			err = check(data)
		}
		if err != nil {
			return damaged(path, err)
		}
		return nil
	}
	data, err := generate()
	if err != nil {
		return err
	}
	return atomicfile.WriteFileAs(path, data, 0o600, owner.uid, owner.gid)
}

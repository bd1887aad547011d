package provision

import (
	"context"
	"crypto/x509"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go4.org/netipx"
	"golang.org/x/sync/errgroup"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

const (
	caFile         = nodeconfig.PKIDir + "/ca.crt"
	kubernetesDir  = "/etc/kubernetes"
	kubeletPKIDir  = "/var/lib/kubelet/pki"
	kubeletCurrent = kubeletPKIDir + "/kubelet-client-current.pem"
	// clientDir below PKIDir holds the client certificates of kubeconfigs.
	clientDir = "clients"

	// AgentControlPlaneGroup is the additional group of the node agents on control plane machines. Its members write the
	// EndpointSlices of DNS and of metrics-server.
	AgentControlPlaneGroup = "capstan:control-plane-agents"

	metricsServerUser = "capstan:metrics-server"
	// metricsServerHost is the name that API servers verify.
	metricsServerHost = "metrics-server.kube-system.svc"

	// controllerManagerSAKey is a copy of sa.key: no other user can read a key of the API server's.
	controllerManagerSAKey = nodeconfig.PKIDir + "/controller-manager-sa.key"
)

// leaves returns all certificates that a control plane machine signs for itself. `node agent` renews them.
func (n *node) leaves() []certfiles.Leaf {
	all := n.componentLeaves()
	if n.ControlPlane.ExternalEtcd == nil {
		all = append(all, n.etcdLeaves()...)
	}
	for i := range all {
		all[i].Algorithm = n.algorithm()
	}
	return all
}

func (n *node) componentLeaves() []certfiles.Leaf {
	client := func(name, user string, groups ...string) certfiles.Leaf {
		return certfiles.Leaf{Name: clientDir + "/" + name, CA: "ca", Leaf: pki.Leaf{CommonName: user, Organization: groups, Usages: pki.Client}}
	}
	local, localIPs := n.localNames()
	leaves := []certfiles.Leaf{
		{Name: "apiserver", CA: "ca", Leaf: pki.Leaf{CommonName: "kube-apiserver", DNSNames: n.apiServerNames(), IPs: n.apiServerIPs(), Usages: pki.Server}},
		{Name: "apiserver-kubelet-client", CA: "ca", Leaf: pki.Leaf{CommonName: "kube-apiserver-kubelet-client", Usages: pki.Client}},
		{Name: "front-proxy-client", CA: "front-proxy-ca", Leaf: pki.Leaf{CommonName: "front-proxy-client", Usages: pki.Client}},
		{Name: "components", CA: "ca", Leaf: pki.Leaf{CommonName: "localhost", DNSNames: local[:1], IPs: localIPs[:2], Usages: pki.Server}},
		{Name: "scheduler", CA: "ca", Leaf: pki.Leaf{CommonName: "localhost", DNSNames: local[:1], IPs: localIPs[:2], Usages: pki.Server}},
		client("admin", "kubernetes-admin", "system:masters"),
		client("controller-manager", "system:kube-controller-manager"),
		client("scheduler", "system:kube-scheduler"),
		client("kube-proxy", nodeconfig.KubeProxyUser),
		client("coredns", "capstan:coredns"),
		client("node-agent", nodeconfig.AgentUserPrefix+n.name, nodeconfig.AgentGroup, AgentControlPlaneGroup),
	}
	if n.ControlPlane.MetricsServer {
		leaves = append(leaves, client("metrics-server", metricsServerUser), certfiles.Leaf{Name: "metrics-server", CA: "ca", Leaf: pki.Leaf{
			CommonName: metricsServerHost, DNSNames: []string{metricsServerHost}, IPs: n.netIPs()[:1], Usages: pki.Server,
		}})
	}
	return leaves
}

func (n *node) etcdLeaves() []certfiles.Leaf {
	local, localIPs := n.localNames()
	etcd := func(name string, usages []x509.ExtKeyUsage) certfiles.Leaf {
		return certfiles.Leaf{Name: "etcd/" + name, CA: "etcd/ca", Leaf: pki.Leaf{CommonName: n.name, DNSNames: local, IPs: localIPs, Usages: usages}}
	}
	return []certfiles.Leaf{
		etcd("server", pki.Both), etcd("peer", pki.Both),
		{Name: "etcd/healthcheck-client", CA: "etcd/ca", Leaf: pki.Leaf{CommonName: "kube-etcd-healthcheck-client", Usages: pki.Client}},
		{Name: "apiserver-etcd-client", CA: "etcd/ca", Leaf: pki.Leaf{CommonName: "kube-apiserver-etcd-client", Usages: pki.Client}},
	}
}

func (n *node) localNames() ([]string, []net.IP) {
	return []string{"localhost", n.name}, append([]net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}, n.netIPs()...)
}

func (n *node) netIPs() []net.IP {
	var ips []net.IP
	for _, ip := range n.ips {
		ips = append(ips, ip.AsSlice())
	}
	return ips
}

func (n *node) apiServerNames() []string {
	names := []string{"localhost", n.name, "kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc." + n.Network.ServiceDomain}
	for _, name := range n.extraSANs() {
		if net.ParseIP(name) == nil {
			names = append(names, name)
		}
	}
	return unique(names)
}

// apiServerIPs returns the IP addresses in the API server's certificate: those of the machine, the first of each
// Service network, and those in certSANs.
func (n *node) apiServerIPs() []net.IP {
	texts := append([]string{"127.0.0.1", "::1"}, n.ipStrings()...)
	for _, cidr := range n.Network.ServiceCIDRs {
		texts = append(texts, firstIP(cidr).String())
	}
	var ips []net.IP
	for _, text := range unique(append(texts, n.extraSANs()...)) {
		if ip := net.ParseIP(text); ip != nil {
			ips = append(ips, ip)
		}
	}
	return ips
}

func (n *node) extraSANs() []string {
	host, _, _ := net.SplitHostPort(n.Endpoint)
	return append([]string{host}, n.ControlPlane.CertSANs...)
}

// firstIP returns the first usable address of a network, which is that of the Service `kubernetes`.
func firstIP(cidr string) netip.Addr {
	prefix, err := netip.ParsePrefix(cidr)
	if err != nil {
		return netip.Addr{} // Load has validated it
	}
	return netipx.RangeOfPrefix(prefix).From().Next()
}

func unique(in []string) []string {
	seen := map[string]bool{}
	var out []string
	for _, s := range in {
		if !seen[s] {
			seen[s] = true
			out = append(out, s)
		}
	}
	return out
}

func (n *node) validity() time.Duration {
	return time.Duration(n.ControlPlane.CertificateValidityDays) * 24 * time.Hour
}

func (n *node) algorithm() pki.Algorithm { return pki.Algorithm(n.ControlPlane.EncryptionAlgorithm) }

// writeCertificates creates or renews all leaves. It also signs the kubelet's first client certificate, because the
// machine has the CA's key. The kubelet renews that certificate itself.
func (n *node) writeCertificates() error {
	writes := []func() error{writeSigningCA, copyServiceAccountKey, n.writeKubeletCertificate}
	for _, leaf := range n.leaves() {
		writes = append(writes, func() error {
			_, err := leaf.Ensure(nodeconfig.PKIDir, n.validity(), time.Now())
			return err
		})
	}
	return atomicfile.Together(writes...)
}

func (n *node) writeKubeletCertificate() error {
	if kubeletCertificateValid() {
		return nil
	}
	leaf := certfiles.Leaf{Name: "kubelet-client", CA: "ca", Leaf: pki.Leaf{CommonName: nodeconfig.NodeUserPrefix + n.name, Organization: []string{nodeconfig.NodesGroup}, Usages: pki.Client, Algorithm: n.algorithm()}}
	pair, err := leaf.Issue(nodeconfig.PKIDir, n.validity(), time.Now())
	if err != nil {
		return err
	}
	return kube.LinkCurrent(kubeletPKIDir, "kubelet-client", pair)
}

// writeSigningCA writes only the signing certificate, the first one of ca.crt.
func writeSigningCA() error {
	authority, err := pki.ReadCert(caFile)
	if err != nil {
		return fmt.Errorf("the CA that the bootstrap data writes: %w", err)
	}
	return certfiles.WriteFile(nodeconfig.SigningCAPath, pki.EncodeCert(authority))
}

func copyServiceAccountKey() error {
	key, err := os.ReadFile(nodeconfig.PKIDir + "/sa.key")
	if err != nil {
		return fmt.Errorf("the key of service accounts that the bootstrap data writes: %w", err)
	}
	return certfiles.WriteFile(controllerManagerSAKey, key)
}

// publish makes certificates readable for all users, because bootstrap data may write them readable for root only.
func publish(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return fs.WalkDir(root.FS(), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(name) != ".crt" {
			return err
		}
		return root.Chmod(name, 0o644)
	})
}

// kubeletCertificateValid reports whether the kubelet has a valid certificate.
func kubeletCertificateValid() bool { return validNow(kubeletCurrent) }

func validNow(path string) bool {
	c, err := pki.ReadCert(path)
	return err == nil && pki.ValidAt(c, time.Now())
}

func clientFiles(name string) kube.Credential {
	base := filepath.Join(nodeconfig.PKIDir, clientDir, name)
	return kube.Credential{CertFile: base + ".crt", KeyFile: base + ".key"}
}

// kubeconfigs by the path of their client certificate below clientDir.
var kubeconfigs = map[string]string{
	"admin":              kubernetesDir + "/admin.conf",
	"controller-manager": kubernetesDir + "/controller-manager.conf",
	"scheduler":          kubernetesDir + "/scheduler.conf",
	"kube-proxy":         kubernetesDir + "/kube-proxy.conf",
	"coredns":            kubernetesDir + "/coredns.conf",
	"metrics-server":     kubernetesDir + "/metrics-server.conf",
	"node-agent":         nodeconfig.AgentKubeconfig,
}

func (n *node) writeControlPlaneKubeconfigs() error {
	writes := []func() error{n.writeKubeletKubeconfig}
	for _, name := range slices.Sorted(maps.Keys(kubeconfigs)) {
		writes = append(writes, func() error { return n.writeKubeconfig(name, kubeconfigs[name]) })
	}
	return atomicfile.Together(writes...)
}

func (n *node) writeKubeconfig(name, path string) error {
	return kube.WriteKubeconfig(path, n.ClusterName, n.server(), caFile, name, clientFiles(name))
}

func (n *node) writeKubeletKubeconfig() error {
	pair := kube.Credential{CertFile: kubeletCurrent, KeyFile: kubeletCurrent}
	return kube.WriteKubeconfig(nodeconfig.KubeletKubeconfig, n.ClusterName, n.server(), caFile, "kubelet", pair)
}

// joinKubelet requests the kubelet's client certificate from the cluster (TLS bootstrap). The kubelet could do that
// itself, but here it happens while containerd starts.
func (n *node) joinKubelet(ctx context.Context, client dynamic.Interface) error {
	pair := kubeletPair{dir: kubeletPKIDir, name: "kubelet-client"}
	if !kubeletCertificateValid() {
		request := kube.Request{
			Name: "capstan-kubelet", Signer: certificatesv1.KubeAPIServerClientKubeletSignerName, KeyFile: pair.nextKey(),
			CommonName: nodeconfig.NodeUserPrefix + n.name, Organization: []string{nodeconfig.NodesGroup},
		}
		certificate, err := kube.RequestCertificate(ctx, client, request)
		if err != nil {
			return err
		}
		if err := pair.store(certificate); err != nil {
			return err
		}
	}
	if err := pair.forgetKey(); err != nil {
		return err
	}
	return n.writeKubeletKubeconfig()
}

// kubeletPair is a certificate of the kubelet with its key, in the folder of the kubelet.
type kubeletPair struct{ dir, name string }

func (p kubeletPair) current() string { return filepath.Join(p.dir, p.name+"-current.pem") }

// nextKey is the key of the certificate that is requested.
func (p kubeletPair) nextKey() string { return filepath.Join(p.dir, p.name+"-next.key") }

// store stores the requested certificate with its key.
func (p kubeletPair) store(certificate []byte) error {
	key, err := os.ReadFile(p.nextKey())
	if err != nil {
		return err
	}
	return kube.LinkCurrent(p.dir, p.name, append(certificate, key...))
}

// replace is store for a kubelet that has read its certificate.
func (p kubeletPair) replace(certificate []byte, restarts restartRecord) error {
	if err := restarts.require(); err != nil {
		return err
	}
	return p.store(certificate)
}

// forgetKey removes the key of a request after the certificate was stored, also by a process that was killed then: each request has a new
// key.
func (p kubeletPair) forgetKey() error { return atomicfile.Remove(p.nextKey()) }

// joinClients requests the certificates of kube-proxy and the node agent. The control plane provider approves them.
func (n *node) joinClients(ctx context.Context, client dynamic.Interface) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, request := range clientRequests(n.NodeConfiguration, n.name) {
		group.Go(func() error {
			files := clientFiles(request.Name)
			if !validNow(files.CertFile) {
				if err := kube.EnsureCertificate(ctx, client, request.Request, files.CertFile); err != nil {
					return err
				}
			}
			return n.writeKubeconfig(request.Name, kubeconfigs[request.Name])
		})
	}
	return group.Wait()
}

// ClientRequest is a client certificate that a worker requests.
type ClientRequest struct {
	// Name is the name of the file in clientDir.
	Name string
	kube.Request
	CertFile string
}

// clientRequests are the certificates that a worker requests and renews in addition to the kubelet's.
func clientRequests(config *nodeconfig.NodeConfiguration, nodeName string) []ClientRequest {
	request := func(name, user string, groups ...string) ClientRequest {
		return ClientRequest{name, kube.Request{
			Name: "capstan-" + name, Signer: certificatesv1.KubeAPIServerClientSignerName, KeyFile: clientFiles(name).KeyFile, CommonName: user, Organization: groups,
		}, clientFiles(name).CertFile}
	}
	var requests []ClientRequest
	if config.Network.PodNetwork == nodeconfig.PodNetworkRoutes {
		requests = append(requests, request("node-agent", nodeconfig.AgentUserPrefix+nodeName, nodeconfig.AgentGroup))
	}
	if config.Network.KubeProxy == nodeconfig.KubeProxyNFTables {
		requests = append(requests, request("kube-proxy", nodeconfig.KubeProxyUser))
	}
	return requests
}

// forgetToken removes the used bootstrap token from the node's configuration.
func (n *node) forgetToken() error {
	if n.BootstrapToken == "" {
		return nil
	}
	config := *n.NodeConfiguration
	config.BootstrapToken = ""
	data, err := yaml.Marshal(config)
	if err != nil {
		return err
	}
	return certfiles.WriteFile(nodeconfig.Path, data)
}

package provision

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
)

// tlsMinVersion and cipherSuites of the API server and the kubelet: forward secrecy and authenticated encryption
// only. They are those of TLS 1.2; those of TLS 1.3 cannot be turned off.
const tlsMinVersion = "VersionTLS12"

var cipherSuites = []string{
	"TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
	"TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
	"TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305", "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
}

type args []nodeconfig.Arg

func arg(name, value string) nodeconfig.Arg { return nodeconfig.Arg{Name: name, Value: value} }

// with returns the command line: the defaults that the user does not override, then the user's arguments in order. An
// argument with a list of values can occur several times.
func (defaults args) with(program string, extra []nodeconfig.Arg) []string {
	command := []string{program}
	for _, a := range defaults {
		if !slices.ContainsFunc(extra, func(e nodeconfig.Arg) bool { return e.Name == a.Name }) {
			command = append(command, "--"+a.Name+"="+a.Value)
		}
	}
	for _, e := range extra {
		command = append(command, "--"+e.Name+"="+e.Value)
	}
	return command
}

// valueOf returns the value of the last occurrence of an argument in a command line.
func valueOf(command []string, name string) string {
	value := ""
	for _, a := range command {
		if v, found := strings.CutPrefix(a, "--"+name+"="); found {
			value = v
		}
	}
	return value
}

// checkArguments refuses arguments that conflict with those that Capstan sets.
func (n *node) checkArguments() error {
	errs := n.CheckArguments()
	if _, refused := n.Node.KubeletLabels(); len(refused) > 0 {
		errs = append(errs, fmt.Errorf("node labels %s: a kubelet must not set these on its own Node; "+
			"put them on the Machine, where Cluster API allows them", strings.Join(refused, ", ")))
	}
	for _, taint := range n.Node.Taints {
		if _, err := parseTaint(taint); err != nil {
			errs = append(errs, err)
		}
	}
	for _, a := range n.Kubelet.ExtraArgs {
		if a.Name == "provider-id" && n.Node.ProviderID != "" && a.Value != n.Node.ProviderID { // Cluster API would never find the Node.
			errs = append(errs, fmt.Errorf("kubelet argument provider-id: expected %s, which is the provider id of the machine, found %q; "+
				"leave it out", n.Node.ProviderID, a.Value))
		}
	}
	return errors.Join(errs...)
}

// maxLearners lets all machines of a control plane join at the same time. With etcd's default of one learner, each
// machine waits for the previous one, and then for the five seconds during which etcd requires connected voters.
const maxLearners = 4

func (n *node) etcdArgs() args {
	state, members := "new", n.name+"="+n.peerURL()
	if n.Role == nodeconfig.RoleControlPlane {
		state, members = "existing", n.initialCluster
	}
	return args{
		arg("name", n.name),
		arg("data-dir", nodeconfig.DefaultEtcdFolder),
		arg("listen-client-urls", hostURLs(2379, append([]string{"127.0.0.1"}, n.ip())...)),
		arg("advertise-client-urls", n.clientURL()),
		arg("listen-peer-urls", hostURLs(2380, n.ip())),
		arg("initial-advertise-peer-urls", n.peerURL()),
		arg("initial-cluster", members),
		arg("initial-cluster-state", state),
		arg("initial-cluster-token", n.ClusterName),
		arg("listen-metrics-urls", etcdMetrics),
		arg("client-cert-auth", "true"),
		arg("trusted-ca-file", nodeconfig.PKIDir+"/etcd/ca.crt"),
		arg("cert-file", nodeconfig.PKIDir+"/etcd/server.crt"),
		arg("key-file", nodeconfig.PKIDir+"/etcd/server.key"),
		arg("peer-client-cert-auth", "true"),
		arg("peer-trusted-ca-file", nodeconfig.PKIDir+"/etcd/ca.crt"),
		arg("peer-cert-file", nodeconfig.PKIDir+"/etcd/peer.crt"),
		arg("peer-key-file", nodeconfig.PKIDir+"/etcd/peer.key"),
		arg("max-learners", fmt.Sprint(maxLearners)),
		arg("snapshot-count", "10000"),
		arg("watch-progress-notify-interval", "5s"),
		arg("feature-gates", "InitialCorruptCheck=true"),
	}
}

func (n *node) peerURL() string   { return hostURLs(2380, n.ip()) }
func (n *node) clientURL() string { return hostURLs(2379, n.ip()) }

func (n *node) apiServerArgs() args {
	pkiFile := func(name string) string { return nodeconfig.PKIDir + "/" + name }
	out := args{
		arg("advertise-address", n.ip()),
		arg("secure-port", fmt.Sprint(n.ControlPlane.APIServerPort)),
		arg("allow-privileged", "true"),
		arg("authentication-config", authenticationFile),
		arg("authorization-mode", "Node,RBAC"),
		arg("client-ca-file", caFile),
		// A Service with external IPs can intercept the traffic of other workloads (CVE-2020-8554).
		arg("enable-admission-plugins", "NodeRestriction,DenyServiceExternalIPs"),
		arg("enable-bootstrap-token-auth", "true"),
		arg("etcd-servers", n.etcdServers()),
		arg("etcd-cafile", pkiFile("etcd/ca.crt")),
		arg("etcd-certfile", pkiFile("apiserver-etcd-client.crt")),
		arg("etcd-keyfile", pkiFile("apiserver-etcd-client.key")),
		arg("kubelet-certificate-authority", caFile),
		arg("kubelet-client-certificate", pkiFile("apiserver-kubelet-client.crt")),
		arg("kubelet-client-key", pkiFile("apiserver-kubelet-client.key")),
		arg("kubelet-preferred-address-types", "InternalIP,ExternalIP,Hostname"),
		arg("profiling", "false"),
		arg("proxy-client-cert-file", pkiFile("front-proxy-client.crt")),
		arg("proxy-client-key-file", pkiFile("front-proxy-client.key")),
		arg("requestheader-allowed-names", "front-proxy-client"),
		arg("requestheader-client-ca-file", pkiFile("front-proxy-ca.crt")),
		arg("requestheader-extra-headers-prefix", "X-Remote-Extra-"),
		arg("requestheader-group-headers", "X-Remote-Group"),
		arg("requestheader-username-headers", "X-Remote-User"),
		// A token is valid for the hour that a pod requested, not for a year, because clients read renewed tokens.
		arg("service-account-extend-token-expiration", "false"),
		arg("service-account-issuer", "https://kubernetes.default.svc."+n.Network.ServiceDomain),
		arg("service-account-key-file", pkiFile("sa.pub")),
		arg("service-account-signing-key-file", pkiFile("sa.key")),
		arg("service-cluster-ip-range", strings.Join(n.Network.ServiceCIDRs, ",")),
		arg("tls-cert-file", pkiFile("apiserver.crt")),
		arg("tls-cipher-suites", strings.Join(cipherSuites, ",")),
		arg("tls-min-version", tlsMinVersion),
		arg("tls-private-key-file", pkiFile("apiserver.key")),
		arg("audit-policy-file", n.auditPolicyFile()),
		arg("audit-log-path", nodeconfig.DefaultAuditLog),
		// At most 100 MiB as text and ten compressed files, for a month.
		arg("audit-log-maxage", "30"),
		arg("audit-log-maxbackup", "10"),
		arg("audit-log-maxsize", "100"),
		arg("audit-log-compress", "true"),
	}
	if n.ips[0].Is6() {
		out = append(out, arg("bind-address", "::"))
	}
	if n.ControlPlane.Encryption {
		out = append(out, arg("encryption-provider-config", nodeconfig.EncryptionConfigPath),
			arg("encryption-provider-config-automatic-reload", "true"))
	}
	return out
}

// auditPolicyFile returns the path of the user's policy, or of the default one.
func (n *node) auditPolicyFile() string {
	if n.ControlPlane.AuditPolicy {
		return nodeconfig.AuditPolicyPath
	}
	return auditPolicyFile
}

func (n *node) etcdServers() string {
	if external := n.ControlPlane.ExternalEtcd; external != nil {
		return strings.Join(external.Endpoints, ",")
	}
	return hostURLs(2379, "127.0.0.1")
}

func (n *node) controllerManagerArgs() args {
	kubeconfig := kubeconfigs["controller-manager"]
	out := args{
		arg("kubeconfig", kubeconfig),
		arg("authentication-kubeconfig", kubeconfig),
		arg("authorization-kubeconfig", kubeconfig),
		arg("bind-address", "127.0.0.1"),
		arg("client-ca-file", caFile),
		arg("cluster-name", n.ClusterName),
		arg("cluster-signing-cert-file", nodeconfig.SigningCAPath),
		arg("cluster-signing-key-file", nodeconfig.PKIDir+"/ca.key"),
		arg("controllers", "*,bootstrapsigner,tokencleaner"),
		arg("flex-volume-plugin-dir", volumePluginDir),
		// With the default of 20 requests per second its controllers need five seconds to start. Until then no node has
		// a pod network. The API server has its own limits.
		arg("kube-api-qps", "200"),
		arg("kube-api-burst", "400"),
		arg("leader-elect", "true"),
		arg("profiling", "false"),
		arg("requestheader-client-ca-file", nodeconfig.PKIDir+"/front-proxy-ca.crt"),
		arg("root-ca-file", caFile),
		arg("service-account-private-key-file", controllerManagerSAKey),
		arg("service-cluster-ip-range", strings.Join(n.Network.ServiceCIDRs, ",")),
		// Above 1000 finished pods, the oldest are removed. Kubernetes' default of 12500 pods takes 100 MiB in etcd.
		arg("terminated-pod-gc-threshold", "1000"),
		arg("tls-cert-file", nodeconfig.PKIDir+"/components.crt"),
		arg("tls-private-key-file", nodeconfig.PKIDir+"/components.key"),
		arg("use-service-account-credentials", "true"),
	}
	if len(n.Network.PodCIDRs) > 0 {
		out = append(out, arg("allocate-node-cidrs", "true"), arg("cluster-cidr", strings.Join(n.Network.PodCIDRs, ",")))
	}
	if life := pki.MaxLife(); life > 0 {
		out = append(out, arg("cluster-signing-duration", life.String()))
	}
	return out
}

func (n *node) schedulerArgs() args {
	kubeconfig := kubeconfigs["scheduler"]
	return args{
		arg("kubeconfig", kubeconfig),
		arg("authentication-kubeconfig", kubeconfig),
		arg("authorization-kubeconfig", kubeconfig),
		arg("bind-address", "127.0.0.1"),
		arg("leader-elect", "true"),
		arg("profiling", "false"),
		arg("tls-cert-file", nodeconfig.PKIDir+"/scheduler.crt"),
		arg("tls-private-key-file", nodeconfig.PKIDir+"/scheduler.key"),
	}
}

// metricsServerArgs let metrics-server verify the kubelets with the cluster's authority, and its clients with the API server's
// settings, which it reads from the cluster.
func (n *node) metricsServerArgs() args {
	kubeconfig := kubeconfigs["metrics-server"]
	return args{
		arg("kubeconfig", kubeconfig),
		arg("authentication-kubeconfig", kubeconfig),
		arg("authorization-kubeconfig", kubeconfig),
		arg("bind-address", n.ip()),
		arg("secure-port", strconv.Itoa(nodeconfig.MetricsServerPort)),
		arg("kubelet-certificate-authority", caFile),
		arg("kubelet-preferred-address-types", "InternalIP"),
		// The default of a minute is slower than HorizontalPodAutoscalers, which decide every 15 s.
		arg("metric-resolution", "15s"),
		arg("profiling", "false"),
		arg("tls-cert-file", nodeconfig.PKIDir+"/metrics-server.crt"),
		arg("tls-cipher-suites", strings.Join(cipherSuites, ",")),
		arg("tls-min-version", tlsMinVersion),
		arg("tls-private-key-file", nodeconfig.PKIDir+"/metrics-server.key"),
	}
}

func (n *node) kubeletArgs() args {
	out := args{
		arg("config", kubeletConfigFile),
		arg("kubeconfig", nodeconfig.KubeletKubeconfig),
		arg("cert-dir", kubeletPKIDir),
		arg("node-ip", strings.Join(n.ipStrings(), ",")),
	}
	if n.name != n.hostname {
		out = append(out, arg("hostname-override", n.name))
	}
	if len(n.PassedCredentials()) > 0 {
		out = append(out, arg("image-credential-provider-config", credentialProvidersFile), arg("image-credential-provider-bin-dir", machineapi.AssetsFolder))
	}
	labels, _ := n.Node.KubeletLabels()
	if len(labels) > 0 {
		var pairs []string
		for key, value := range labels {
			pairs = append(pairs, key+"="+value)
		}
		slices.Sort(pairs)
		out = append(out, arg("node-labels", strings.Join(pairs, ",")))
	}
	return out
}

// hostURLs returns the URLs of the hosts with a port, separated by commas.
func hostURLs(port int, hosts ...string) string {
	var urls []string
	for _, host := range unique(hosts) {
		u := url.URL{Scheme: "https", Host: net.JoinHostPort(host, fmt.Sprint(port))}
		urls = append(urls, u.String())
	}
	return strings.Join(urls, ",")
}

package provision

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"text/template"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeproxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
	kubeletv1beta1 "k8s.io/kubelet/config/v1beta1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/node/images"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki/certfiles"
)

const (
	configDir            = kubernetesDir + "/config"
	authenticationFile   = configDir + "/authentication.yaml"
	kubeProxyConfigFile  = configDir + "/kube-proxy.yaml"
	auditPolicyFile      = configDir + "/audit-policy.yaml"
	auditLog             = "/var/log/kubernetes/audit.log"
	corefile             = configDir + "/Corefile"
	kubeletConfigFile    = "/var/lib/kubelet/config.yaml"
	containerdConfigFile = "/etc/containerd/config.toml"
	registryDir          = "/etc/containerd/certs.d"
	// volumePluginDir is not where it is by default: /usr is read-only.
	volumePluginDir = "/var/lib/kubelet/volumeplugins"
	pauseImage      = "registry.capstan.dev/pause:v1"
)

// auditPolicy is the default one: who did what, without the content of requests, and without what the components
// of the cluster do all the time.
//
//go:embed audit-policy.yaml
var auditPolicy []byte

// writeConfigs writes the configuration of all components that this machine runs.
func (n *node) writeConfigs() error {
	files := map[string][]byte{containerdConfigFile: n.containerdConfig()}
	for _, registry := range n.Registries {
		files[filepath.Join(registryDir, registry.Host, "hosts.toml")] = hostsTOML(registry)
	}
	var errs []error
	add := func(path string, config any, err error) {
		data, yamlErr := yaml.Marshal(config)
		errs = append(errs, err, yamlErr)
		files[path] = data
	}
	kubelet, err := n.kubeletConfig()
	add(kubeletConfigFile, kubelet, err)
	if n.Network.KubeProxy == nodeconfig.KubeProxyNFTables {
		add(kubeProxyConfigFile, n.kubeProxyConfig(), nil)
	}
	if n.Role != nodeconfig.RoleWorker {
		authentication, err := n.authenticationConfig()
		add(authenticationFile, authentication, err)
		resolvConf, _ := os.ReadFile("/etc/resolv.conf")
		files[auditPolicyFile] = auditPolicy
		files[corefile] = n.corefile(bytes.Contains(resolvConf, []byte("nameserver")))
	}
	for path, data := range files {
		errs = append(errs, certfiles.WriteFile(path, data))
	}
	return errors.Join(append(errs, publish(nodeconfig.PKIDir), n.makeComponentFolders())...)
}

func (n *node) makeComponentFolders() error {
	var errs []error
	if n.Role != nodeconfig.RoleWorker {
		for _, service := range n.controlPlaneServices() {
			for _, folder := range ownFolders(service.Command) {
				errs = append(errs, os.MkdirAll(folder, 0o700))
			}
		}
	}
	return errors.Join(append(errs,
		os.MkdirAll("/etc/cni/net.d", 0o755), os.MkdirAll("/opt/cni/bin", 0o755), os.MkdirAll("/etc/kubernetes/manifests", 0o755))...)
}

// healthPaths are all that anonymous requests may ask for.
var healthPaths = []string{"/livez", "/readyz", "/healthz"}

// authenticationConfig adds the anonymous health checks to the user's structured authentication.
func (n *node) authenticationConfig() (map[string]any, error) {
	config := map[string]any{"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthenticationConfiguration"}
	if n.ControlPlane.Authentication {
		data, err := os.ReadFile(nodeconfig.AuthenticationPath)
		if err != nil {
			return nil, fmt.Errorf("the structured authentication that the bootstrap data writes: %w", err)
		}
		if err := yaml.Unmarshal(data, &config); err != nil {
			return nil, fmt.Errorf("%s: %w", nodeconfig.AuthenticationPath, err)
		}
	}
	return withHealthChecks(config)
}

func withHealthChecks(config map[string]any) (map[string]any, error) {
	if _, set := config["anonymous"]; set {
		return nil, errors.New("authentication: anonymous cannot be set; it is on for " + strings.Join(healthPaths, ", ") + " and off for all else")
	}
	var conditions []any
	for _, path := range healthPaths {
		conditions = append(conditions, map[string]any{"path": path})
	}
	config["anonymous"] = map[string]any{"enabled": true, "conditions": conditions}
	return config, nil
}

func (n *node) kubeletConfig() (*kubeletv1beta1.KubeletConfiguration, error) {
	var taints []corev1.Taint
	for _, text := range n.Node.Taints {
		taint, err := parseTaint(text)
		if err != nil {
			return nil, err
		}
		taints = append(taints, taint)
	}
	return &kubeletv1beta1.KubeletConfiguration{
		TypeMeta: metav1.TypeMeta{APIVersion: kubeletv1beta1.SchemeGroupVersion.String(), Kind: "KubeletConfiguration"},
		Authentication: kubeletv1beta1.KubeletAuthentication{
			Anonymous: kubeletv1beta1.KubeletAnonymousAuthentication{Enabled: ptr.To(false)},
			Webhook:   kubeletv1beta1.KubeletWebhookAuthentication{Enabled: ptr.To(true)},
			X509:      kubeletv1beta1.KubeletX509Authentication{ClientCAFile: caFile},
		},
		Authorization:            kubeletv1beta1.KubeletAuthorization{Mode: kubeletv1beta1.KubeletAuthorizationModeWebhook},
		CgroupDriver:             "cgroupfs",
		ClusterDNS:               []string{n.Network.DNSServiceIP},
		ClusterDomain:            n.Network.ServiceDomain,
		ContainerRuntimeEndpoint: "unix://" + images.Socket,
		FailCgroupV1:             ptr.To(false),
		FailSwapOn:               ptr.To(false),
		PodPidsLimit:             ptr.To(podPidsLimit(n.machine.PidsLimit)),
		ProviderID:               n.Node.ProviderID,
		RegisterWithTaints:       taints,
		ResolverConfig:           ptr.To("/etc/resolv.conf"),
		RotateCertificates:       true,
		SeccompDefault:           ptr.To(true),
		ServerTLSBootstrap:       true,
		StaticPodPath:            "/etc/kubernetes/manifests",
		TLSCipherSuites:          cipherSuites,
		TLSMinVersion:            tlsMinVersion,
		VolumePluginDir:          volumePluginDir,
		EvictionHard: map[string]string{
			"memory.available": "100Mi", "nodefs.available": evictionSpace(n.machine.DiskBytes), "imagefs.available": evictionSpace(n.machine.DiskBytes),
			"nodefs.inodesFree": "1%", "imagefs.inodesFree": "1%",
		},
		ImageGCHighThresholdPercent: ptr.To(imageGCThreshold(n.machine.DiskBytes)),
		ImageGCLowThresholdPercent:  ptr.To(imageGCThreshold(n.machine.DiskBytes) - 5),
	}, nil
}

// imageGCThreshold is the use of the disk, in percent, above which the kubelet removes unused images. On a disk of its own it
// does so before it evicts pods. The use of the host's disk (0) mostly depends on others.
func imageGCThreshold(diskBytes int64) int32 {
	if diskBytes == 0 {
		return 95
	}
	return 85
}

// evictionSpace is the free space of the machine's disk below which the kubelet evicts pods: a tenth, and 1 GiB at most. It
// remains for etcd and the logs of services. A machine on the disk of its host (0) evicts at 1 GiB.
func evictionSpace(diskBytes int64) string {
	const most = 1 << 30
	if space := diskBytes / 10; space > 0 && space < most {
		return resource.NewQuantity(space>>20<<20, resource.BinarySI).String()
	}
	return resource.NewQuantity(most, resource.BinarySI).String()
}

// podPidsLimit is a quarter of the machine's limit: one pod must not use up the processes of the services. A capstand from
// before limits names none.
func podPidsLimit(machine int64) int64 { return cmp.Or(machine, 16384) / 4 }

// parseTaint reads key=value:Effect or key:Effect.
func parseTaint(text string) (corev1.Taint, error) {
	pair, effect, _ := strings.Cut(text, ":")
	key, value, _ := strings.Cut(pair, "=")
	switch e := corev1.TaintEffect(effect); e {
	case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute:
		if key != "" {
			return corev1.Taint{Key: key, Value: value, Effect: e}, nil
		}
	}
	return corev1.Taint{}, fmt.Errorf("node taint %q: want key=value:Effect or key:Effect", text)
}

func (n *node) kubeProxyConfig() *kubeproxyv1alpha1.KubeProxyConfiguration {
	config := &kubeproxyv1alpha1.KubeProxyConfiguration{
		TypeMeta:           metav1.TypeMeta{APIVersion: kubeproxyv1alpha1.SchemeGroupVersion.String(), Kind: "KubeProxyConfiguration"},
		Mode:               "nftables",
		HostnameOverride:   n.name,
		MetricsBindAddress: "127.0.0.1:10249",
		ClusterCIDR:        strings.Join(n.Network.PodCIDRs, ","),
	}
	config.ClientConnection.Kubeconfig = kubeconfigs["kube-proxy"]
	// The limits of connection tracking are the host's: they cannot be written in a machine.
	config.Conntrack.MaxPerCore, config.Conntrack.Min = ptr.To[int32](0), ptr.To[int32](0)
	config.Conntrack.TCPEstablishedTimeout = &metav1.Duration{Duration: 0}
	config.Conntrack.TCPCloseWaitTimeout = &metav1.Duration{Duration: 0}
	config.NFTables.MinSyncPeriod = metav1.Duration{Duration: 100 * time.Millisecond}
	return config
}

var corefileTemplate = template.Must(template.New("Corefile").Parse(`.:53 {
    bind {{ .Bind }}
    errors
    ready {{ .Ready }}
    kubernetes {{ .Domain }} in-addr.arpa ip6.arpa {
        kubeconfig {{ .Kubeconfig }}
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    prometheus {{ .Metrics }}
{{- if .Forward }}
    forward . /etc/resolv.conf {
        max_concurrent 1000
    }
{{- end }}
    cache 30 {
        disable success {{ .Domain }}
        disable denial {{ .Domain }}
    }
    loadbalance
}
`))

// corefile answers on the machine's own address. Without a resolver of the host's there is nobody
// to forward other names to.
func (n *node) corefile(forward bool) []byte {
	var b bytes.Buffer
	err := corefileTemplate.Execute(&b, map[string]any{
		"Bind": strings.Join(n.ipStrings(), " "), "Ready": coreDNSReady, "Domain": n.Network.ServiceDomain,
		"Kubeconfig": kubeconfigs["coredns"], "Metrics": net.JoinHostPort(n.ip(), "9153"), "Forward": forward,
	})
	if err != nil {
		panic(err) // the template and its values are ours
	}
	return b.Bytes()
}

var containerdTemplate = template.Must(template.New("config.toml").Parse(`version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "{{ .Socket }}"

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{{ .Pause }}"
[plugins."io.containerd.cri.v1.images".registry]
  config_path = "{{ .RegistryDir }}"
{{- range .Credentials }}
[plugins."io.containerd.cri.v1.images".registry.configs.{{ printf "%q" .Host }}.auth]
  username = {{ printf "%q" .Username }}
  password = {{ printf "%q" .Password }}
{{- end }}

[plugins."io.containerd.cri.v1.runtime"]
  # A machine may not have CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{{ .Assets }}/node/cni", "/opt/cni/bin"]
  conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.cri.v1.runtime".containerd]
  default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  BinaryName = "{{ .Assets }}/node/bin/runc"
  SystemdCgroup = false
`))

type credential struct{ Host, Username, Password string }

func (n *node) containerdConfig() []byte {
	var credentials []credential
	seen := map[string]bool{}
	for _, r := range n.Registries {
		if r.Username == "" {
			continue
		}
		for _, host := range append([]string{registryServer(r.Host)}, mirrorHosts(r)...) {
			if host != "" && !seen[host] {
				seen[host] = true
				credentials = append(credentials, credential{host, r.Username, r.Password})
			}
		}
	}
	var b bytes.Buffer
	err := containerdTemplate.Execute(&b, map[string]any{
		"Socket": images.Socket, "Pause": pauseImage, "RegistryDir": registryDir, "Credentials": credentials,
		"Assets": "/opt/capstan",
	})
	if err != nil {
		panic(err) // the template and its values are ours
	}
	return b.Bytes()
}

func mirrorHosts(r nodeconfig.Registry) []string {
	var hosts []string
	for _, mirror := range r.Mirrors {
		if u, err := url.Parse(mirror); err == nil {
			hosts = append(hosts, u.Host)
		}
	}
	return hosts
}

// registryServer is where a registry is reached, or "" for `_default`.
func registryServer(host string) string {
	switch host {
	case "_default":
		return ""
	case "docker.io":
		return "registry-1.docker.io"
	}
	return host
}

// hostsTOML tells containerd how to reach one registry.
func hostsTOML(r nodeconfig.Registry) []byte {
	var b strings.Builder
	settings := func() {
		if r.CAFile != "" {
			fmt.Fprintf(&b, "  ca = %q\n", r.CAFile)
		}
		if r.InsecureSkipVerify {
			b.WriteString("  skip_verify = true\n")
		}
	}
	server := registryServer(r.Host)
	if server != "" {
		fmt.Fprintf(&b, "server = %q\n", "https://"+server)
		if r.CAFile != "" {
			fmt.Fprintf(&b, "ca = %q\n", r.CAFile)
		}
		if r.InsecureSkipVerify {
			b.WriteString("skip_verify = true\n")
		}
	}
	for _, mirror := range r.Mirrors {
		fmt.Fprintf(&b, "\n[host.%q]\n  capabilities = [\"pull\", \"resolve\"]\n", mirror)
		settings()
	}
	return []byte(b.String())
}

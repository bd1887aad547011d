package provision

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeproxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
	kubeletv1beta1 "k8s.io/kubelet/config/v1beta1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/node/images"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki/certfiles"
)

const (
	configDir           = kubernetesDir + "/config"
	authenticationFile  = configDir + "/authentication.yaml"
	kubeProxyConfigFile = configDir + "/kube-proxy.yaml"
	auditPolicyFile     = configDir + "/audit-policy.yaml"
	corefile            = configDir + "/Corefile"
	kubeletConfigFile   = "/var/lib/kubelet/config.yaml"
	// credentialProvidersFile exists if a registry has credentials.
	credentialProvidersFile = configDir + "/credential-providers.yaml"
	// volumePluginDir differs from the default, because /usr is read-only.
	volumePluginDir = "/var/lib/kubelet/volumeplugins"
)

// auditPolicy is the default policy. It records the user and the verb of each request, without its content and without
// the periodic requests of the cluster's components.
//
//go:embed audit-policy.yaml
var auditPolicy []byte

// writeConfigs writes the configuration of all components that this machine runs.
func (n *node) writeConfigs() error {
	files := map[string][]byte{containerdConfigFile: n.containerdConfig()}
	hosts := map[string]bool{}
	for _, registry := range n.Registries {
		hosts[registry.Host] = true
		files[hostsFile(registry.Host)] = n.hostsTOML(registry)
	}
	errs := []error{removeRegistries(hosts)}
	add := func(path string, config any, err error) {
		data, yamlErr := yaml.Marshal(config)
		errs = append(errs, err, yamlErr)
		files[path] = data
	}
	kubelet, err := n.kubeletConfig()
	add(kubeletConfigFile, kubelet, err)
	if len(n.PassedCredentials()) > 0 {
		add(credentialProvidersFile, n.credentialProviders(), nil)
	}
	if n.Network.KubeProxy == nodeconfig.KubeProxyNFTables {
		kubeProxy, err := n.kubeProxyConfig()
		add(kubeProxyConfigFile, kubeProxy, err)
	}
	if n.Role != nodeconfig.RoleWorker {
		authentication, err := n.authenticationConfig()
		add(authenticationFile, authentication, err)
		resolvConf, _ := os.ReadFile("/etc/resolv.conf")
		files[auditPolicyFile] = auditPolicy
		files[corefile] = n.corefile(bytes.Contains(resolvConf, []byte("nameserver")))
	}
	var writes []func() error
	for _, path := range slices.Sorted(maps.Keys(files)) {
		writes = append(writes, func() error { return certfiles.WriteFile(path, files[path]) })
	}
	return errors.Join(append(errs, atomicfile.Together(writes...), publish(nodeconfig.PKIDir), n.makeComponentFolders())...)
}

func (n *node) makeComponentFolders() error {
	var errs []error
	if n.Role != nodeconfig.RoleWorker {
		for _, service := range n.controlPlaneServices() {
			for _, folder := range ownFolders(service.Command) {
				errs = append(errs, makePrivateFolder(folder))
			}
		}
	}
	return errors.Join(append(errs,
		os.MkdirAll("/etc/cni/net.d", 0o755), os.MkdirAll("/opt/cni/bin", 0o755), os.MkdirAll("/etc/kubernetes/manifests", 0o755))...)
}

// makePrivateFolder creates a folder for one component, whose user must be able to enter the folders above it.
func makePrivateFolder(folder string) error {
	if err := os.MkdirAll(filepath.Dir(folder), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(folder, 0o700); !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// healthPaths are the only paths of anonymous requests.
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
		return nil, errors.New("authentication: anonymous must not be set; it is on for " + strings.Join(healthPaths, ", ") + " and off for all other paths")
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
	eviction := resource.NewQuantity(machine.EvictionSpace(n.machine.DiskBytes), resource.BinarySI).String()
	defaults := &kubeletv1beta1.KubeletConfiguration{
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
		FailCgroupV1:             failCgroupV1(n.cgroupV1),
		FailSwapOn:               ptr.To(false),
		PodPidsLimit:             ptr.To(podPidsLimit(n.machine.PidsLimit)),
		ProviderID:               n.Node.ProviderID,
		RegisterWithTaints:       taints,
		ResolverConfig:           ptr.To("/etc/resolv.conf"),
		RotateCertificates:       true,
		SeccompDefault:           ptr.To(true),
		ServerTLSBootstrap:       true,
		StaticPodPath:            "/etc/kubernetes/manifests",
		SystemReserved:           n.reservation(),
		TLSCipherSuites:          cipherSuites,
		TLSMinVersion:            tlsMinVersion,
		VolumePluginDir:          volumePluginDir,
		EvictionHard: map[string]string{
			"memory.available": "100Mi", "nodefs.available": eviction, "imagefs.available": eviction,
			"nodefs.inodesFree": "1%", "imagefs.inodesFree": "1%",
		},
		ImageGCHighThresholdPercent: ptr.To(imageGCThreshold(n.machine.DiskBytes)),
		ImageGCLowThresholdPercent:  ptr.To(imageGCThreshold(n.machine.DiskBytes) - 5),
	}
	config, err := nodeconfig.MergeKubelet(defaults, n.Kubelet.Configuration)
	if err != nil {
		return nil, fmt.Errorf("kubelet.configuration: %w", err)
	}
	return config, nil
}

// failCgroupV1 lets the kubelet start on cgroup v1. On v2 its default stays.
func failCgroupV1(v1 bool) *bool {
	if v1 {
		return ptr.To(false)
	}
	return nil
}

// imageGCThreshold is the use of the disk, in percent, above which the kubelet removes unused images. On a disk of its own it
// does so before it evicts pods. The use of the host's disk (0) mostly depends on others.
func imageGCThreshold(diskBytes int64) int32 {
	if diskBytes == 0 {
		return 95
	}
	return 85
}

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
	return corev1.Taint{}, fmt.Errorf("node taint %q: expected key=value:Effect or key:Effect", text)
}

func (n *node) kubeProxyConfig() (*kubeproxyv1alpha1.KubeProxyConfiguration, error) {
	config := &kubeproxyv1alpha1.KubeProxyConfiguration{
		TypeMeta:           metav1.TypeMeta{APIVersion: kubeproxyv1alpha1.SchemeGroupVersion.String(), Kind: "KubeProxyConfiguration"},
		Mode:               "nftables",
		HostnameOverride:   n.name,
		MetricsBindAddress: "127.0.0.1:10249",
		ClusterCIDR:        strings.Join(n.Network.PodCIDRs, ","),
	}
	config.ClientConnection.Kubeconfig = kubeconfigs["kube-proxy"]
	// The limits of connection tracking belong to the host and cannot be written in a machine.
	config.Conntrack.MaxPerCore, config.Conntrack.Min = ptr.To[int32](0), ptr.To[int32](0)
	config.Conntrack.TCPEstablishedTimeout = &metav1.Duration{Duration: 0}
	config.Conntrack.TCPCloseWaitTimeout = &metav1.Duration{Duration: 0}
	config.NFTables.MinSyncPeriod = metav1.Duration{Duration: 100 * time.Millisecond}
	if n.KubeProxy == nil {
		return config, nil
	}
	merged, err := nodeconfig.MergeKubeProxy(config, n.KubeProxy.Configuration)
	if err != nil {
		return nil, fmt.Errorf("kubeProxy.configuration: %w", err)
	}
	return merged, nil
}

package nodeconfig

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	jsonpatch "github.com/evanphx/json-patch/v5"
	kubeproxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
	kubeletv1beta1 "k8s.io/kubelet/config/v1beta1"
	kjson "sigs.k8s.io/json"
)

// maxPatch limits a patch of a configuration in bytes, as JSON.
const maxPatch = 16 << 10

// Fields of the configurations that Capstan sets itself. A service of the machine, its probe or its credentials depend on them.
var (
	ownKubeletFields = []string{
		"apiVersion", "kind", "authentication", "authorization", "cgroupDriver", "cgroupRoot", "cgroupsPerQOS", "clusterDomain",
		"containerRuntimeEndpoint", "imageServiceEndpoint", "enableServer", "failCgroupV1", "failSwapOn", "healthzBindAddress",
		"healthzPort", "port", "address", "providerID", "readOnlyPort", "registerNode", "registerWithTaints", "rotateCertificates",
		"serverTLSBootstrap", "staticPodPath", "staticPodURL", "staticPodURLHeader", "tlsCertFile", "tlsPrivateKeyFile", "volumePluginDir",
	}
	ownKubeProxyFields = []string{
		"apiVersion", "kind", "mode", "clientConnection.kubeconfig", "clusterCIDR", "conntrack", "healthzBindAddress", "hostnameOverride",
		"windowsRunAsService", "winkernel", "bindAddressHardFail",
	}
)

// CheckKubelet returns an error unless a patch of the KubeletConfiguration has known fields with values of their types, and none
// of Capstan's fields.
func CheckKubelet(patch map[string]any) error {
	_, err := MergeKubelet(&kubeletv1beta1.KubeletConfiguration{}, patch)
	return err
}

// CheckKubeProxy is CheckKubelet for the KubeProxyConfiguration.
func CheckKubeProxy(patch map[string]any) error {
	_, err := MergeKubeProxy(&kubeproxyv1alpha1.KubeProxyConfiguration{}, patch)
	return err
}

// checkClusterDNS refuses a patch of the kubelet's clusterDNS in a cluster whose DNS server Capstan runs.
func checkClusterDNS(patch map[string]any, dns string) error {
	if _, set := patch["clusterDNS"]; set && dns != None {
		return errors.New("clusterDNS: Capstan sets this field to the address of its CoreDNS; remove it, or set dns of the control plane to None")
	}
	return nil
}

// MergeKubelet merges a patch into the KubeletConfiguration of Capstan.
func MergeKubelet(defaults *kubeletv1beta1.KubeletConfiguration, patch map[string]any) (*kubeletv1beta1.KubeletConfiguration, error) {
	return merge(defaults, patch, ownKubeletFields)
}

// MergeKubeProxy merges a patch into the KubeProxyConfiguration of Capstan.
func MergeKubeProxy(defaults *kubeproxyv1alpha1.KubeProxyConfiguration, patch map[string]any) (*kubeproxyv1alpha1.KubeProxyConfiguration, error) {
	return merge(defaults, patch, ownKubeProxyFields)
}

// merge applies a JSON merge patch. The names of fields are case-sensitive: otherwise a patch could set one of Capstan's fields by
// another spelling.
func merge[T any](defaults *T, patch map[string]any, own []string) (*T, error) {
	if len(patch) == 0 {
		return defaults, nil
	}
	var errs []error
	for _, path := range own {
		if isSet(patch, path) {
			errs = append(errs, fmt.Errorf("%s: Capstan sets this field; remove it", path))
		}
	}
	data, err := json.Marshal(patch)
	if err != nil {
		return nil, err
	}
	if len(data) > maxPatch {
		errs = append(errs, fmt.Errorf("has %d bytes, expected at most %d", len(data), maxPatch))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	// Names and types are checked with the patch by itself. After the merge, null values are gone.
	if err := strict(data, new(T)); err != nil {
		return nil, err
	}
	base, err := json.Marshal(defaults)
	if err != nil {
		return nil, err
	}
	merged, err := jsonpatch.MergePatch(base, data)
	if err != nil {
		return nil, err
	}
	out := new(T)
	return out, strict(merged, out)
}

func strict(data []byte, into any) error {
	unknown, err := kjson.UnmarshalStrict(data, into)
	if err != nil {
		return err
	}
	return errors.Join(unknown...)
}

func isSet(object map[string]any, path string) bool {
	head, rest, nested := strings.Cut(path, ".")
	value, set := object[head]
	if !nested || !set {
		return set
	}
	inner, ok := value.(map[string]any)
	return ok && isSet(inner, rest)
}

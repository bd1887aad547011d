// Package manifests contains the basic objects of a workload cluster, like the phases and add-ons of kubeadm.
//
// Layer: contract. Allowed imports: api, library.
package manifests

import (
	"bytes"
	"embed"
	"fmt"
	"text/template"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"capstan.dev/capstan/internal/manifest"
)

//go:embed *.yaml
var files embed.FS

// Names of the add-ons.
const (
	KubeProxy = "kube-proxy.yaml"
	CoreDNS   = "coredns.yaml"
	// MetricsServer has the authority of the cluster as input, encoded with base64.
	MetricsServer = "metrics-server.yaml"
)

// Values of the setting for local volumes.
const (
	StorageClass        = "StorageClass"
	DefaultStorageClass = "DefaultStorageClass"
)

// ForLocalVolumes returns the StorageClass of local volumes, and the rights of node agents that provide them. Without the
// setting there are none.
func ForLocalVolumes(setting string) ([]*unstructured.Unstructured, error) {
	if setting != StorageClass && setting != DefaultStorageClass {
		return nil, nil
	}
	return Parse(map[string]bool{"Default": setting == DefaultStorageClass}, "local-volumes.yaml")
}

// ForAgents returns the objects that joining machines and all node agents need: roles, and the CRDs for etcd if etcd
// runs on the machines. The first machine applies them; from then on the control plane provider keeps them current.
func ForAgents(stackedEtcd bool) []string {
	if !stackedEtcd {
		return []string{"rbac.yaml", "metrics-server-rbac.yaml"}
	}
	return []string{
		"etcd.capstan.dev_etcdmembers.yaml", "etcd.capstan.dev_etcdbackups.yaml", "etcd.capstan.dev_etcdbackupchecks.yaml", "etcd.yaml", "rbac.yaml",
		"metrics-server-rbac.yaml",
	}
}

// FormerClusterRoleBindings are the names of bindings of older versions of Capstan, which must be deleted.
func FormerClusterRoleBindings() []string {
	return []string{
		// With this binding, kube-controller-manager approved the kubelet certificate of any node for any bootstrap
		// token.
		"capstan:approve-kubelet-clients",
	}
}

// Parse returns the objects in files. The add-ons are templates with the network configuration as input.
func Parse(network any, names ...string) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	for _, name := range names {
		parsed, err := template.ParseFS(files, name)
		if err != nil {
			return nil, err
		}
		var b bytes.Buffer
		if err := parsed.Execute(&b, network); err != nil {
			return nil, err
		}
		parts, err := manifest.Parse(b.Bytes())
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		objects = append(objects, parts...)
	}
	return objects, nil
}

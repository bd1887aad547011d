// Package manifests holds the basic objects of a workload cluster: what kubeadm's phases and add-ons are elsewhere.
//
// Layer: contract.
package manifests

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io"
	"text/template"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
)

//go:embed *.yaml
var files embed.FS

// Names of the add-ons.
const (
	KubeProxy = "kube-proxy.yaml"
	CoreDNS   = "coredns.yaml"
)

// ForAgents are what joining machines and the agents of all machines need: roles, and the kinds of etcd's care when etcd runs
// on the machines. The first machine applies them; from then on the control plane provider keeps them current.
func ForAgents(stackedEtcd bool) []string {
	if !stackedEtcd {
		return []string{"rbac.yaml"}
	}
	return []string{
		"etcd.capstan.dev_etcdmembers.yaml", "etcd.capstan.dev_etcdbackups.yaml", "etcd.capstan.dev_etcdbackupchecks.yaml", "etcd.yaml", "rbac.yaml",
	}
}

// FormerClusterRoleBindings are names of bindings that former versions of Capstan made and that must not stay.
func FormerClusterRoleBindings() []string {
	return []string{
		// kube-controller-manager approved the kubelet certificate of any node for any bootstrap token.
		"capstan:approve-kubelet-clients",
	}
}

// Parse reads the objects of files. The add-ons are templates over the configuration of the network.
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
		for decoder := yaml.NewYAMLOrJSONDecoder(&b, 4096); ; {
			object := &unstructured.Unstructured{}
			if err := decoder.Decode(object); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			objects = append(objects, object)
		}
	}
	return objects, nil
}

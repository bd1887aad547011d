package nodeconfig

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const worker = `apiVersion: node.capstan.dev/v1beta2
kind: NodeConfiguration
clusterName: c
kubernetesVersion: v1.36.3
role: worker
endpoint: 10.0.0.1:6443
bootstrapToken: abcdef.hunter2hunter2aa
network: {podCIDRs: [10.244.0.0/16], serviceCIDRs: [10.96.0.0/16], dnsServiceIP: 10.96.0.10}
node: {}
kubelet: {}
`

func TestParse(t *testing.T) {
	c, err := Parse([]byte(worker))
	if err != nil {
		t.Fatal(err)
	}
	want := Network{
		PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, DNSServiceIP: "10.96.0.10",
		ServiceDomain: "cluster.local", PodNetwork: PodNetworkRoutes, KubeProxy: KubeProxyNFTables, DNS: DNSCoreDNS,
	}
	if diff := cmp.Diff(want, c.Network); diff != "" {
		t.Error(diff)
	}
	if c.NodeName("M-1") != "m-1" {
		t.Errorf("node name %q", c.NodeName("M-1"))
	}
	cp, err := Parse([]byte(strings.Replace(worker, "role: worker", "role: init\ncontrolPlane: {}", 1)))
	if err != nil || cp.ControlPlane.APIServerPort != 6443 || cp.ControlPlane.CertificateValidityDays != 365 {
		t.Errorf("%+v, %v", cp.ControlPlane, err)
	}
}

func TestRefused(t *testing.T) {
	for name, tt := range map[string]struct{ from, to, want string }{
		"version of the file":   {"node.capstan.dev/v1beta2", "node.capstan.dev/v9", "apiVersion"},
		"unknown field":         {"node: {}", "node: {nope: 1}", "nope"},
		"Kubernetes version":    {"v1.36.3", "1.36.3", "kubernetesVersion"},
		"role":                  {"role: worker", "role: boss", "role"},
		"init without settings": {"role: worker", "role: init", "controlPlane"},
		"endpoint":              {"10.0.0.1:6443", "10.0.0.1", "endpoint"},
		"pod network":           {"10.244.0.0/16", "10.244.0.0/99", "network.podCIDRs"},
		"no Service network":    {"serviceCIDRs: [10.96.0.0/16], ", "", "network.serviceCIDRs"},
		"DNS address":           {"10.96.0.10", "x", "network.dnsServiceIP"},
		"proxy":                 {"dnsServiceIP:", "kubeProxy: IPTables, dnsServiceIP:", "network.kubeProxy"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(strings.Replace(worker, tt.from, tt.to, 1)))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("want %q in: %v", tt.want, err)
			}
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the error contains the token: %v", err)
			}
		})
	}
}

func TestKubeletLabels(t *testing.T) {
	labels, refused := Node{Labels: map[string]string{
		"a": "1", "example.org/a": "1", "topology.kubernetes.io/zone": "1", "node.kubernetes.io/x": "1", "x.kubelet.kubernetes.io/y": "1",
		"node-role.kubernetes.io/worker": "", "node-restriction.kubernetes.io/a": "", "foo.k8s.io/a": "",
	}}.KubeletLabels()
	if len(labels) != 5 {
		t.Errorf("labels %v", labels)
	}
	if diff := cmp.Diff([]string{"foo.k8s.io/a", "node-restriction.kubernetes.io/a", "node-role.kubernetes.io/worker"}, refused); diff != "" {
		t.Error(diff)
	}
}

package provision

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"

	"k8s.io/utils/ptr"

	"capstan.dev/capstan/internal/node/images"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/supervisor"
)

const (
	etcdMetrics = "http://127.0.0.1:2381"
	// coreDNSReady is where CoreDNS says that it has seen the cluster's Services.
	coreDNSReady = "127.0.0.1:8181"
)

// controlPlaneServices in the order in which they start.
func (n *node) controlPlaneServices() []supervisor.Service {
	c := n.ControlPlane
	var services []supervisor.Service
	if c.ExternalEtcd == nil {
		services = append(services, n.etcdService())
	}
	component := func(name string, command []string, port int) supervisor.Service {
		return supervisor.Service{
			Name: name, Command: command, After: []string{"kube-apiserver"},
			Ready:       &supervisor.Probe{URL: fmt.Sprintf("https://127.0.0.1:%d/healthz", port), CAFile: caFile},
			OOMScoreAdj: ptr.To(-997), StopTimeoutSeconds: 5,
		}
	}
	services = append(services, supervisor.Service{
		// Not after etcd: the API server needs a second of its own before it needs etcd.
		Name:    "kube-apiserver",
		Command: n.apiServerArgs().with(n.program("kube-apiserver"), c.APIServer.ExtraArgs),
		Ready: &supervisor.Probe{
			URL: fmt.Sprintf("https://127.0.0.1:%d/readyz", c.APIServerPort), CAFile: caFile,
		},
		OOMScoreAdj: ptr.To(-997),
		// It takes no new requests at once, and would wait a minute for watches to end.
		StopTimeoutSeconds: 3,
		Revision:           revision(authenticationFile, n.auditPolicyFile()),
	},
		component("kube-controller-manager",
			n.controllerManagerArgs().with(n.program("kube-controller-manager"), c.ControllerManager.ExtraArgs), 10257),
		component("kube-scheduler",
			n.schedulerArgs().with(n.program("kube-scheduler"), c.Scheduler.ExtraArgs), 10259))
	if n.Network.DNS == nodeconfig.DNSCoreDNS {
		services = append(services, supervisor.Service{
			Name:     "coredns",
			Command:  []string{runtimeProgram("coredns"), "-conf", corefile},
			After:    []string{"kube-apiserver"},
			Ready:    &supervisor.Probe{URL: "http://" + coreDNSReady + "/ready"},
			Revision: revision(corefile),
			// CoreDNS waits a few seconds for the last questions.
			StopTimeoutSeconds: 2,
		})
	}
	for i := range services {
		n.confine(&services[i])
	}
	return services
}

func (n *node) etcdService() supervisor.Service {
	service := supervisor.Service{
		Name:        "etcd",
		Command:     n.etcdArgs().with(n.program("etcd"), n.ControlPlane.Etcd.ExtraArgs),
		Ready:       &supervisor.Probe{URL: etcdMetrics + "/readyz"},
		OOMScoreAdj: ptr.To(-997), StopTimeoutSeconds: 5,
	}
	n.confine(&service)
	return service
}

// nodeServices are those of every machine.
func (n *node) nodeServices() []supervisor.Service {
	// On a control plane machine they would only take time from the API server.
	var first []string
	if n.Role != nodeconfig.RoleWorker {
		first = []string{"kube-apiserver"}
	}
	services := []supervisor.Service{{
		Name:    "containerd",
		Command: []string{runtimeProgram("containerd"), "--config", containerdConfigFile},
		After:   first,
		Ready:   &supervisor.Probe{Unix: images.Socket},
		// Its shims, and so the pods, outlive it.
		KillProcessGroup: ptr.To(false),
		OOMScoreAdj:      ptr.To(-999),
		Revision:         revision(containerdConfigFile),
	}, {
		Name:        "kubelet",
		Command:     n.kubeletArgs().with(n.program("kubelet"), n.Kubelet.ExtraArgs),
		After:       append([]string{"containerd"}, first...),
		Ready:       &supervisor.Probe{URL: "http://127.0.0.1:10248/healthz"},
		OOMScoreAdj: ptr.To(-999),
		// What it started in a pod's name belongs to the pod.
		KillProcessGroup: ptr.To(false),
		Revision:         revision(kubeletConfigFile),
	}, {
		Name:    "node-agent",
		Command: []string{machine.AssetsDir + "/capstan-init", "node", "agent"},
		After:   first,
	}}
	if n.Network.KubeProxy == nodeconfig.KubeProxyNFTables {
		services = append(services, supervisor.Service{
			Name:               "kube-proxy",
			Command:            []string{n.program("kube-proxy"), "--config=" + kubeProxyConfigFile},
			After:              first,
			Ready:              &supervisor.Probe{URL: "http://127.0.0.1:10256/healthz"},
			OOMScoreAdj:        ptr.To(-998),
			StopTimeoutSeconds: 5,
			Revision:           revision(kubeProxyConfigFile),
		})
	}
	for i := range services {
		n.confine(&services[i])
	}
	return services
}

// revision changes with the content of the files: a service is restarted when its configuration changes.
func revision(paths ...string) string {
	sum := sha256.New()
	for _, path := range paths {
		data, _ := os.ReadFile(path)
		fmt.Fprintf(sum, "%d ", len(data))
		sum.Write(data)
	}
	return hex.EncodeToString(sum.Sum(nil)[:8])
}

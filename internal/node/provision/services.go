package provision

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"

	"k8s.io/utils/ptr"

	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/images"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/supervisor"
)

const (
	etcdMetrics = "http://127.0.0.1:2381"
	// coreDNSReady is the URL that reports whether CoreDNS has read the cluster's Services.
	coreDNSReady = "127.0.0.1:8181"
)

// controlPlaneServices returns the services in the order of their start.
func (n *node) controlPlaneServices() []supervisor.Service {
	c := n.ControlPlane
	var services []supervisor.Service
	if c.ExternalEtcd == nil {
		services = append(services, n.etcdService())
	}
	component := func(name string, command []string, env []nodeconfig.Arg, port int) supervisor.Service {
		return supervisor.Service{
			Name: name, Command: command, Env: environment(env), After: []string{"kube-apiserver"},
			Ready:       &supervisor.Probe{URL: fmt.Sprintf("https://127.0.0.1:%d/healthz", port), CAFile: caFile},
			OOMScoreAdj: ptr.To(-997), StopTimeoutSeconds: 5,
		}
	}
	var requires []string
	if c.ExternalEtcd == nil {
		requires = []string{"etcd"}
	}
	services = append(services, supervisor.Service{
		// It does not wait for etcd, because the API server prepares itself for a second before it needs etcd. It stops
		// before etcd restarts, so that clients change to another machine instead of waiting for this machine's etcd.
		Name:     "kube-apiserver",
		Requires: requires,
		Command:  n.apiServerArgs().with(n.program("kube-apiserver"), c.APIServer.ExtraArgs),
		Ready: &supervisor.Probe{
			URL: fmt.Sprintf("https://127.0.0.1:%d/readyz", c.APIServerPort), CAFile: caFile,
		},
		OOMScoreAdj: ptr.To(-997),
		// The API server refuses new requests at once, but would wait a minute for the end of watches.
		StopTimeoutSeconds: 3,
		Env:                append(n.apiServerEnvironment(), environment(c.APIServer.Env)...),
		Revision:           revision(n.apiServerFiles()...),
	},
		component("kube-controller-manager",
			n.controllerManagerArgs().with(n.program("kube-controller-manager"), c.ControllerManager.ExtraArgs), c.ControllerManager.Env, 10257),
		component("kube-scheduler",
			n.schedulerArgs().with(n.program("kube-scheduler"), c.Scheduler.ExtraArgs), c.Scheduler.Env, 10259))
	if n.Network.DNS == nodeconfig.DNSCoreDNS {
		services = append(services, supervisor.Service{
			Name:     "coredns",
			Command:  []string{runtimeProgram("coredns"), "-conf", corefile},
			After:    []string{"kube-apiserver"},
			Ready:    &supervisor.Probe{URL: "http://" + coreDNSReady + "/ready"},
			Revision: revision(corefile),
			// CoreDNS waits a few seconds for the last queries.
			StopTimeoutSeconds: 2,
		})
	}
	if c.MetricsServer {
		services = append(services, n.metricsServerService())
	}
	for i := range services {
		n.confine(&services[i])
	}
	return services
}

// metricsServerService is ready without stored metrics too, because a cluster without pods has none of them.
func (n *node) metricsServerService() supervisor.Service {
	return supervisor.Service{
		Name:    nodeconfig.MetricsServer,
		Command: n.metricsServerArgs().with(runtimeProgram("metrics-server"), nil),
		After:   []string{"kube-apiserver"},
		Ready: &supervisor.Probe{
			URL: hostURLs(nodeconfig.MetricsServerPort, n.ip()) + "/readyz?exclude=metric-storage-ready", CAFile: caFile,
		},
		StopTimeoutSeconds: 2,
	}
}

func (n *node) etcdService() supervisor.Service {
	service := supervisor.Service{
		Name:        "etcd",
		Command:     n.etcdArgs().with(n.program("etcd"), n.ControlPlane.Etcd.ExtraArgs),
		Env:         environment(n.ControlPlane.Etcd.Env),
		Ready:       &supervisor.Probe{URL: etcdMetrics + "/readyz"},
		OOMScoreAdj: ptr.To(-997), StopTimeoutSeconds: 5,
	}
	n.confine(&service)
	return service
}

// nodeServices returns the services of every machine.
func (n *node) nodeServices() []supervisor.Service {
	// On a control plane machine they would only slow down the API server.
	var first []string
	if n.Role != nodeconfig.RoleWorker {
		first = []string{"kube-apiserver"}
	}
	services := []supervisor.Service{{
		Name:    "containerd",
		Command: []string{runtimeProgram("containerd"), "--config", containerdConfigFile},
		After:   first,
		Ready:   &supervisor.Probe{Unix: images.Socket},
		// The shims, and therefore the pods, outlive containerd.
		KillProcessGroup: ptr.To(false),
		OOMScoreAdj:      ptr.To(-999),
		Env:              n.proxyEnvironment(),
		Revision:         revision(containerdFiles()...),
	}, {
		Name:        "kubelet",
		Command:     n.kubeletArgs().with(n.program("kubelet"), n.Kubelet.ExtraArgs),
		After:       append([]string{"containerd"}, first...),
		Ready:       &supervisor.Probe{URL: "http://127.0.0.1:10248/healthz"},
		OOMScoreAdj: ptr.To(-999),
		// Processes that the kubelet started for a pod belong to the pod.
		KillProcessGroup: ptr.To(false),
		Env:              append(n.proxyEnvironment(), environment(n.Kubelet.Env)...),
		Revision:         revision(n.kubeletFiles()...) + n.size(),
	}, {
		Name:     "node-agent",
		Command:  []string{machineapi.InitPath, "node", "agent"},
		After:    first,
		Revision: n.agentRevision(),
	}}
	if n.Network.KubeProxy == nodeconfig.KubeProxyNFTables {
		services = append(services, supervisor.Service{
			Name:               "kube-proxy",
			Command:            []string{n.program("kube-proxy"), "--config=" + kubeProxyConfigFile},
			After:              first,
			Ready:              &supervisor.Probe{URL: "http://127.0.0.1:10256/healthz"},
			OOMScoreAdj:        ptr.To(-998),
			StopTimeoutSeconds: 5,
			Env:                n.kubeProxyEnvironment(),
			Revision:           revision(kubeProxyConfigFile),
		})
	}
	for i := range services {
		n.confine(&services[i])
	}
	return services
}

// apiServerFiles are the files that restart the API server. It also reads a changed encryption configuration by itself, but up to a
// minute later: objects that are written after an update would still have the former encryption.
func (n *node) apiServerFiles() []string {
	files := []string{authenticationFile, n.auditPolicyFile()}
	if n.ControlPlane.Encryption {
		files = append(files, nodeconfig.EncryptionConfigPath)
	}
	return files
}

// size returns the size of the machine and of its own disk, which the kubelet reads at its start. It is empty if capstand reports none.
func (n *node) size() string {
	if n.machine.MemoryBytes == 0 {
		return ""
	}
	size := fmt.Sprintf("-%d-%d", n.machine.CPUs, n.machine.MemoryBytes)
	if n.machine.DiskBytes != 0 {
		size += fmt.Sprintf("-%d", n.machine.DiskBytes)
	}
	return size
}

// agentRevision returns a hash of the configuration that the node agent reads at its start. The hash excludes the arguments and files of other
// services, and the StorageClass. Package inplace lists the services that each setting restarts. On control plane machines, the hash
// includes the version: the agent checks backups with the etcdutl of this version, and the host may remove the former version.
func (n *node) agentRevision() string {
	config := *n.NodeConfiguration
	config.BootstrapToken, config.Kubelet, config.Registries = "", nodeconfig.Kubelet{}, nil
	config.Node.Labels, config.Node.Taints = nil, nil
	config.Proxy, config.KubeProxy = nil, nil
	if config.ControlPlane == nil {
		config.KubernetesVersion = ""
	} else {
		c := *config.ControlPlane
		c.CoreDNS, c.LocalVolumes = nil, ""
		c.APIServer, c.ControllerManager, c.Scheduler, c.Etcd = nodeconfig.Component{}, nodeconfig.Component{}, nodeconfig.Component{}, nodeconfig.Component{}
		c.AuditPolicy, c.Authentication, c.Encryption = false, false, false
		if c.ExternalEtcd != nil {
			c.ExternalEtcd = &nodeconfig.ExternalEtcd{}
		}
		config.ControlPlane = &c
	}
	data, err := json.Marshal(config)
	if err != nil {
		panic(err) // cannot fail: the type has only strings, numbers, lists and maps
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:8])
}

// revision returns a hash of the files, so that a changed configuration restarts the service.
func revision(paths ...string) string {
	sum := sha256.New()
	for _, path := range paths {
		data, _ := os.ReadFile(path)
		fmt.Fprintf(sum, "%d ", len(data))
		sum.Write(data)
	}
	return hex.EncodeToString(sum.Sum(nil)[:8])
}

// kubeProxyEnvironment returns the environment of kube-proxy.
func (n *node) kubeProxyEnvironment() []string {
	if n.KubeProxy == nil {
		return nil
	}
	return environment(n.KubeProxy.Env)
}

// environment returns the user's variables of a service. They follow those of Capstan, because the last of one name applies.
func environment(variables []nodeconfig.Arg) []string {
	var out []string
	for _, v := range variables {
		out = append(out, v.Name+"="+v.Value)
	}
	return out
}

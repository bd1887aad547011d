// Package nodeconfig is the contract of the managers and capstan-init: the types that the bootstrap provider writes into bootstrap data
// and that capstan-init reads on the machine, the commands of that data, and the identities of a machine in its cluster.
//
// Layer: contract. Allowed imports: api, library.
package nodeconfig

import "capstan.dev/capstan/internal/machineapi"

// Path is the file of the NodeConfiguration in the bootstrap data, as YAML, mode 0600.
const Path = "/etc/capstan/node.yaml"

const (
	// APIVersion of NodeConfiguration.
	APIVersion = "node.capstan.dev/v1beta2"
	// Kind of NodeConfiguration.
	Kind = "NodeConfiguration"
)

// Paths on the machine. The bootstrap data writes the CA files. `capstan-init node up` writes the derived files: leaf
// certificates, kubeconfigs and component configuration.
const (
	PKIDir               = "/etc/kubernetes/pki"
	EncryptionConfigPath = "/etc/kubernetes/encryption.yaml"
	AuditPolicyPath      = "/etc/kubernetes/audit-policy.yaml"
	AuthenticationPath   = "/etc/kubernetes/authentication.yaml"
	// SentinelPath is the file whose existence means that the bootstrap succeeded (BC-05). The bootstrap data writes it.
	SentinelPath = "/run/cluster-api/bootstrap-success.complete"
)

const (
	// UpCommand is the command of the bootstrap data that makes the machine a node of its cluster.
	UpCommand = machineapi.InitPath + " node up"
	// EndOnFailure as the first command applies to all lines of the later ones. Bootstrap data begins with it. A bootstrap that continues
	// after a restart repeats it, and each update command begins with it.
	EndOnFailure = "set -e"
	// UpdateCommand is the command of the update data that brings a node to the configuration of that data. It marks the place in the
	// commands of the data at which the engine provisions the machine.
	UpdateCommand = machineapi.InitPath + " node update"
)

// Identities with which a machine requests certificates. The control plane provider approves them.
const (
	// NodeUserPrefix begins the user name of a kubelet. The name of the Node follows.
	NodeUserPrefix = "system:node:"
	// NodesGroup is the group of all kubelets.
	NodesGroup = "system:nodes"
	// KubeProxyUser is kube-proxy on all machines.
	KubeProxyUser = "system:kube-proxy"
	// AgentUserPrefix begins the user name of a node agent. The name of the Node follows.
	AgentUserPrefix = "capstan:node-agent:"
	// AgentGroup is the group of all node agents. RBAC of the workload cluster names it.
	AgentGroup = "capstan:node-agents"
)

// Role is the role of a machine in its cluster.
type Role string

const (
	// RoleInit is the first control plane machine, which creates a new etcd cluster.
	RoleInit Role = "init"
	// RoleControlPlane joins an existing control plane.
	RoleControlPlane Role = "control-plane"
	// RoleWorker runs pods only.
	RoleWorker Role = "worker"
)

// NodeConfiguration contains everything that a machine needs to become a node of its cluster.
type NodeConfiguration struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`

	// ClusterName is the Cluster's name.
	ClusterName string `json:"clusterName"`
	// KubernetesVersion with the leading v.
	KubernetesVersion string `json:"kubernetesVersion"`
	Role              Role   `json:"role"`
	// Endpoint of the control plane, host:port, without scheme.
	Endpoint string `json:"endpoint"`
	// BootstrapToken (id.secret) for TLS bootstrap. Workers only: control plane machines have the CA's key and sign
	// their certificates themselves.
	BootstrapToken string `json:"bootstrapToken,omitempty"`

	Network      Network       `json:"network"`
	Node         Node          `json:"node"`
	Kubelet      Kubelet       `json:"kubelet"`
	ControlPlane *ControlPlane `json:"controlPlane,omitempty"`
	Registries   []Registry    `json:"registries,omitempty"`
	// Images are pulled before the kubelet starts.
	Images    []string   `json:"images,omitempty"`
	Proxy     *Proxy     `json:"proxy,omitempty"`
	KubeProxy *KubeProxy `json:"kubeProxy,omitempty"`
}

// Network contains the networks of the cluster, as far as a node needs them.
type Network struct {
	PodCIDRs      []string `json:"podCIDRs"`
	ServiceCIDRs  []string `json:"serviceCIDRs"`
	ServiceDomain string   `json:"serviceDomain"`
	// DNSServiceIP is the address of the kube-dns Service: the tenth of the first Service network.
	DNSServiceIP string `json:"dnsServiceIP"`
	// PodNetwork: Routes (ptp, host-local and routes inside the machines) or None (the user's own CNI).
	PodNetwork string `json:"podNetwork"`
	// KubeProxy: NFTables or None.
	KubeProxy string `json:"kubeProxy"`
	// DNS: CoreDNS (on control plane machines) or None.
	DNS string `json:"dns"`
}

// Node contains the properties with which the node registers.
type Node struct {
	// Name of the node. Empty means the machine's hostname.
	Name   string            `json:"name,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
	// Taints as key=value:Effect or key:Effect.
	Taints []string `json:"taints,omitempty"`
	// ProviderID of the node. Empty means that of /run/capstan/metadata.json.
	ProviderID string `json:"providerID,omitempty"`
}

// Arg is an argument of a component, without the leading dashes, or an environment variable. The last of several of one name applies.
type Arg struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Kubelet contains the user's additions to the kubelet.
type Kubelet struct {
	ExtraArgs []Arg `json:"extraArgs,omitempty"`
	Env       []Arg `json:"env,omitempty"`
	// Configuration is a JSON merge patch of the KubeletConfiguration.
	Configuration map[string]any `json:"configuration,omitempty"`
}

// KubeProxy contains the user's additions to kube-proxy.
type KubeProxy struct {
	Env []Arg `json:"env,omitempty"`
	// Configuration is a JSON merge patch of the KubeProxyConfiguration.
	Configuration map[string]any `json:"configuration,omitempty"`
}

// Component contains the user's additions to a control plane component.
type Component struct {
	ExtraArgs []Arg `json:"extraArgs,omitempty"`
	Env       []Arg `json:"env,omitempty"`
}

// MetricsServer is the name of the service metrics-server and of its Service in kube-system. It listens on MetricsServerPort of a
// control plane machine.
const (
	MetricsServer     = "metrics-server"
	MetricsServerPort = 4443
)

// ControlPlane contains the configuration that only control plane machines need.
type ControlPlane struct {
	// APIServerPort is the port of the machine's API server; default 6443.
	APIServerPort int32 `json:"apiServerPort"`
	// CertSANs are additional names of the API server's certificate.
	CertSANs []string `json:"certSANs,omitempty"`

	APIServer         Component `json:"apiServer"`
	ControllerManager Component `json:"controllerManager"`
	Scheduler         Component `json:"scheduler"`
	Etcd              Component `json:"etcd"`
	// ExternalEtcd is set if the user provides etcd. The client certificate is in PKIDir as
	// apiserver-etcd-client.{crt,key}, the CA as etcd/ca.crt.
	ExternalEtcd *ExternalEtcd `json:"externalEtcd,omitempty"`
	// CoreDNS contains the user's settings of CoreDNS.
	CoreDNS *CoreDNS `json:"coreDNS,omitempty"`
	// LocalVolumes: StorageClass, DefaultStorageClass or None (default).
	LocalVolumes string `json:"localVolumes,omitempty"`
	// MetricsServer is true if the machine runs metrics-server.
	MetricsServer bool `json:"metricsServer,omitempty"`

	// AuditPolicy, Authentication and Encryption are true if the file of that name exists.
	AuditPolicy    bool `json:"auditPolicy,omitempty"`
	Authentication bool `json:"authentication,omitempty"`
	Encryption     bool `json:"encryption,omitempty"`

	// CertificateValidityDays of the leaf certificates; default 365.
	CertificateValidityDays int32 `json:"certificateValidityDays,omitempty"`
	// EncryptionAlgorithm of new private keys; default ECDSA-P256.
	EncryptionAlgorithm string `json:"encryptionAlgorithm,omitempty"`
}

// ExternalEtcd is an etcd that the user provides.
type ExternalEtcd struct {
	Endpoints []string `json:"endpoints"`
}

// Registry configures how containerd reaches a registry.
type Registry struct {
	// Host of the registry in image names, for example docker.io; `_default` for all.
	Host string `json:"host"`
	// Mirrors are the URLs that containerd tries, in order, before the registry itself.
	Mirrors []string `json:"mirrors,omitempty"`
	// OverridePath is true if the path of each mirror replaces /v2.
	OverridePath bool `json:"overridePath,omitempty"`
	// CAFile is a path on the machine, written by the bootstrap data.
	CAFile string `json:"caFile,omitempty"`
	// Username and Password for the registry and its mirrors.
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
}

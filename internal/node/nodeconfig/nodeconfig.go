// Package nodeconfig holds the types that the bootstrap provider writes into bootstrap data and that
// capstan-init reads on the machine. They are the only thing that the two share.
//
// Layer: contract.
package nodeconfig

// Path is where the bootstrap data puts the NodeConfiguration, as YAML, mode 0600.
const Path = "/etc/capstan/node.yaml"

const (
	// APIVersion of NodeConfiguration.
	APIVersion = "node.capstan.dev/v1beta2"
	// Kind of NodeConfiguration.
	Kind = "NodeConfiguration"
)

// Paths on the machine. The bootstrap data writes the CA files; everything that is derived from
// them (leaf certificates, kubeconfigs, component configuration) is written by `capstan-init node up`.
const (
	PKIDir               = "/etc/kubernetes/pki"
	EncryptionConfigPath = "/etc/kubernetes/encryption.yaml"
	AuditPolicyPath      = "/etc/kubernetes/audit-policy.yaml"
	AuthenticationPath   = "/etc/kubernetes/authentication.yaml"
)

// Role is what a machine does in its cluster.
type Role string

const (
	// RoleInit is the first control plane machine: it makes a new etcd cluster.
	RoleInit Role = "init"
	// RoleControlPlane joins an existing control plane.
	RoleControlPlane Role = "control-plane"
	// RoleWorker runs pods only.
	RoleWorker Role = "worker"
)

// NodeConfiguration is all that a machine needs to become a node of its cluster.
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
	// BootstrapToken (id.secret) for TLS bootstrap. Workers only: control plane machines have the
	// CA's key and sign for themselves.
	BootstrapToken string `json:"bootstrapToken,omitempty"`

	Network      Network       `json:"network"`
	Node         Node          `json:"node"`
	Kubelet      Kubelet       `json:"kubelet"`
	ControlPlane *ControlPlane `json:"controlPlane,omitempty"`
	Registries   []Registry    `json:"registries,omitempty"`
}

// Network is what a node needs to know of its cluster's networks.
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

// Node is how the node registers.
type Node struct {
	// Name of the node; the machine's hostname when empty.
	Name   string            `json:"name,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
	// Taints as key=value:Effect or key:Effect.
	Taints []string `json:"taints,omitempty"`
	// ProviderID; that of /run/capstan/metadata.json when empty.
	ProviderID string `json:"providerID,omitempty"`
}

// Arg is an argument of a component, without the leading dashes. Later ones win.
type Arg struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Kubelet holds what the user adds to the kubelet.
type Kubelet struct {
	ExtraArgs []Arg `json:"extraArgs,omitempty"`
}

// Component holds what the user adds to a control plane component.
type Component struct {
	ExtraArgs []Arg `json:"extraArgs,omitempty"`
}

// ControlPlane holds what only control plane machines need.
type ControlPlane struct {
	// APIServerPort is where the machine's API server listens; 6443.
	APIServerPort int32 `json:"apiServerPort"`
	// CertSANs are additional names of the API server's certificate.
	CertSANs []string `json:"certSANs,omitempty"`

	APIServer         Component `json:"apiServer"`
	ControllerManager Component `json:"controllerManager"`
	Scheduler         Component `json:"scheduler"`
	Etcd              Component `json:"etcd"`
	// ExternalEtcd uses an etcd of the user's. The client certificate is in PKIDir as
	// apiserver-etcd-client.{crt,key}, the CA as etcd/ca.crt.
	ExternalEtcd *ExternalEtcd `json:"externalEtcd,omitempty"`

	// AuditPolicy, Authentication and Encryption say that the file of that name was written.
	AuditPolicy    bool `json:"auditPolicy,omitempty"`
	Authentication bool `json:"authentication,omitempty"`
	Encryption     bool `json:"encryption,omitempty"`

	// CertificateValidityDays of the leaf certificates; 365.
	CertificateValidityDays int32 `json:"certificateValidityDays,omitempty"`
}

// ExternalEtcd names an etcd of the user's.
type ExternalEtcd struct {
	Endpoints []string `json:"endpoints"`
}

// Registry configures how containerd reaches a registry.
type Registry struct {
	// Host of the registry as it stands in image names, for example docker.io; `_default` for all.
	Host string `json:"host"`
	// Mirrors are tried in order before the registry itself; URLs.
	Mirrors []string `json:"mirrors,omitempty"`
	// CAFile on the machine, written by the bootstrap data.
	CAFile string `json:"caFile,omitempty"`
	// Username and Password for the registry and its mirrors.
	Username           string `json:"username,omitempty"`
	Password           string `json:"password,omitempty"`
	InsecureSkipVerify bool   `json:"insecureSkipVerify,omitempty"`
}

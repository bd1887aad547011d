package v1beta2

import "reflect"

// PodNetwork selects the pod network.
// +kubebuilder:validation:Enum=Routes;None
type PodNetwork string

const (
	// PodNetworkRoutes connects pods with ptp interfaces and routes inside the machines.
	PodNetworkRoutes PodNetwork = "Routes"
	// PodNetworkNone installs no pod network. The user installs a CNI plugin.
	PodNetworkNone PodNetwork = "None"
)

// KubeProxy selects the implementation of Services.
// +kubebuilder:validation:Enum=NFTables;None
type KubeProxy string

const (
	// KubeProxyNFTables runs kube-proxy in nftables mode.
	KubeProxyNFTables KubeProxy = "NFTables"
	// KubeProxyNone installs no kube-proxy. The user installs a replacement.
	KubeProxyNone KubeProxy = "None"
)

// DNS selects the cluster's DNS server.
// +kubebuilder:validation:Enum=CoreDNS;None
type DNS string

const (
	// DNSCoreDNS runs CoreDNS on the control plane machines.
	DNSCoreDNS DNS = "CoreDNS"
	// DNSNone installs no DNS server.
	DNSNone DNS = "None"
)

// EncryptionMode is the encryption of resources in etcd.
// +kubebuilder:validation:Enum=SecretBox;AESGCM;None
type EncryptionMode string

const (
	// EncryptionSecretBox is XSalsa20 and Poly1305.
	EncryptionSecretBox EncryptionMode = "SecretBox"
	// EncryptionAESGCM is AES-GCM, for environments that require AES and for clusters that write few Secrets: its
	// key is good for about 200,000 writes and is not rotated.
	EncryptionAESGCM EncryptionMode = "AESGCM"
	// EncryptionNone stores resources unencrypted.
	EncryptionNone EncryptionMode = "None"
)

// LocalVolumes selects whether the cluster has volumes on the disks of its machines.
// +kubebuilder:validation:Enum=None;StorageClass;DefaultStorageClass
type LocalVolumes string

const (
	// LocalVolumesNone provides no volumes.
	LocalVolumesNone LocalVolumes = "None"
	// LocalVolumesStorageClass provides the StorageClass capstan-local.
	LocalVolumesStorageClass LocalVolumes = "StorageClass"
	// LocalVolumesDefaultStorageClass makes this StorageClass the default of the cluster.
	LocalVolumesDefaultStorageClass LocalVolumes = "DefaultStorageClass"
)

// ResourceMetrics selects the server of the resource metrics API.
// +kubebuilder:validation:Enum=MetricsServer;None
type ResourceMetrics string

const (
	// ResourceMetricsServer runs metrics-server on the control plane machines.
	ResourceMetricsServer ResourceMetrics = "MetricsServer"
	// ResourceMetricsNone leaves the API out, or to a server of the user's.
	ResourceMetricsNone ResourceMetrics = "None"
)

// EncryptionAlgorithm is the type and the size of private keys.
// +kubebuilder:validation:Enum=ECDSA-P256;ECDSA-P384;RSA-2048;RSA-3072;RSA-4096
type EncryptionAlgorithm string

// ClusterConfiguration contains the settings of a control plane and of its whole cluster.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.coreDNS) || !has(self.dns) || self.dns != 'None'",message="coreDNS cannot be set with dns None: the cluster has no CoreDNS"
// +kubebuilder:validation:XValidation:rule="!has(self.caCertificateValidityDays) || self.caCertificateValidityDays > (has(self.certificateValidityDays) ? self.certificateValidityDays : 365)",message="caCertificateValidityDays must be more than certificateValidityDays (default 365): a certificate ends with the authority that signed it"
type ClusterConfiguration struct {
	// apiServer configures kube-apiserver.
	// +optional
	APIServer APIServerSpec `json:"apiServer,omitempty,omitzero"`

	// controllerManager configures kube-controller-manager.
	// +optional
	ControllerManager ComponentSpec `json:"controllerManager,omitempty,omitzero"`

	// scheduler configures kube-scheduler.
	// +optional
	Scheduler ComponentSpec `json:"scheduler,omitempty,omitzero"`

	// etcd configures etcd.
	// +optional
	Etcd EtcdSpec `json:"etcd,omitempty,omitzero"`

	// encryption configures the encryption of resources in etcd. Default: Secrets, with SecretBox.
	// +optional
	Encryption EncryptionSpec `json:"encryption,omitempty,omitzero"`

	// podNetwork selects the pod network: Routes (default), or None for your own CNI plugin.
	// +optional
	PodNetwork PodNetwork `json:"podNetwork,omitempty"`

	// kubeProxy selects the implementation of Services: NFTables (default), or None for your own proxy.
	// +optional
	KubeProxy KubeProxy `json:"kubeProxy,omitempty"`

	// dns selects the cluster's DNS server: CoreDNS (default) or None.
	// +optional
	DNS DNS `json:"dns,omitempty"`

	// coreDNS configures the cluster's DNS server.
	// +optional
	CoreDNS CoreDNSSpec `json:"coreDNS,omitempty,omitzero"`

	// localVolumes selects volumes on the disks of machines: None (default), StorageClass for the StorageClass capstan-local, or
	// DefaultStorageClass to make it the default. The data of a volume is lost with its machine. A change to None removes nothing:
	// delete the StorageClass capstan-local to stop new volumes.
	// +optional
	LocalVolumes LocalVolumes `json:"localVolumes,omitempty"`

	// resourceMetrics selects the server of metrics.k8s.io, which kubectl top and HorizontalPodAutoscalers need: MetricsServer, or
	// None (default).
	// +optional
	ResourceMetrics ResourceMetrics `json:"resourceMetrics,omitempty"`

	// certificateValidityDays is the validity of the certificates on control plane machines in days. The machines
	// renew them after two thirds of this time. Default: 365.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3650
	CertificateValidityDays int32 `json:"certificateValidityDays,omitempty"`

	// caCertificateValidityDays is the validity of the cluster's certificate authority in days, when Capstan creates it for a new
	// cluster or in a rotation. It must be more than certificateValidityDays. An existing authority stays until the next rotation.
	// The authorities of etcd and of the front proxy are not rotated and always have ten years. Default: 3650.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=36500
	CACertificateValidityDays int32 `json:"caCertificateValidityDays,omitempty"`

	// encryptionAlgorithm is the algorithm of the private keys that Capstan creates for the authorities, the service accounts, the
	// kubeconfig and the certificates on control plane machines: ECDSA-P256 (default), ECDSA-P384, RSA-2048, RSA-3072 or
	// RSA-4096. Existing keys stay: a change is effective for new machines, the next renewal of the kubeconfig and the next
	// rotation of the cluster's certificate authority.
	// +optional
	EncryptionAlgorithm EncryptionAlgorithm `json:"encryptionAlgorithm,omitempty"`
}

// IsDefined reports whether any field is set.
func (c *ClusterConfiguration) IsDefined() bool {
	return !reflect.DeepEqual(c, &ClusterConfiguration{})
}

// CoreDNSSpec configures CoreDNS. It runs on every control plane machine.
// +kubebuilder:validation:MinProperties=1
type CoreDNSSpec struct {
	// upstreams are the servers for names outside the cluster: an IP address, with a port if it is not 53, for example 10.0.0.53
	// or [fd00::53]:5353. Default: the resolvers of the machine.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=15
	// +kubebuilder:validation:items:MinLength=2
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:items:Pattern=`^[0-9a-fA-F.:\[\]]+$`
	Upstreams []string `json:"upstreams,omitempty"`

	// stubDomains are domains with servers of their own.
	// +optional
	// +listType=map
	// +listMapKey=domain
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=50
	StubDomains []StubDomain `json:"stubDomains,omitempty"`
}

// StubDomain is a domain with servers of its own.
type StubDomain struct {
	// domain is the domain with all its names, for example corp.example.com.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9_]([-a-z0-9_]{0,61}[a-z0-9_])?(\.[a-z0-9_]([-a-z0-9_]{0,61}[a-z0-9_])?)*$`
	Domain string `json:"domain,omitempty"`

	// servers are the servers of the domain: an IP address, with a port if it is not 53.
	// +required
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=15
	// +kubebuilder:validation:items:MinLength=2
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:items:Pattern=`^[0-9a-fA-F.:\[\]]+$`
	Servers []string `json:"servers,omitempty"`
}

// ComponentSpec configures a control plane component.
// +kubebuilder:validation:MinProperties=1
type ComponentSpec struct {
	// extraArgs are arguments for the component. They replace Capstan's arguments of the same name.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	ExtraArgs []Arg `json:"extraArgs,omitempty"`

	// env are environment variables of the component. They replace those of the machine and of spec.proxy with the same name. Do not put
	// secrets here: everybody who can read this object can read them.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=50
	Env []EnvVar `json:"env,omitempty"`
}

// APIServerSpec configures kube-apiserver.
// +kubebuilder:validation:MinProperties=1
type APIServerSpec struct {
	// extraArgs are arguments for kube-apiserver. They replace Capstan's arguments of the same name.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	ExtraArgs []Arg `json:"extraArgs,omitempty"`

	// env are environment variables of kube-apiserver. They replace those of the machine and of spec.proxy with the same name. Do not put
	// secrets here: everybody who can read this object can read them.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=50
	Env []EnvVar `json:"env,omitempty"`

	// certSANs are additional names and addresses in the API server's certificate, for example api.example.com, *.example.com or 192.0.2.7.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.all(n, n.matches('^[[:ascii:]]*$'))",message="expected ASCII characters: write an international name in Punycode, for example xn--bcher-kva.example.com"
	CertSANs []string `json:"certSANs,omitempty"`

	// auditPolicy is an audit.k8s.io/v1 Policy. The default policy records the user and the verb of each request,
	// without bodies.
	// +optional
	AuditPolicy Document `json:"auditPolicy,omitempty,omitzero"`

	// authentication is an apiserver.config.k8s.io AuthenticationConfiguration, for example for users of an OIDC
	// provider. Its field anonymous cannot be set: anonymous requests can reach only /livez, /readyz and /healthz.
	// +optional
	Authentication Document `json:"authentication,omitempty,omitzero"`
}

// EtcdSpec configures etcd.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.extraArgs) || !has(self.external)",message="extraArgs cannot be set together with external: they apply to the etcd that Capstan runs"
// +kubebuilder:validation:XValidation:rule="!has(self.env) || !has(self.external)",message="env cannot be set together with external: it applies to the etcd that Capstan runs"
type EtcdSpec struct {
	// extraArgs are arguments for etcd. They replace Capstan's arguments of the same name.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	ExtraArgs []Arg `json:"extraArgs,omitempty"`

	// env are environment variables of etcd. They replace those of the machine and of spec.proxy with the same name. Names that begin with
	// ETCD_ are refused, because etcd reads them as arguments: use extraArgs. Do not put secrets here: everybody who can read this object can
	// read them.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=50
	Env []EnvVar `json:"env,omitempty"`

	// external uses an existing etcd instead of etcd on the machines.
	// +optional
	External ExternalEtcdSpec `json:"external,omitempty,omitzero"`
}

// ExternalEtcdSpec identifies an existing etcd. The Secret <cluster>-etcd (tls.crt) contains its certificate
// authority. The Secret <cluster>-apiserver-etcd-client contains the client certificate and key.
type ExternalEtcdSpec struct {
	// endpoints are the URLs of the members.
	// +required
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=20
	// +kubebuilder:validation:items:MinLength=9
	// +kubebuilder:validation:items:MaxLength=512
	// +kubebuilder:validation:items:Pattern=`^https://.+`
	Endpoints []string `json:"endpoints,omitempty"`
}

// EncryptionSpec configures the encryption of resources in etcd.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.configuration) || (!has(self.mode) && !has(self.resources))",message="configuration cannot be set together with mode or resources: it is a complete EncryptionConfiguration"
// +kubebuilder:validation:XValidation:rule="!has(self.mode) || self.mode != 'None' || !has(self.resources)",message="resources cannot be set with mode None"
type EncryptionSpec struct {
	// mode is the encryption: SecretBox (default), AESGCM or None. The key is in the Secret <cluster>-encryption.
	// +optional
	Mode EncryptionMode `json:"mode,omitempty"`

	// resources are the encrypted resources, for example configmaps or widgets.example.com. Default: secrets.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources,omitempty"`

	// configuration is a complete apiserver.config.k8s.io/v1 EncryptionConfiguration, for example for a KMS.
	// +optional
	Configuration EncryptionConfigurationSource `json:"configuration,omitempty,omitzero"`
}

// EncryptionConfigurationSource is the source of a complete EncryptionConfiguration. It contains keys, so it
// cannot be inline.
type EncryptionConfigurationSource struct {
	// secret names a key of a Secret in the namespace of the cluster.
	// +required
	Secret SecretKeyReference `json:"secret,omitempty,omitzero"`
}

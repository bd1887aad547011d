package v1beta2

import "reflect"

// PodNetwork says who connects pods.
// +kubebuilder:validation:Enum=Routes;None
type PodNetwork string

const (
	// PodNetworkRoutes connects pods with ptp interfaces and routes inside the machines.
	PodNetworkRoutes PodNetwork = "Routes"
	// PodNetworkNone leaves the pod network to a CNI of the user's.
	PodNetworkNone PodNetwork = "None"
)

// KubeProxy says how Services are reached.
// +kubebuilder:validation:Enum=NFTables;None
type KubeProxy string

const (
	// KubeProxyNFTables runs kube-proxy in nftables mode.
	KubeProxyNFTables KubeProxy = "NFTables"
	// KubeProxyNone leaves Services to a proxy of the user's.
	KubeProxyNone KubeProxy = "None"
)

// DNS says who serves the cluster's names.
// +kubebuilder:validation:Enum=CoreDNS;None
type DNS string

const (
	// DNSCoreDNS runs CoreDNS on the control plane machines.
	DNSCoreDNS DNS = "CoreDNS"
	// DNSNone leaves DNS to the user.
	DNSNone DNS = "None"
)

// EncryptionMode says how secrets are encrypted in etcd.
// +kubebuilder:validation:Enum=SecretBox;AESGCM;None
type EncryptionMode string

const (
	// EncryptionSecretBox is XSalsa20 and Poly1305.
	EncryptionSecretBox EncryptionMode = "SecretBox"
	// EncryptionAESGCM is AES-GCM, for where AES is prescribed, and for clusters that write few secrets: its key is good for some
	// 200,000 writes and is not rotated.
	EncryptionAESGCM EncryptionMode = "AESGCM"
	// EncryptionNone stores everything as it is.
	EncryptionNone EncryptionMode = "None"
)

// ClusterConfiguration holds the settings of a control plane and of its whole cluster.
// +kubebuilder:validation:MinProperties=1
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

	// encryption says what is encrypted in etcd, and how. Secrets, with SecretBox, when not set.
	// +optional
	Encryption EncryptionSpec `json:"encryption,omitempty,omitzero"`

	// podNetwork says who connects pods: Routes (the default) or None, for a CNI of your own.
	// +optional
	PodNetwork PodNetwork `json:"podNetwork,omitempty"`

	// kubeProxy says how Services are reached: NFTables (the default) or None, for a proxy of your own.
	// +optional
	KubeProxy KubeProxy `json:"kubeProxy,omitempty"`

	// dns says who serves the cluster's names: CoreDNS (the default) or None.
	// +optional
	DNS DNS `json:"dns,omitempty"`

	// certificateValidityDays is how long the certificates on the machines are valid; they are
	// renewed in time. 365 when not set.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3650
	CertificateValidityDays int32 `json:"certificateValidityDays,omitempty"`
}

// IsDefined says whether anything is set.
func (c *ClusterConfiguration) IsDefined() bool {
	return !reflect.DeepEqual(c, &ClusterConfiguration{})
}

// ComponentSpec configures a control plane component.
// +kubebuilder:validation:MinProperties=1
type ComponentSpec struct {
	// extraArgs are arguments for the component. They win over Capstan's own.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	ExtraArgs []Arg `json:"extraArgs,omitempty"`
}

// APIServerSpec configures kube-apiserver.
// +kubebuilder:validation:MinProperties=1
type APIServerSpec struct {
	// extraArgs are arguments for kube-apiserver. They win over Capstan's own.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	ExtraArgs []Arg `json:"extraArgs,omitempty"`

	// certSANs are additional names and addresses of the API server's certificate.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	CertSANs []string `json:"certSANs,omitempty"`

	// auditPolicy is an audit.k8s.io/v1 Policy. No audit log when not set.
	// +optional
	AuditPolicy Document `json:"auditPolicy,omitempty,omitzero"`

	// authentication is an apiserver.config.k8s.io AuthenticationConfiguration, for users of an
	// OIDC provider. Anonymous access is limited to health endpoints unless it says otherwise.
	// +optional
	Authentication Document `json:"authentication,omitempty,omitzero"`
}

// EtcdSpec configures etcd.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.extraArgs) || !has(self.external)",message="extraArgs are for the etcd that Capstan runs, and cannot be used together with external"
type EtcdSpec struct {
	// extraArgs are arguments for etcd. They win over Capstan's own.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	ExtraArgs []Arg `json:"extraArgs,omitempty"`

	// external uses an etcd of the user's instead of one on the machines.
	// +optional
	External ExternalEtcdSpec `json:"external,omitempty,omitzero"`
}

// ExternalEtcdSpec names an etcd of the user's. Its certificate authority is in the secret
// <cluster>-etcd (tls.crt), the client's certificate and key in <cluster>-apiserver-etcd-client.
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

// EncryptionSpec says what is encrypted in etcd, and how.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.configuration) || (!has(self.mode) && !has(self.resources))",message="configuration says everything itself, and cannot be used together with mode or resources"
// +kubebuilder:validation:XValidation:rule="!has(self.mode) || self.mode != 'None' || !has(self.resources)",message="resources make no sense with mode None"
type EncryptionSpec struct {
	// mode says how resources are encrypted: SecretBox (the default), AESGCM or None. The key is
	// in the secret <cluster>-encryption.
	// +optional
	Mode EncryptionMode `json:"mode,omitempty"`

	// resources that are encrypted, for example configmaps or widgets.example.com. Secrets when not set.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources,omitempty"`

	// configuration is a complete apiserver.config.k8s.io/v1 EncryptionConfiguration of the user's,
	// for example for a KMS.
	// +optional
	Configuration EncryptionConfigurationSource `json:"configuration,omitempty,omitzero"`
}

// EncryptionConfigurationSource is where a complete EncryptionConfiguration comes from: it holds
// keys, so it is never given in place.
type EncryptionConfigurationSource struct {
	// secret in the namespace of the cluster.
	// +required
	Secret SecretKeyReference `json:"secret,omitempty,omitzero"`
}

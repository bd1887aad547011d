package v1beta2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// Role is what a machine does in its cluster.
// +kubebuilder:validation:Enum=Init;ControlPlane;Worker
type Role string

// KubernetesVersionAnnotation on a Secret with bootstrap data says for which version of Kubernetes it was made. A
// MachinePool that has a new version already keeps the old Secret for a moment.
const KubernetesVersionAnnotation = "bootstrap.capstan.dev/kubernetes-version"

// AuthoritiesAnnotation on a Secret with bootstrap data names the certificate authorities of the cluster that are in
// it, by their fingerprints. The first one signs.
const AuthoritiesAnnotation = "bootstrap.capstan.dev/certificate-authorities"

const (
	// RoleInit is the first control plane machine: it makes a new etcd cluster.
	RoleInit Role = "Init"
	// RoleControlPlane joins an existing control plane.
	RoleControlPlane Role = "ControlPlane"
	// RoleWorker runs pods only.
	RoleWorker Role = "Worker"
)

// Encoding of a file's content.
// +kubebuilder:validation:Enum=base64;gzip;gzip+base64
type Encoding string

const (
	// EncodingBase64 is content encoded with base64.
	EncodingBase64 Encoding = "base64"
	// EncodingGzip is content compressed with gzip.
	EncodingGzip Encoding = "gzip"
	// EncodingGzipBase64 is content compressed with gzip, then encoded with base64.
	EncodingGzipBase64 Encoding = "gzip+base64"
)

const (
	// DataSecretAvailableCondition says whether the bootstrap data secret was made.
	DataSecretAvailableCondition = "DataSecretAvailable"
	// DataSecretAvailableReason: the secret is there.
	DataSecretAvailableReason = "Available"
	// DataSecretNotAvailableReason: the secret could not be made for a reason of ours; retried.
	DataSecretNotAvailableReason = "NotAvailable"
	// WaitingForEndpointReason: the cluster's endpoint is not known yet.
	WaitingForEndpointReason = "WaitingForControlPlaneEndpoint"
	// WaitingForControlPlaneReason: a control plane of another kind is not initialized yet.
	WaitingForControlPlaneReason = "WaitingForControlPlaneInitialized"
	// CertificatesMissingReason: a certificate authority's secret is missing or broken.
	CertificatesMissingReason = "CertificatesNotAvailable"
	// SecretMissingReason: a secret that the spec names is missing, or lacks the key.
	SecretMissingReason = "ReferencedSecretNotAvailable"
	// InvalidConfigReason: the spec, or what the Cluster or the Machine says, cannot be rendered;
	// a change by the user is needed.
	InvalidConfigReason = "InvalidConfiguration"

	// BootstrapTokenAvailableCondition says whether the machine's bootstrap token works in the
	// workload cluster. Only on workers, and only until the machine has joined.
	BootstrapTokenAvailableCondition = "BootstrapTokenAvailable"
	// BootstrapTokenAvailableReason: the token works.
	BootstrapTokenAvailableReason = "Available"
	// BootstrapTokenWaitingReason: the workload cluster is not reachable yet.
	BootstrapTokenWaitingReason = "WaitingForConnection"
	// BootstrapTokenRemovedReason: the machine has joined, or needs no token; it does not exist any more.
	BootstrapTokenRemovedReason = "NoLongerNeeded"
)

// CapstanConfigSpec is the desired state of a CapstanConfig: what a machine needs to become a node.
// It is read once, when the machine's bootstrap data is made.
// +kubebuilder:validation:XValidation:rule="!has(self.restore) || (has(self.role) && self.role == 'Init')",message="restore is for the first control plane machine: role Init"
// +kubebuilder:validation:XValidation:rule="!has(self.cluster) || !has(self.role) || self.role != 'Worker'",message="cluster is for control plane machines: a worker takes these settings from its cluster"
type CapstanConfigSpec struct {
	// role of the machine in its cluster. The control plane provider sets it on the machines that
	// it makes. Worker when not set and the Machine is not a control plane machine.
	// +optional
	Role Role `json:"role,omitempty"`

	// cluster holds the settings of the control plane and of the whole cluster. Control plane
	// machines only.
	// +optional
	Cluster ClusterConfiguration `json:"cluster,omitempty,omitzero"`

	// kubelet configures the kubelet.
	// +optional
	Kubelet KubeletSpec `json:"kubelet,omitempty,omitzero"`

	// node is how the node registers.
	// +optional
	Node NodeSpec `json:"node,omitempty,omitzero"`

	// files are written to the machine before anything is started.
	// +optional
	// +listType=map
	// +listMapKey=path
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=200
	Files []File `json:"files,omitempty"`

	// preCommands are shell commands that run before the node is started.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=10240
	PreCommands []string `json:"preCommands,omitempty"`

	// postCommands are shell commands that run after the node was started.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=10240
	PostCommands []string `json:"postCommands,omitempty"`

	// registries configures how images are pulled: mirrors, credentials, certificates.
	// +optional
	// +listType=map
	// +listMapKey=host
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	Registries []Registry `json:"registries,omitempty"`

	// restore is the backup of etcd that the first control plane machine begins with. The control plane provider sets it.
	// +optional
	Restore RestoreSource `json:"restore,omitempty,omitzero"`
}

// RestoreSource is a backup of etcd.
type RestoreSource struct {
	// name of the backup.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// folder of the backup in the store.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Folder string `json:"folder,omitempty"`

	// store that has the backup.
	// +required
	Store etcdv1.BackupStore `json:"store,omitempty,omitzero"`

	// sha256 of the snapshot, if it is known; what its .json file in the store says counts otherwise.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`

	// keys of this cluster: those of the backup must be the same.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	Keys []etcdv1.BackupKey `json:"keys,omitempty"`

	// otherAuthorities allows all keys but the encryption key to be other ones.
	// +optional
	OtherAuthorities *bool `json:"otherAuthorities,omitempty"`
}

// Arg is an argument of a component.
type Arg struct {
	// name of the argument, without leading dashes.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[a-z0-9][a-zA-Z0-9._-]*$`
	Name string `json:"name,omitempty"`

	// value of the argument. It may be empty.
	// +optional
	// +kubebuilder:validation:MaxLength=10240
	Value string `json:"value,omitempty"`
}

// KubeletSpec configures the kubelet.
// +kubebuilder:validation:MinProperties=1
type KubeletSpec struct {
	// extraArgs are arguments for the kubelet. They win over Capstan's own.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	ExtraArgs []Arg `json:"extraArgs,omitempty"`
}

// NodeSpec is how a node registers.
// +kubebuilder:validation:MinProperties=1
type NodeSpec struct {
	// name of the node; the machine's host name when not set.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name,omitempty"`

	// labels that the node registers with. A kubelet may not set labels of kubernetes.io and k8s.io
	// other than those that Kubernetes allows it; set them on the Machine instead.
	// +optional
	Labels map[string]string `json:"labels,omitempty"`

	// taints that the node registers with. Control plane machines have
	// node-role.kubernetes.io/control-plane:NoSchedule when not set; an empty list means none.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=50
	Taints *[]Taint `json:"taints,omitempty"`
}

// Taint keeps pods that do not tolerate it away from a node.
type Taint struct {
	// key of the taint.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`
	Key string `json:"key,omitempty"`

	// value of the taint.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`
	Value string `json:"value,omitempty"`

	// effect on pods that do not tolerate the taint.
	// +required
	// +kubebuilder:validation:Enum=NoSchedule;PreferNoSchedule;NoExecute
	Effect corev1.TaintEffect `json:"effect,omitempty"`
}

// File is a file to write to a machine.
// +kubebuilder:validation:XValidation:rule="!has(self.content) || !has(self.contentFrom)",message="content and contentFrom cannot be used together"
type File struct {
	// path of the file, absolute.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:Pattern=`^/`
	Path string `json:"path,omitempty"`

	// owner of the file as user:group. root:root when not set.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Owner string `json:"owner,omitempty"`

	// permissions of the file in octal. 0644 when not set, 0600 when the content comes from a secret.
	// +optional
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=5
	// +kubebuilder:validation:Pattern=`^0?[0-7]{3,4}$`
	Permissions string `json:"permissions,omitempty"`

	// encoding of the content. Plain text when not set.
	// +optional
	Encoding Encoding `json:"encoding,omitempty"`

	// append adds the content to a file that is there already.
	// +optional
	Append *bool `json:"append,omitempty"`

	// content of the file.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=262144
	Content string `json:"content,omitempty"`

	// contentFrom takes the content from elsewhere.
	// +optional
	ContentFrom ContentSource `json:"contentFrom,omitempty,omitzero"`
}

// ContentSource is where content comes from.
type ContentSource struct {
	// secret in the namespace of the cluster.
	// +required
	Secret SecretKeyReference `json:"secret,omitempty,omitzero"`
}

// Document is a text given in place or taken from a secret.
// +kubebuilder:validation:XValidation:rule="has(self.content) != has(self.contentFrom)",message="exactly one of content and contentFrom is needed"
type Document struct {
	// content in place.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=262144
	Content string `json:"content,omitempty"`

	// contentFrom takes the content from elsewhere.
	// +optional
	ContentFrom ContentSource `json:"contentFrom,omitempty,omitzero"`
}

// SecretKeyReference names a key of a Secret in the namespace of the cluster.
type SecretKeyReference struct {
	// name of the secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// key in the secret's data.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Key string `json:"key,omitempty"`
}

// SecretReference names a Secret in the namespace of the cluster.
type SecretReference struct {
	// name of the secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
}

// Registry configures how images of a registry are pulled.
type Registry struct {
	// host of the registry as it stands in image names, for example docker.io; _default for all
	// that are not listed.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^(_default|[a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9])?(:[0-9]{1,5})?)$`
	Host string `json:"host,omitempty"`

	// mirrors are tried in order, before the registry itself.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=20
	// +kubebuilder:validation:items:MinLength=8
	// +kubebuilder:validation:items:MaxLength=512
	// +kubebuilder:validation:items:Pattern=`^https?://.+`
	Mirrors []string `json:"mirrors,omitempty"`

	// credentials names a secret with the keys username and password (kubernetes.io/basic-auth),
	// for the registry and its mirrors.
	// +optional
	Credentials SecretReference `json:"credentials,omitempty,omitzero"`

	// ca names the certificate authority that signed the certificates of the registry and its mirrors.
	// +optional
	CA SecretKeyReference `json:"ca,omitempty,omitzero"`

	// insecureSkipVerify turns the check of the registry's certificate off.
	// +optional
	InsecureSkipVerify *bool `json:"insecureSkipVerify,omitempty"`
}

// CapstanConfigStatus is the observed state of a CapstanConfig. All of it can be rebuilt from the
// spec, the Machine and the secret (ALL-12).
// +kubebuilder:validation:MinProperties=1
type CapstanConfigStatus struct {
	// conditions are the observations of the current state: Ready, DataSecretAvailable,
	// BootstrapTokenAvailable, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization holds the observations that orchestrate the first provisioning.
	// +optional
	Initialization CapstanConfigInitializationStatus `json:"initialization,omitempty,omitzero"`

	// dataSecretName is the secret with the bootstrap data; it has the name of the CapstanConfig (BC-02).
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	DataSecretName string `json:"dataSecretName,omitempty"`

	// observedGeneration is the latest generation that the controller has seen.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// CapstanConfigInitializationStatus holds the observations that orchestrate the first provisioning.
// +kubebuilder:validation:MinProperties=1
type CapstanConfigInitializationStatus struct {
	// dataSecretCreated is true when the bootstrap data secret is there (BC-03).
	// +optional
	DataSecretCreated *bool `json:"dataSecretCreated,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanconfigs,shortName=capc,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta2"
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Role",type="string",JSONPath=".spec.role",description="Role of the machine",priority=10
// +kubebuilder:printcolumn:name="Data secret",type="string",JSONPath=".status.dataSecretName",description="Secret with the bootstrap data"
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The bootstrap data is there"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Why"
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanConfig is the bootstrap configuration of a machine (BC-01).
type CapstanConfig struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the bootstrap configuration.
	// +optional
	Spec CapstanConfigSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the bootstrap configuration.
	// +optional
	Status CapstanConfigStatus `json:"status,omitempty,omitzero"`
}

// GetConditions returns the conditions.
func (c *CapstanConfig) GetConditions() []metav1.Condition { return c.Status.Conditions }

// SetConditions sets the conditions.
func (c *CapstanConfig) SetConditions(conditions []metav1.Condition) {
	c.Status.Conditions = conditions
}

// +kubebuilder:object:root=true

// CapstanConfigList is a list of CapstanConfigs.
type CapstanConfigList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanConfigs.
	Items []CapstanConfig `json:"items"`
}

// CapstanConfigTemplateSpec is the desired state of a CapstanConfigTemplate.
type CapstanConfigTemplateSpec struct {
	// template is what CapstanConfigs are made from.
	// +required
	Template CapstanConfigTemplateResource `json:"template,omitempty,omitzero"`
}

// CapstanConfigTemplateResource is what CapstanConfigs are made from.
// +kubebuilder:validation:MinProperties=1
type CapstanConfigTemplateResource struct {
	// metadata is the labels and annotations of the CapstanConfigs.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the CapstanConfigs.
	// +optional
	Spec CapstanConfigSpec `json:"spec,omitempty,omitzero"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanconfigtemplates,shortName=capct,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta2"
// +kubebuilder:storageversion
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanConfigTemplate is a template of CapstanConfigs, for MachineDeployments and ClusterClasses (BC-01).
type CapstanConfigTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It cannot be changed.
	// +required
	Spec CapstanConfigTemplateSpec `json:"spec,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanConfigTemplateList is a list of CapstanConfigTemplates.
type CapstanConfigTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanConfigTemplates.
	Items []CapstanConfigTemplate `json:"items"`
}

func init() {
	objectTypes = append(objectTypes, &CapstanConfig{}, &CapstanConfigList{},
		&CapstanConfigTemplate{}, &CapstanConfigTemplateList{})
}

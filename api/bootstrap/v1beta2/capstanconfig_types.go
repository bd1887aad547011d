package v1beta2

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// Role is the role of a machine in its cluster.
// +kubebuilder:validation:Enum=Init;ControlPlane;Worker
type Role string

// KubernetesVersionAnnotation on a Secret with bootstrap data is the Kubernetes version that the data was rendered
// for. A MachinePool with a new version keeps the old Secret for a short time.
const KubernetesVersionAnnotation = "bootstrap.capstan.dev/kubernetes-version"

// AuthoritiesAnnotation on a Secret with bootstrap data contains the fingerprints of the certificate authorities
// in it. The first authority signs.
const AuthoritiesAnnotation = "bootstrap.capstan.dev/certificate-authorities"

// EtcdCertificatesAnnotation on a Secret with bootstrap data contains the fingerprints of the certificates of an external etcd in
// it: those of its authorities, and that of the client certificate of the API server. Other data does not have it.
const EtcdCertificatesAnnotation = "bootstrap.capstan.dev/etcd-certificates"

// TokenIDsAnnotation on a Secret with bootstrap data has the ids of the bootstrap tokens with which its machines may
// join, separated by commas: first that of the token in the data, then those of former tokens that machines may still
// have. An id is no secret.
const TokenIDsAnnotation = "bootstrap.capstan.dev/token-ids"

// PoolTokenTTL is the validity of the bootstrap token of a pool. After half of it the pool gets another token. A machine with the
// previous token has the other half to join.
const PoolTokenTTL = 30 * time.Minute

// UpdateIDAnnotation on a Secret with update data has status.update.id of the CapstanConfig.
const UpdateIDAnnotation = "bootstrap.capstan.dev/update-id"

// ConfigGenerationAnnotation on a Secret with update data has the generation of the CapstanConfig in it.
const ConfigGenerationAnnotation = "bootstrap.capstan.dev/config-generation"

// UpdateSecretName returns the name of the Secret with the data of an update in place, by the name of the Secret with the
// bootstrap data.
func UpdateSecretName(dataSecretName string) string { return dataSecretName + "-update" }

const (
	// RoleInit is the first control plane machine, which creates a new etcd cluster.
	RoleInit Role = "Init"
	// RoleControlPlane joins an existing control plane.
	RoleControlPlane Role = "ControlPlane"
	// RoleWorker runs pods only.
	RoleWorker Role = "Worker"
)

// IsControlPlane reports whether the role is one of control plane machines.
func (r Role) IsControlPlane() bool { return r == RoleInit || r == RoleControlPlane }

// Encoding is the encoding of a file's content.
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

// Conditions of a CapstanConfig and their reasons. Ready summarizes the conditions.
const (
	// DataSecretAvailableCondition is true when the Secret with the bootstrap data exists.
	DataSecretAvailableCondition = "DataSecretAvailable"
	// DataSecretAvailableReason: the Secret exists.
	DataSecretAvailableReason = "Available"
	// DataSecretUsedReason: the Secret was deleted after its machine had used it. It is not created again, because its
	// content would be that of the current specification, and not that of the machine.
	DataSecretUsedReason = "Used"
	// DataSecretNotAvailableReason: an internal error prevented the creation of the Secret. The controller
	// retries.
	DataSecretNotAvailableReason = "NotAvailable"
	// WaitingForEndpointReason: the cluster's endpoint is not known yet.
	WaitingForEndpointReason = "WaitingForControlPlaneEndpoint"
	// WaitingForControlPlaneReason: the control plane is of another kind and not initialized yet.
	WaitingForControlPlaneReason = "WaitingForControlPlaneInitialized"
	// CertificatesMissingReason: the Secret of a certificate authority is missing or invalid.
	CertificatesMissingReason = "CertificatesNotAvailable"
	// SecretMissingReason: a Secret or a ConfigMap in spec is missing or lacks the key.
	SecretMissingReason = "ReferencedSecretNotAvailable"
	// InvalidConfigReason: the spec, the Cluster or the Machine is invalid. The user has to change it.
	InvalidConfigReason = "InvalidConfiguration"

	// BootstrapTokenAvailableCondition is true when the machine's bootstrap token works in the workload cluster.
	// Only workers have it, and only until the machine has joined.
	BootstrapTokenAvailableCondition = "BootstrapTokenAvailable"
	// BootstrapTokenAvailableReason: the token works.
	BootstrapTokenAvailableReason = "Available"
	// BootstrapTokenWaitingReason: the workload cluster is not reachable yet.
	BootstrapTokenWaitingReason = "WaitingForConnection"
	// BootstrapTokenRemovedReason: the machine has joined or needs no token. The token was removed. The condition is
	// False with this reason, and that is the final state: nothing is wrong.
	BootstrapTokenRemovedReason = "NoLongerNeeded"

	// UpdateDataAvailableCondition is true when the Secret with the data of an update in place contains the current
	// specification. It exists only while the CapstanConfig has the annotation of an update in progress. Its reasons are those
	// of DataSecretAvailable.
	UpdateDataAvailableCondition = "UpdateDataAvailable"
)

// CapstanConfigSpec is the desired state of a CapstanConfig: the configuration that turns a machine into a node.
// It is read when the bootstrap data is created, and by updates of the machine in place.
// +kubebuilder:validation:XValidation:rule="!has(self.restore) || (has(self.role) && self.role == 'Init')",message="restore requires role Init: only the first control plane machine can start from a backup"
// +kubebuilder:validation:XValidation:rule="!has(self.cluster) || !has(self.role) || self.role != 'Worker'",message="cluster requires a control plane role: a worker uses the settings of its control plane"
type CapstanConfigSpec struct {
	// role is the role of the machine in its cluster. The control plane provider sets it for its machines.
	// Default: Worker, if the Machine is not a control plane machine.
	// +optional
	Role Role `json:"role,omitempty"`

	// cluster contains the settings of the control plane and of the whole cluster. Only for control plane
	// machines.
	// +optional
	Cluster ClusterConfiguration `json:"cluster,omitempty,omitzero"`

	// kubelet configures the kubelet.
	// +optional
	Kubelet KubeletSpec `json:"kubelet,omitempty,omitzero"`

	// node configures the registration of the Node.
	// +optional
	Node NodeSpec `json:"node,omitempty,omitzero"`

	// files are written to the machine before any service starts.
	// +optional
	// +listType=map
	// +listMapKey=path
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=200
	Files []File `json:"files,omitempty"`

	// users are accounts of the machine. They exist before preCommands run, and files can name them as owners. They cannot change in
	// place.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Users []User `json:"users,omitempty"`

	// preCommands are shell commands that run before the node starts.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=10240
	PreCommands []string `json:"preCommands,omitempty"`

	// postCommands are shell commands that run after the node has started.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=10240
	PostCommands []string `json:"postCommands,omitempty"`

	// updateCommands are shell commands that every update of the machine in place runs, after it has written the
	// files. They do not run when the machine starts for the first time. An interrupted update runs them again, so
	// they must be repeatable. A command that fails fails the update.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=10240
	UpdateCommands []string `json:"updateCommands,omitempty"`

	// registries configures image registries: mirrors, credentials and certificates.
	// +optional
	// +listType=map
	// +listMapKey=host
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	Registries []Registry `json:"registries,omitempty"`

	// images are images that the machine pulls before its kubelet starts, by their full names with a tag or a digest, for example
	// registry.example.com/team/app:v1. registries and proxy apply. The machine does not become a Node until it has them all; it
	// tries again every ten seconds.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=50
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self.all(i, i.matches('^[a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9])?(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+(:[a-zA-Z0-9_][-a-zA-Z0-9_.]{0,127})?(@sha256:[0-9a-f]{64})?$') && i.matches('(:[a-zA-Z0-9_][-a-zA-Z0-9_.]{0,127}|@sha256:[0-9a-f]{64})$'))",message="expected the full names of images with a registry and a tag or a digest, for example docker.io/library/nginx:1.29"
	Images []string `json:"images,omitempty"`

	// proxy is the HTTP proxy through which containerd and the kubelet reach other hosts.
	// +optional
	Proxy ProxySpec `json:"proxy,omitempty,omitzero"`

	// kubeProxy configures kube-proxy on the machine.
	// +optional
	KubeProxy KubeProxySpec `json:"kubeProxy,omitempty,omitzero"`

	// restore is the etcd backup from which the first control plane machine starts. The control plane provider
	// sets it.
	// +optional
	Restore RestoreSource `json:"restore,omitempty,omitzero"`
}

// RestoreSource identifies a backup of etcd.
type RestoreSource struct {
	// name is the name of the backup.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// folder is the folder of the backup in the store.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Folder string `json:"folder,omitempty"`

	// store is the store that contains the backup.
	// +required
	Store etcdv1.BackupStore `json:"store,omitempty,omitzero"`

	// sha256 is the checksum of the snapshot, if known. Otherwise the checksum in the backup's .json file is used.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`

	// keys are the keys of this cluster. The keys of the backup must be equal.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	Keys []etcdv1.BackupKey `json:"keys,omitempty"`

	// otherAuthorities allows a backup with other keys, except for the encryption key.
	// +optional
	OtherAuthorities *bool `json:"otherAuthorities,omitempty"`
}

// Arg is a command-line argument of a component.
type Arg struct {
	// name is the name of the argument without leading dashes.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[a-z0-9][a-zA-Z0-9._-]*$`
	Name string `json:"name,omitempty"`

	// value is the value of the argument. It may be empty.
	// +optional
	// +kubebuilder:validation:MaxLength=10240
	// +kubebuilder:validation:Pattern=`^[^\x00]*$`
	Value string `json:"value,omitempty"`
}

// EnvVar is an environment variable of a component.
type EnvVar struct {
	// name is the name of the variable, for example GOMEMLIMIT.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^[A-Za-z_][A-Za-z0-9_]*$`
	Name string `json:"name,omitempty"`

	// value is the value of the variable. It may be empty.
	// +optional
	// +kubebuilder:validation:MaxLength=4096
	// +kubebuilder:validation:Pattern=`^[^\x00]*$`
	Value string `json:"value,omitempty"`
}

// KubeletSpec configures the kubelet.
// +kubebuilder:validation:MinProperties=1
type KubeletSpec struct {
	// extraArgs are arguments for the kubelet. They replace Capstan's arguments of the same name.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	ExtraArgs []Arg `json:"extraArgs,omitempty"`

	// env are environment variables of the kubelet. They replace those of the machine and of spec.proxy with the same name. Do not put
	// secrets here: everybody who can read this object can read them.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=50
	Env []EnvVar `json:"env,omitempty"`

	// configuration has fields of a kubelet.config.k8s.io/v1beta1 KubeletConfiguration. They are merged into that of Capstan as a
	// JSON merge patch. Fields that Capstan needs for itself are refused. 16 KiB at most.
	// +optional
	// +kubebuilder:pruning:PreserveUnknownFields
	Configuration runtime.RawExtension `json:"configuration,omitempty,omitzero"`
}

// KubeProxySpec configures kube-proxy.
// +kubebuilder:validation:MinProperties=1
type KubeProxySpec struct {
	// env are environment variables of kube-proxy. They replace those of the machine and of spec.proxy with the same name. Do not put
	// secrets here: everybody who can read this object can read them.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=50
	Env []EnvVar `json:"env,omitempty"`

	// configuration has fields of a kubeproxy.config.k8s.io/v1alpha1 KubeProxyConfiguration. They are merged into that of Capstan
	// as a JSON merge patch. Fields that Capstan needs for itself are refused. 16 KiB at most.
	// +optional
	// +kubebuilder:pruning:PreserveUnknownFields
	Configuration runtime.RawExtension `json:"configuration,omitempty,omitzero"`
}

// ProxySpec is an HTTP proxy. The networks of pods, Services and the machine, the cluster's domain and the endpoint are always
// reached without it.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="has(self.http) || has(self.https)",message="http or https must be set: noProxy and controlPlane have no effect without a proxy"
type ProxySpec struct {
	// http is the URL of the proxy for requests to http URLs, for example http://proxy.example.com:3128.
	// +optional
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="!self.contains('@')",message="a proxy URL must not contain credentials: every program on the machine could read them. Let the proxy accept the machines by their addresses"
	// +kubebuilder:validation:XValidation:rule="isURL(self) && url(self).getScheme() in ['http', 'https'] && url(self).getHostname() != '' && url(self).getEscapedPath() in ['', '/'] && self.matches('^[!-~]+$') && !self.contains('?') && !self.contains('#')",message="expected the URL of a proxy: http:// or https://, a host and a port, for example http://proxy.example.com:3128"
	HTTP string `json:"http,omitempty"`

	// https is the URL of the proxy for requests to https URLs. Its own scheme is usually http.
	// +optional
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="!self.contains('@')",message="a proxy URL must not contain credentials: every program on the machine could read them. Let the proxy accept the machines by their addresses"
	// +kubebuilder:validation:XValidation:rule="isURL(self) && url(self).getScheme() in ['http', 'https'] && url(self).getHostname() != '' && url(self).getEscapedPath() in ['', '/'] && self.matches('^[!-~]+$') && !self.contains('?') && !self.contains('#')",message="expected the URL of a proxy: http:// or https://, a host and a port, for example http://proxy.example.com:3128"
	HTTPS string `json:"https,omitempty"`

	// noProxy are hosts, domains, addresses and networks that are reached directly, for example registry.example.com,
	// .example.com, 10.0.0.9 or 10.0.0.0/8.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	// +kubebuilder:validation:items:Pattern=`^[a-zA-Z0-9.:/_-]+$`
	NoProxy []string `json:"noProxy,omitempty"`

	// controlPlane lets the API server use the proxy too, for example for an OIDC provider or a webhook outside the cluster.
	// Default: false.
	// +optional
	ControlPlane *bool `json:"controlPlane,omitempty"`
}

// NodeSpec configures the registration of a Node.
// +kubebuilder:validation:MinProperties=1
type NodeSpec struct {
	// name is the name of the Node. Default: the machine's host name.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name,omitempty"`

	// labels are the labels with which the Node registers. Kubernetes forbids most labels of kubernetes.io and
	// k8s.io to kubelets: set those on the Machine.
	// +optional
	Labels map[string]string `json:"labels,omitempty"`

	// taints are the taints with which the Node registers. Default for control plane machines:
	// node-role.kubernetes.io/control-plane:NoSchedule. An empty list means no taint.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=50
	Taints *[]Taint `json:"taints,omitempty"`
}

// Taint excludes pods without a matching toleration from a node.
type Taint struct {
	// key is the key of the taint.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`
	Key string `json:"key,omitempty"`

	// value is the value of the taint.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`
	Value string `json:"value,omitempty"`

	// effect is the effect on pods that do not tolerate the taint.
	// +required
	// +kubebuilder:validation:Enum=NoSchedule;PreferNoSchedule;NoExecute
	Effect corev1.TaintEffect `json:"effect,omitempty"`
}

// File is a file on a machine.
// +kubebuilder:validation:XValidation:rule="!has(self.repeatable) || !self.repeatable || !has(self.append) || !self.append",message="repeatable and append cannot be used together: every update would add the content again"
// +kubebuilder:validation:XValidation:rule="!has(self.content) || !has(self.contentFrom)",message="content and contentFrom cannot be used together"
type File struct {
	// path is the absolute path of the file in its shortest form.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:Pattern=`^/`
	Path string `json:"path,omitempty"`

	// owner is the owner of the file as user:group. Default: root:root.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.matches('^[^:[:space:]]*(:[^:[:space:]]*)?$')",message="expected user or user:group, as names or numbers, for example ann:staff"
	Owner string `json:"owner,omitempty"`

	// permissions are the permissions of the file in octal. Default: 0644, or 0600 if the content comes from a
	// Secret.
	// +optional
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=5
	// +kubebuilder:validation:Pattern=`^0?[0-7]{3,4}$`
	Permissions string `json:"permissions,omitempty"`

	// encoding is the encoding of the content. Default: plain text.
	// +optional
	Encoding Encoding `json:"encoding,omitempty"`

	// append adds the content to an existing file. Default: false, which replaces the file.
	// +optional
	Append *bool `json:"append,omitempty"`

	// repeatable allows an update of the machine in place to write the file again. The update overwrites changes that the
	// machine has made to the file. Default: false, a change of the file needs another machine.
	// +optional
	Repeatable *bool `json:"repeatable,omitempty"`

	// content is the content of the file.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=262144
	Content string `json:"content,omitempty"`

	// contentFrom is the source of the content.
	// +optional
	ContentFrom ContentSource `json:"contentFrom,omitempty,omitzero"`
}

// User is an account of a machine. Its number is the first free one from 1000. If the root file system of the machine has the account
// already, the account stays and gets the password, the keys and the rule for sudo.
type User struct {
	// name is the name of the account. The names of system accounts and of Capstan's services are refused.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z_][a-z0-9_-]*$')",message="expected a name with lower case letters, digits, '_' and '-', which does not begin with a digit or '-'"
	// +kubebuilder:validation:XValidation:rule="!(self in ['root', 'daemon', 'bin', 'sys', 'sync', 'games', 'man', 'lp', 'mail', 'news', 'uucp', 'proxy', 'www-data', 'backup', 'list', 'irc', 'nobody', 'sshd', 'messagebus', 'etcd', 'coredns', 'metrics-server']) && !self.matches('^(_|kube-|systemd-)')",message="expected the name of a person or an application, found a name of a system account or of a service of Capstan: choose another name"
	Name string `json:"name,omitempty"`

	// gecos is a description of the account, for example the full name.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.matches('^[^:,=\\x00-\\x1f\\x7f]*$')",message="expected a text without ':', ',', '=' and control characters"
	Gecos string `json:"gecos,omitempty"`

	// primaryGroup is the group of the account. It is created if it is missing. Default: a group with the name of the account.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z_][a-z0-9_-]*$')",message="expected a name with lower case letters, digits, '_' and '-', which does not begin with a digit or '-'"
	PrimaryGroup string `json:"primaryGroup,omitempty"`

	// groups are further groups of the account. Missing groups are created.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self.all(g, g.matches('^[a-z_][a-z0-9_-]*$'))",message="expected names with lower case letters, digits, '_' and '-', which do not begin with a digit or '-'"
	Groups []string `json:"groups,omitempty"`

	// homeDir is the home folder. Default: /home/NAME.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=255
	// +kubebuilder:validation:XValidation:rule="self.matches('^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$')",message="expected an absolute path of letters, digits, '.', '_' and '-' in its shortest form, for example /home/ann"
	HomeDir string `json:"homeDir,omitempty"`

	// shell is the program that a login starts. Default: that of useradd on the machine, usually /bin/sh.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=255
	// +kubebuilder:validation:XValidation:rule="self.matches('^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$')",message="expected the absolute path of a program, for example /bin/bash"
	Shell string `json:"shell,omitempty"`

	// passwdFrom is the source of the hash of the password, as in /etc/shadow. The account has no password without it.
	// +optional
	PasswdFrom PasswdSource `json:"passwdFrom,omitempty,omitzero"`

	// lockPassword disables logins with the password. Default: true.
	// +optional
	LockPassword *bool `json:"lockPassword,omitempty"`

	// sudo is the rule of the account for sudo without its name, for example ALL=(ALL) NOPASSWD:ALL. It becomes a file in
	// /etc/sudoers.d and has no effect without sudo in the root file system of the machine.
	// +optional
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.matches('^[^=\\x00-\\x1f\\x7f]+=[^\\x00-\\x1f\\x7f]+$') && !self.endsWith('\\\\')",message="expected one rule of sudoers without the name of the user, for example ALL=(ALL) NOPASSWD:ALL"
	Sudo string `json:"sudo,omitempty"`

	// sshAuthorizedKeys are the lines of .ssh/authorized_keys in the home folder. A machine has no SSH server of its own.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=10
	// +kubebuilder:validation:items:MinLength=16
	// +kubebuilder:validation:items:MaxLength=4096
	// +kubebuilder:validation:XValidation:rule="self.all(k, k.matches('^([^\\x00-\\x1f\\x7f]+ )?(ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+ AAAA[A-Za-z0-9+/]+={0,2}( [^\\x00-\\x1f\\x7f]*)?$'))",message="expected lines of authorized_keys, each with one public key, for example: ssh-ed25519 AAAAC3Nz... ann@example.com"
	SSHAuthorizedKeys []string `json:"sshAuthorizedKeys,omitempty"`
}

// PasswdSource is the source of the hash of a password. It is not inline: everybody who can read the object could try passwords.
type PasswdSource struct {
	// secret names a key of a Secret in the namespace of the cluster.
	// +required
	Secret SecretKeyReference `json:"secret,omitempty,omitzero"`
}

// ContentSource is a source of content.
// +kubebuilder:validation:XValidation:rule="has(self.secret) != has(self.configMap)",message="exactly one of secret and configMap must be set"
type ContentSource struct {
	// secret names a key of a Secret in the namespace of the cluster.
	// +optional
	Secret SecretKeyReference `json:"secret,omitempty,omitzero"`

	// configMap names a key of a ConfigMap in the namespace of the cluster.
	// +optional
	ConfigMap ConfigMapKeyReference `json:"configMap,omitempty,omitzero"`
}

// Document is a text, either inline or from a Secret or ConfigMap.
// +kubebuilder:validation:XValidation:rule="has(self.content) != has(self.contentFrom)",message="exactly one of content and contentFrom must be set"
type Document struct {
	// content is the text.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=262144
	Content string `json:"content,omitempty"`

	// contentFrom is the source of the text.
	// +optional
	ContentFrom ContentSource `json:"contentFrom,omitempty,omitzero"`
}

// SecretKeyReference names a key of a Secret in the namespace of the cluster.
type SecretKeyReference struct {
	// name is the name of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// key is the key in the Secret's data.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Key string `json:"key,omitempty"`
}

// ConfigMapKeyReference names a key of a ConfigMap in the namespace of the cluster.
type ConfigMapKeyReference struct {
	// name is the name of the ConfigMap.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// key is the key in the ConfigMap's data or binaryData.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Key string `json:"key,omitempty"`
}

// SecretReference names a Secret in the namespace of the cluster.
type SecretReference struct {
	// name is the name of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
}

// Registry configures an image registry. TLS is always verified: a registry with a certificate of its own needs ca.
// +kubebuilder:validation:XValidation:rule="has(self.mirrors) || has(self.credentials) || has(self.ca)",message="a registry without mirrors, credentials and ca has no effect: set one of them, or remove the registry"
// +kubebuilder:validation:XValidation:rule="self.host != '_default' || has(self.mirrors)",message="the registry _default needs mirrors: credentials and ca apply to named hosts only"
// +kubebuilder:validation:XValidation:rule="!has(self.credentials) || !has(self.mirrors) || self.mirrors.all(m, m.startsWith('https://'))",message="with credentials, every mirror must be an https URL: the credentials would cross the network unencrypted"
// +kubebuilder:validation:XValidation:rule="!has(self.overridePath) || !self.overridePath || (has(self.mirrors) && self.mirrors.all(m, m.matches('^https?://[^/]+/.')))",message="with overridePath, every mirror must have the path of its API, for example https://mirror.example.com/registry/v2"
type Registry struct {
	// host is the host of the registry in image names, for example docker.io. _default applies to all registries
	// that are not listed.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^(_default|[a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9])?(:[0-9]{1,5})?)$`
	Host string `json:"host,omitempty"`

	// mirrors are tried in order before the registry itself. A path of the URL precedes the /v2 of the registry's API.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=20
	// +kubebuilder:validation:items:MinLength=8
	// +kubebuilder:validation:items:MaxLength=512
	// +kubebuilder:validation:items:Pattern=`^https?://.+`
	// +kubebuilder:validation:XValidation:rule="self.all(m, !m.contains('@'))",message="the URL of a mirror must not contain credentials: name a Secret in credentials"
	// +kubebuilder:validation:XValidation:rule="self.all(m, isURL(m) && url(m).getHostname() != '' && m.matches('^[!-~]+$') && !m.contains('?') && !m.contains('#'))",message="expected URLs of mirrors: http:// or https://, a host, and perhaps a port and a path, for example https://mirror.example.com:5000"
	Mirrors []string `json:"mirrors,omitempty"`

	// overridePath makes the path of each mirror replace the /v2 of the registry's API, for registries that serve it below
	// another path. Default: false.
	// +optional
	OverridePath *bool `json:"overridePath,omitempty"`

	// credentials names a Secret with the keys username and password (kubernetes.io/basic-auth) for the registry
	// and its mirrors. A mirror that is the host of an entry with credentials gets those of its entry only.
	// +optional
	Credentials SecretReference `json:"credentials,omitempty,omitzero"`

	// ca contains the certificate authorities of the registry and its mirrors, as PEM. Default: the authorities that the machine
	// trusts.
	// +optional
	CA Document `json:"ca,omitempty,omitzero"`
}

// CapstanConfigStatus is the observed state of a CapstanConfig. It can be rebuilt from the spec, the Machine and
// the Secret.
// +kubebuilder:validation:MinProperties=1
type CapstanConfigStatus struct {
	// conditions describe the current state: Ready, DataSecretAvailable, BootstrapTokenAvailable, UpdateDataAvailable, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// initialization contains the fields that Cluster API reads during the first provisioning.
	// +optional
	Initialization CapstanConfigInitializationStatus `json:"initialization,omitempty,omitzero"`

	// dataSecretName is the name of the Secret with the bootstrap data. For a Machine it equals the name of the
	// CapstanConfig. For a MachinePool it has a suffix that changes with the spec and the version.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	DataSecretName string `json:"dataSecretName,omitempty"`

	// update is the data of the last update in place. It is written while Cluster API's annotation of an update in progress
	// is on the CapstanConfig.
	// +optional
	Update ConfigUpdateStatus `json:"update,omitempty,omitzero"`

	// observedGeneration is the latest generation of this object that the controller processed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// ConfigUpdateStatus names the data of an update in place.
// +kubebuilder:validation:MinProperties=1
type ConfigUpdateStatus struct {
	// id identifies the content of the data, with the Kubernetes version.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	ID string `json:"id,omitempty"`

	// dataSecretName is the name of the Secret with the data.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	DataSecretName string `json:"dataSecretName,omitempty"`

	// kubernetesVersion is the Kubernetes version of the data.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`

	// observedGeneration is the generation of the CapstanConfig whose spec the data contains.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// CapstanConfigInitializationStatus contains the fields that Cluster API reads during the first provisioning.
// +kubebuilder:validation:MinProperties=1
type CapstanConfigInitializationStatus struct {
	// dataSecretCreated is true when the Secret with the bootstrap data exists.
	// +optional
	DataSecretCreated *bool `json:"dataSecretCreated,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanconfigs,shortName=capc,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta1=v1beta1","cluster.x-k8s.io/v1beta2=v1beta2"}
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']",description="Cluster"
// +kubebuilder:printcolumn:name="Role",type="string",JSONPath=".spec.role",description="Role of the machine",priority=10
// +kubebuilder:printcolumn:name="Data secret",type="string",JSONPath=".status.dataSecretName",description="Secret with the bootstrap data"
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The bootstrap data exists"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Reason"
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanConfig is the bootstrap configuration of a machine or a machine pool.
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
	// template describes the CapstanConfigs that are created from it.
	// +required
	Template CapstanConfigTemplateResource `json:"template,omitempty,omitzero"`
}

// CapstanConfigTemplateResource describes the CapstanConfigs that are created from a template.
// +kubebuilder:validation:MinProperties=1
type CapstanConfigTemplateResource struct {
	// metadata contains the labels and annotations of the CapstanConfigs.
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// spec is the spec of the CapstanConfigs.
	// +optional
	Spec CapstanConfigSpec `json:"spec,omitempty,omitzero"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanconfigtemplates,shortName=capct,scope=Namespaced,categories=cluster-api;capstan
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta1=v1beta1","cluster.x-k8s.io/v1beta2=v1beta2"}
// +kubebuilder:storageversion
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanConfigTemplate is a template of CapstanConfigs for MachineDeployments and ClusterClasses.
type CapstanConfigTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the template. It is immutable.
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

package v1beta2

// BackupTrigger is the cause of a backup.
// +kubebuilder:validation:Enum=Schedule;OnDemand;BeforeUpgrade
type BackupTrigger string

const (
	// BackupScheduled is a backup that the schedule caused.
	BackupScheduled BackupTrigger = "Schedule"
	// BackupOnDemand is a backup that an annotation requested.
	BackupOnDemand BackupTrigger = "OnDemand"
	// BackupBeforeUpgrade is a backup before a change of the Kubernetes version.
	BackupBeforeUpgrade BackupTrigger = "BeforeUpgrade"
)

// BackupStore is the place of etcd backups: a directory or an S3-compatible store.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="has(self.directory) != has(self.s3)",message="exactly one store must be set: directory or s3"
type BackupStore struct {
	// directory is a directory that every control plane machine can access and that outlives the machines.
	// +optional
	Directory DirectoryStore `json:"directory,omitempty,omitzero"`

	// s3 is a bucket of an S3-compatible store.
	// +optional
	S3 S3Store `json:"s3,omitempty,omitzero"`
}

// IsDefined reports whether a store is set.
func (s BackupStore) IsDefined() bool { return s.Directory.Path != "" || s.S3.Bucket != "" }

// DirectoryStore is a directory on the control plane machines.
type DirectoryStore struct {
	// path is the absolute path on the machines. It must exist. Machines of Capstan have /var/lib/capstan/backups,
	// which is a folder of the host.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self.startsWith('/') && !self.contains('/../') && !self.endsWith('/..')",message="path must be an absolute path without .."
	Path string `json:"path,omitempty"`
}

// S3Store is a bucket of an S3-compatible store.
// +kubebuilder:validation:XValidation:rule="!has(self.insecureSkipTLSVerify) || !self.insecureSkipTLSVerify || !has(self.caSecretRef)",message="insecureSkipTLSVerify cannot be used together with caSecretRef"
type S3Store struct {
	// endpoint is the URL of the store, for example https://s3.example.org:9000. With http://, the connection is
	// not encrypted: only resources that the API server encrypts in etcd remain unreadable. The machines connect
	// to it. Loopback and link-local addresses are refused, also if a name resolves to one.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="isURL(self) && url(self).getScheme() in ['http', 'https'] && url(self).getHost() != '' && url(self).getEscapedPath() in ['', '/']",message="endpoint must be an http or https URL with a host and without a path: set bucket and prefix instead of a path"
	// +kubebuilder:validation:XValidation:rule="!self.matches('(?i)^https?://(127[.]|0[.]|169[.]254[.]|[[]::1?[]]|[[]fe[89ab]|([^/:]*[.])?localhost(:|/|$))')",message="endpoint must not be a loopback or link-local address: use the address of another machine"
	Endpoint string `json:"endpoint,omitempty"`

	// bucket is the name of an existing bucket.
	// +required
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=63
	Bucket string `json:"bucket,omitempty"`

	// prefix is the prefix of all object names in the bucket.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Prefix string `json:"prefix,omitempty"`

	// region is the region of the bucket. If empty, the store is queried for it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Region string `json:"region,omitempty"`

	// credentialsSecretRef names a Secret in the cluster's namespace with the keys accessKeyID and
	// secretAccessKey.
	// +required
	CredentialsSecretRef BackupSecretReference `json:"credentialsSecretRef,omitempty,omitzero"`

	// caSecretRef names a Secret in the cluster's namespace. Its key ca.crt contains the certificate authorities
	// of the store in PEM. Default: the authorities that the machine trusts.
	// +optional
	CASecretRef BackupSecretReference `json:"caSecretRef,omitempty,omitzero"`

	// insecureSkipTLSVerify disables the verification of the store's certificate. Default: false.
	// +optional
	InsecureSkipTLSVerify *bool `json:"insecureSkipTLSVerify,omitempty"`
}

// BackupSecretReference names a Secret.
type BackupSecretReference struct {
	// name is the name of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
}

// Keys in the Secrets of a store.
const (
	S3AccessKeyID     = "accessKeyID"
	S3SecretAccessKey = "secretAccessKey"
	S3CA              = "ca.crt"
)

// Names of the keys that a backup requires.
const (
	// KeyEncryption is the key with which the API server encrypts resources in etcd.
	KeyEncryption = "encryption"
	// KeyCA is the cluster's certificate authority.
	KeyCA = "ca"
	// KeyServiceAccount is the key that signs service account tokens.
	KeyServiceAccount = "sa"
)

// BackupKey identifies a key or certificate that a backup requires. It does not contain the key.
type BackupKey struct {
	// name is the name of the key: encryption, ca or sa.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name,omitempty"`

	// sha256 identifies the key: the SHA-256 of the certificate, of the public key, or of the encryption key with
	// a fixed prefix.
	// +required
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`
}

package v1beta2

// BackupTrigger is why a backup was made.
// +kubebuilder:validation:Enum=Schedule;OnDemand;BeforeUpgrade
type BackupTrigger string

const (
	// BackupScheduled was due by the schedule.
	BackupScheduled BackupTrigger = "Schedule"
	// BackupOnDemand was asked for by an annotation.
	BackupOnDemand BackupTrigger = "OnDemand"
	// BackupBeforeUpgrade was made before another version of Kubernetes.
	BackupBeforeUpgrade BackupTrigger = "BeforeUpgrade"
)

// BackupStore is where backups of etcd are kept: a directory or an S3-compatible store.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="has(self.directory) != has(self.s3)",message="exactly one store is needed: directory or s3"
type BackupStore struct {
	// directory is one that every control plane machine sees, and that outlives them.
	// +optional
	Directory DirectoryStore `json:"directory,omitempty,omitzero"`

	// s3 is a bucket of an S3-compatible store.
	// +optional
	S3 S3Store `json:"s3,omitempty,omitzero"`
}

// IsDefined says whether there is a store.
func (s BackupStore) IsDefined() bool { return s.Directory.Path != "" || s.S3.Bucket != "" }

// DirectoryStore is a directory of the control plane machines.
type DirectoryStore struct {
	// path on the machines. It must exist: Capstan's own machines have /var/lib/capstan/backups, which is the
	// host's.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self.startsWith('/') && !self.contains('/../') && !self.endsWith('/..')",message="path must be an absolute path without .."
	Path string `json:"path,omitempty"`
}

// S3Store is a bucket of an S3-compatible store.
// +kubebuilder:validation:XValidation:rule="!has(self.insecureSkipTLSVerify) || !self.insecureSkipTLSVerify || !has(self.caSecretRef)",message="insecureSkipTLSVerify cannot be used together with caSecretRef"
type S3Store struct {
	// endpoint is the URL of the store, for example https://s3.example.org:9000. With http:// nothing is encrypted
	// on the way but what the API server encrypts in etcd.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="isURL(self) && url(self).getScheme() in ['http', 'https'] && url(self).getHost() != '' && url(self).getEscapedPath() in ['', '/']",message="endpoint must be http:// or https:// with a host, and without a path: put the bucket into bucket, and the rest into prefix"
	Endpoint string `json:"endpoint,omitempty"`

	// bucket must exist.
	// +required
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=63
	Bucket string `json:"bucket,omitempty"`

	// prefix of all names in the bucket.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Prefix string `json:"prefix,omitempty"`

	// region of the bucket. The store is asked for it when not set.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Region string `json:"region,omitempty"`

	// credentialsSecretRef names a Secret in the cluster's namespace with the keys accessKeyID and
	// secretAccessKey.
	// +required
	CredentialsSecretRef BackupSecretReference `json:"credentialsSecretRef,omitempty,omitzero"`

	// caSecretRef names a Secret in the cluster's namespace whose key ca.crt has the certificate authorities of the
	// store, as PEM. The machine's own when not set.
	// +optional
	CASecretRef BackupSecretReference `json:"caSecretRef,omitempty,omitzero"`

	// insecureSkipTLSVerify takes any certificate of the store.
	// +optional
	InsecureSkipTLSVerify *bool `json:"insecureSkipTLSVerify,omitempty"`
}

// BackupSecretReference names a Secret.
type BackupSecretReference struct {
	// name of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
}

// Keys of the Secrets of a store.
const (
	S3AccessKeyID     = "accessKeyID"
	S3SecretAccessKey = "secretAccessKey"
	S3CA              = "ca.crt"
)

// Names of the keys that what is in a backup needs.
const (
	// KeyEncryption is what the API server encrypts with in etcd.
	KeyEncryption = "encryption"
	// KeyCA is the cluster's certificate authority.
	KeyCA = "ca"
	// KeyServiceAccount is the key that tokens of service accounts are signed with.
	KeyServiceAccount = "sa"
)

// BackupKey is a key or certificate that what is in a backup needs. It is named, and never there itself.
type BackupKey struct {
	// name: encryption, ca or sa.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name,omitempty"`

	// sha256 tells keys apart: of the certificate, of the public key, or of the encryption key together with a word
	// of Capstan's.
	// +required
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`
}

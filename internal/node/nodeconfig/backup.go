package nodeconfig

import (
	"fmt"
	"maps"
	"slices"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// RestorePath is where the bootstrap data of a machine that begins with a backup puts a Restore, as YAML, mode 0600. The
// machine erases it once it was used.
const RestorePath = "/etc/capstan/restore.yaml"

// Restore is a backup of etcd that a machine begins with.
type Restore struct {
	// Name of the backup.
	Name  string      `json:"name"`
	Store BackupStore `json:"store"`
	// SHA256 of the snapshot, when it is known.
	SHA256 string `json:"sha256,omitempty"`
	// Keys of this cluster: name and fingerprint. Those of the backup must be the same.
	Keys map[string]string `json:"keys,omitempty"`
	// OtherAuthorities allows all but the encryption key to be other ones.
	OtherAuthorities bool `json:"otherAuthorities,omitempty"`
}

// BackupStore is where backups are: a directory or an S3-compatible store.
type BackupStore struct {
	Directory string `json:"directory,omitempty"`
	S3        *S3    `json:"s3,omitempty"`
	Folder    string `json:"folder"`
}

// S3 is a bucket of an S3-compatible store, with the credentials for it.
type S3 struct {
	// Endpoint is a URL: http or https, a host and a port.
	Endpoint string `json:"endpoint"`
	Bucket   string `json:"bucket"`
	Prefix   string `json:"prefix,omitempty"`
	Region   string `json:"region,omitempty"`

	AccessKeyID     string `json:"accessKeyID"`
	SecretAccessKey string `json:"secretAccessKey"`

	// CA are the certificate authorities of the store, as PEM; the machine's own when empty.
	CA                    string `json:"ca,omitempty"`
	InsecureSkipTLSVerify bool   `json:"insecureSkipTLSVerify,omitempty"`
}

// StoreOf puts together a store and what its Secrets hold.
func StoreOf(store etcdv1.BackupStore, folder string, secret map[string]string) BackupStore {
	out := BackupStore{Directory: store.Directory.Path, Folder: folder}
	if s := store.S3; s.Bucket != "" {
		out.S3 = &S3{
			Endpoint: s.Endpoint, Bucket: s.Bucket, Prefix: s.Prefix, Region: s.Region,
			AccessKeyID: secret[etcdv1.S3AccessKeyID], SecretAccessKey: secret[etcdv1.S3SecretAccessKey],
			CA:                    secret[etcdv1.S3CA],
			InsecureSkipTLSVerify: s.InsecureSkipTLSVerify != nil && *s.InsecureSkipTLSVerify,
		}
	}
	return out
}

// DifferentKeys says which keys a backup needs that are other ones here, or not there. The encryption key is always needed.
func DifferentKeys(needs, has map[string]string, otherAuthorities bool) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(needs)) {
		if needs[name] == has[name] || otherAuthorities && name != etcdv1.KeyEncryption {
			continue
		}
		found := "there is none"
		if has[name] != "" {
			found = "found " + has[name]
		}
		out = append(out, fmt.Sprintf("it needs the key %s with the SHA-256 %s, and %s", name, needs[name], found))
	}
	return out
}

package nodeconfig

import (
	"fmt"
	"maps"
	"slices"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// RestorePath is the file with the Restore in the bootstrap data of a machine that starts from a backup, as YAML, mode
// 0600. The machine erases it after use.
const RestorePath = "/etc/capstan/restore.yaml"

// Restore is a backup of etcd from which a machine starts.
type Restore struct {
	// Name of the backup.
	Name  string      `json:"name"`
	Store BackupStore `json:"store"`
	// SHA256 of the snapshot, if known.
	SHA256 string `json:"sha256,omitempty"`
	// Keys of this cluster: name and fingerprint. The backup must have the same keys.
	Keys map[string]string `json:"keys,omitempty"`
	// OtherAuthorities allows a backup whose keys differ, except for the encryption key.
	OtherAuthorities bool `json:"otherAuthorities,omitempty"`
}

// BackupStore is the place of backups: a directory or an S3-compatible store.
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

	// CA contains the certificate authorities of the store, as PEM. Empty means those of the machine.
	CA                    string `json:"ca,omitempty"`
	InsecureSkipTLSVerify bool   `json:"insecureSkipTLSVerify,omitempty"`
}

// StoreOf combines the spec of a store with the values of its Secrets.
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

// DifferentKeys returns the keys of a backup that differ here or do not exist here. The encryption key must always
// match.
func DifferentKeys(needs, has map[string]string, otherAuthorities bool) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(needs)) {
		if needs[name] == has[name] || otherAuthorities && name != etcdv1.KeyEncryption {
			continue
		}
		found := "this cluster has none"
		if has[name] != "" {
			found = "found " + has[name]
		}
		out = append(out, fmt.Sprintf("it needs the key %s with the SHA-256 %s, and %s", name, needs[name], found))
	}
	return out
}

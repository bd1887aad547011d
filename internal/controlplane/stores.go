package controlplane

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/bootstrap/render"
)

// stores provides the access of machines to a backup store: its credentials, and the fingerprints of the keys that a
// backup depends on.
type stores struct{ *secrets }

// storeSecret returns the content of the Secrets of a store; nil when it needs none. problem names the missing part, never any
// content.
func (r *stores) storeSecret(ctx context.Context, s *scope, store etcdv1.BackupStore) (data map[string][]byte, problem string, err error) {
	if store.S3.Bucket == "" {
		return nil, "", nil
	}
	data = map[string][]byte{}
	take := func(name string, keys ...string) error {
		if name == "" || problem != "" {
			return nil
		}
		found, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: name})
		if err != nil {
			return err
		}
		if found == nil {
			problem = fmt.Sprintf("the Secret %s, which the backup store needs, does not exist", name)
			return nil
		}
		for _, key := range keys {
			if len(found.Data[key]) == 0 {
				problem = fmt.Sprintf("the Secret %s, which the backup store needs, has no key %s", name, key)
				return nil
			}
			data[key] = found.Data[key]
		}
		return nil
	}
	if err := take(store.S3.CredentialsSecretRef.Name, etcdv1.S3AccessKeyID, etcdv1.S3SecretAccessKey); err != nil {
		return nil, "", err
	}
	return data, problem, take(store.S3.CASecretRef.Name, etcdv1.S3CA)
}

// bringSecret copies the credentials of a store into a Secret of the workload cluster that the agents may read. Without any it deletes
// the Secret.
func (r *stores) bringSecret(ctx context.Context, s *scope, name string, data map[string][]byte) error {
	out := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: etcdv1.BackupSecretNamespace, Name: name}}
	if data == nil {
		if err := s.client.Delete(ctx, out); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("cannot delete the Secret %s/%s, which the machines do not need any more: %w", out.Namespace, out.Name, err)
		}
		return nil
	}
	_, err := controllerutil.CreateOrPatch(ctx, s.client, out, func() error {
		out.Data = data
		return nil
	})
	if err != nil {
		return fmt.Errorf("cannot give the Secret %s/%s to the machines: %w", out.Namespace, out.Name, err)
	}
	return nil
}

// backupKeys returns the fingerprints of the keys that are needed to read a backup.
func (r *stores) backupKeys(ctx context.Context, s *scope) ([]etcdv1.BackupKey, error) {
	var out []etcdv1.BackupKey
	add := func(name string, content []byte) {
		sum := sha256.Sum256(content)
		out = append(out, etcdv1.BackupKey{Name: name, SHA256: hex.EncodeToString(sum[:])})
	}
	for name, purpose := range map[string]secret.Purpose{etcdv1.KeyCA: secret.ClusterCA, etcdv1.KeyServiceAccount: secret.ServiceAccount} {
		found, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: secret.Name(s.Cluster.Name, purpose)})
		if err != nil {
			return nil, err
		}
		if found == nil {
			continue
		}
		if block, _ := pem.Decode(found.Data[secret.TLSCrtDataName]); block != nil {
			add(name, block.Bytes)
		}
	}
	encryption := s.Object.Spec.Config.Cluster.Encryption
	from, key := bootstrap.EncryptionSecretName(s.Cluster.Name), secret.KubeconfigDataName
	if ref := encryption.Configuration.Secret; ref.Name != "" {
		from, key = ref.Name, ref.Key
	}
	if encryption.Configuration.Secret.Name != "" || render.NeedsEncryptionKey(encryption) {
		found, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: from})
		if err != nil {
			return nil, err
		}
		if found != nil && len(found.Data[key]) > 0 {
			add(etcdv1.KeyEncryption, append([]byte("capstan backup: "), found.Data[key]...))
		}
	}
	slices.SortFunc(out, func(a, b etcdv1.BackupKey) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

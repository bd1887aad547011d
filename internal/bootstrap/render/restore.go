package render

import (
	"k8s.io/utils/ptr"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// storeKeys returns the keys of Secrets that a backup store needs, by purpose.
func storeKeys(store etcdv1.BackupStore) map[string]bootstrapv1.SecretKeyReference {
	out := map[string]bootstrapv1.SecretKeyReference{}
	if store.S3.Bucket == "" {
		return out
	}
	for _, key := range []string{etcdv1.S3AccessKeyID, etcdv1.S3SecretAccessKey} {
		out[key] = bootstrapv1.SecretKeyReference{Name: store.S3.CredentialsSecretRef.Name, Key: key}
	}
	if name := store.S3.CASecretRef.Name; name != "" {
		out[etcdv1.S3CA] = bootstrapv1.SecretKeyReference{Name: name, Key: etcdv1.S3CA}
	}
	return out
}

// restore returns the backup from which the machine starts.
func restore(in Input) nodeconfig.Restore {
	spec := in.Spec.Restore
	secret := map[string]string{}
	for key, ref := range storeKeys(spec.Store) {
		secret[key] = string(in.Secrets[ref])
	}
	out := nodeconfig.Restore{
		Name: spec.Name, Store: nodeconfig.StoreOf(spec.Store, spec.Folder, secret), SHA256: spec.SHA256,
		Keys: map[string]string{}, OtherAuthorities: ptr.Deref(spec.OtherAuthorities, false),
	}
	for _, k := range spec.Keys {
		out.Keys[k.Name] = k.SHA256
	}
	return out
}

package render_test

import (
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// TestRestore: the first machine of a restored cluster gets the name of the backup and the credentials. Only root can read them.
func TestRestore(t *testing.T) {
	store := etcdv1.BackupStore{S3: etcdv1.S3Store{
		Endpoint: "https://s3.example.org", Bucket: "backups", CredentialsSecretRef: etcdv1.BackupSecretReference{Name: "store"}, CASecretRef: etcdv1.BackupSecretReference{Name: "ca"},
	}}
	spec := bootstrapv1.CapstanConfigSpec{Restore: bootstrapv1.RestoreSource{
		Name: "etcd-1", Folder: "default/demo", Store: store, SHA256: "abc", Keys: []etcdv1.BackupKey{{Name: "encryption", SHA256: "x"}},
	}}
	id, key, ca := bootstrapv1.SecretKeyReference{Name: "store", Key: "accessKeyID"}, bootstrapv1.SecretKeyReference{Name: "store", Key: "secretAccessKey"}, bootstrapv1.SecretKeyReference{Name: "ca", Key: "ca.crt"}
	if got, maps := render.References(spec); !slices.Equal(got, []bootstrapv1.SecretKeyReference{id, ca, key}) || len(maps) > 0 {
		t.Errorf("references: %v, %v", got, maps)
	}
	config := parsed(t, render.Input{
		ClusterName: "demo", KubernetesVersion: "v1.36.3", Role: nodeconfig.RoleInit, Endpoint: "10.0.0.1:6443", Spec: spec,
		EncryptionKey: make([]byte, render.EncryptionKeySize),
		Secrets:       map[bootstrapv1.SecretKeyReference][]byte{id: []byte("me"), key: []byte("hidden"), ca: []byte("PEM")},
	})
	found := false
	for _, f := range config.Files {
		if f.Path != nodeconfig.RestorePath {
			if strings.Contains(string(f.Content), "hidden") {
				t.Errorf("%s contains the credentials", f.Path)
			}
			continue
		}
		found = true
		var r nodeconfig.Restore
		if err := yaml.UnmarshalStrict(f.Content, &r); err != nil {
			t.Fatal(err)
		}
		if f.Mode.Perm() != 0o600 || r.Name != "etcd-1" || r.SHA256 != "abc" || r.Keys["encryption"] != "x" || r.Store.Folder != "default/demo" ||
			r.Store.S3 == nil || r.Store.S3.AccessKeyID != "me" || r.Store.S3.SecretAccessKey != "hidden" || r.Store.S3.CA != "PEM" {
			t.Errorf("%s %+v", f.Mode, r)
		}
	}
	if !found {
		t.Errorf("no %s", nodeconfig.RestorePath)
	}
}

// The log of a restored etcd is in its data folder, so an argument that moves it is refused. Without a backup, the argument is allowed.
func TestRestoreWithFolderForLog(t *testing.T) {
	in := controlPlane(t)
	in.Spec.Cluster.Etcd.ExtraArgs = []bootstrapv1.Arg{{Name: "wal-dir", Value: "/srv/wal/etcd"}}
	if _, err := render.CloudConfig(in); err != nil {
		t.Errorf("without a backup: %v", err)
	}
	in.Spec.Restore.Name = "etcd-1"
	if _, err := render.CloudConfig(in); err == nil || !strings.Contains(err.Error(), "spec.cluster.etcd.extraArgs: wal-dir: a restored etcd has its log in data-dir") {
		t.Errorf("with a backup: %v", err)
	}
}

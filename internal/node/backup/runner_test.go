package backup

import (
	"context"
	"encoding/base64"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
)

func object(t *testing.T, b etcdv1.EtcdBackup) *unstructured.Unstructured {
	t.Helper()
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&b)
	expect.NoError(t, err)
	return &unstructured.Unstructured{Object: fields}
}

// TestMine: a machine creates the pending backups that name it, oldest first.
func TestMine(t *testing.T) {
	b := func(name, member string, phase etcdv1.BackupPhase) *unstructured.Unstructured {
		return object(t, etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: etcdv1.EtcdBackupSpec{Member: member}, Status: etcdv1.EtcdBackupStatus{Phase: phase}})
	}
	got := mine([]any{b("c", "me", ""), b("a", "me", ""), b("b", "other", ""), b("d", "me", etcdv1.BackupFailed), b("e", "me", etcdv1.BackupSucceeded), "something"}, "me")
	if len(got) != 2 || got[0].Name != "a" || got[1].Name != "c" {
		t.Errorf("%v", got)
	}
}

// TestMyChecks: a machine runs the pending checks that name it, and those that it has begun.
func TestMyChecks(t *testing.T) {
	c := func(name, member string, phase etcdv1.CheckPhase) *unstructured.Unstructured {
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&etcdv1.EtcdBackupCheck{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: etcdv1.EtcdBackupCheckSpec{Member: member}, Status: etcdv1.EtcdBackupCheckStatus{Phase: phase},
		})
		expect.NoError(t, err)
		return &unstructured.Unstructured{Object: fields}
	}
	got := myChecks([]any{c("c", "me", ""), c("a", "me", etcdv1.CheckBegun), c("b", "other", ""), c("d", "me", etcdv1.CheckFailed), c("e", "me", etcdv1.CheckSucceeded)}, "me")
	if len(got) != 2 || got[0].Name != "a" || got[1].Name != "c" {
		t.Errorf("%v", got)
	}
}

// An agent that was killed during a backup and a check leaves copies of all objects. The next one removes them, also without any EtcdBackup.
func TestRunRemovesLeftovers(t *testing.T) {
	kinds := map[schema.GroupVersionResource]string{kube.EtcdBackups: "EtcdBackupList", kube.EtcdBackupChecks: "EtcdBackupCheckList"}
	r := &Runner{
		Name: "me", Client: dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), kinds),
		Dir: filepath.Join(t.TempDir(), "scratch"), Log: slog.New(slog.DiscardHandler),
	}
	for _, dir := range []string{r.Dir, r.Dir + ".check"} {
		expect.NoError(t, errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "etcd-1.db"), nil, 0o600)))
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_ = r.Run(ended)
	for _, dir := range []string{r.Dir, r.Dir + ".check"} {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

// TestMake: the machine uploads a backup with the credentials of the cluster's Secret and removes surplus backups. A failure
// message does not contain the credentials.
func TestMake(t *testing.T) {
	source := startEtcd(t, filepath.Join(t.TempDir(), "etcd"), "etcd", "http://"+ports.Address(t))
	source.put(t, "something")
	c := s3Server(t, false)
	encode := func(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }
	secret := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"namespace": etcdv1.BackupSecretNamespace, "name": etcdv1.BackupSecretName},
		"data": map[string]any{etcdv1.S3AccessKeyID: encode(c.AccessKeyID), etcdv1.S3SecretAccessKey: encode(c.SecretAccessKey)},
	}}
	r := &Runner{
		Name: "me", Client: dynamicfake.NewSimpleDynamicClient(runtime.NewScheme(), secret), Member: source.member,
		Dir: filepath.Join(t.TempDir(), "scratch"), Log: slog.New(slog.DiscardHandler),
	}
	spec := etcdv1.EtcdBackupSpec{
		Member: "me", Trigger: etcdv1.BackupOnDemand, Request: "one", Folder: "default/demo", KubernetesVersion: "v1.36.3",
		Store: etcdv1.BackupStore{S3: etcdv1.S3Store{Endpoint: c.Endpoint, Bucket: c.Bucket, Region: c.Region}}, Keys: []etcdv1.BackupKey{{Name: "ca", SHA256: "x"}},
	}
	first := r.make(t.Context(), etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: "first"}, Spec: spec})
	if first.Phase != etcdv1.BackupSucceeded || !strings.HasSuffix(first.Location, "/backups/default/demo/first.db") || first.SizeBytes == 0 || first.Revision != 2 || len(first.SHA256) != 64 || first.Time == nil {
		t.Fatalf("%+v", first)
	}
	spec.Remove = []string{"first", "never-was"}
	second := r.make(t.Context(), etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: "second"}, Spec: spec})
	if second.Phase != etcdv1.BackupSucceeded || len(second.Removed) != 2 {
		t.Fatalf("%+v", second)
	}
	store, err := Open(nodeconfig.BackupStore{S3: &c, Folder: "default/demo"})
	expect.NoError(t, err)
	if _, _, err := Load(t.Context(), store, "first", t.TempDir(), ""); err == nil || !strings.Contains(err.Error(), "there is no backup") {
		t.Errorf("the surplus backup is still in the store: %v", err)
	}
	_, manifest, err := Load(t.Context(), store, "second", t.TempDir(), second.SHA256)
	expect.NoError(t, err)
	if manifest.Keys["ca"] != "x" || manifest.Request != "one" || manifest.KubernetesVersion != "v1.36.3" {
		t.Errorf("%+v", manifest)
	}
	bucket := spec.Store.S3.Bucket
	spec.Store.S3.Bucket = "nothing"
	if failed := r.make(t.Context(), etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: "third"}, Spec: spec}); failed.Phase != etcdv1.BackupFailed ||
		!strings.Contains(failed.Message, "bucket does not exist") || strings.Contains(failed.Message, c.SecretAccessKey) || len(failed.Removed) != 0 {
		t.Errorf("%+v", failed)
	}
	small := t.TempDir()
	expect.NoError(t, unix.Mount("tmpfs", small, "tmpfs", 0, "size=64m"))
	t.Cleanup(func() { expect.NoError(t, unix.Unmount(small, 0)) })
	spec.Store.S3.Bucket = bucket
	full := *r
	full.Dir = filepath.Join(small, "scratch")
	if failed := full.make(t.Context(), etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: "fourth"}, Spec: spec}); failed.Phase != etcdv1.BackupFailed ||
		!strings.Contains(failed.Message, "no room") {
		t.Errorf("a backup on a disk that is almost full: %+v", failed)
	}
	if _, err := os.Stat(r.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the backup left a snapshot on the machine: %v", err)
	}
}

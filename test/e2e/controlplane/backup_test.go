//go:build e2e

package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/util/cert"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/test/e2e/harness"
)

// backupsPath is the path at which machines find the backups of their cluster.
const backupsPath = "/var/lib/capstan/backups"

// TestBackupAndRestore backs up a cluster of three machines: by schedule to a directory, and on demand to an S3 store.
// It requests a restore of a backup that does not exist. It destroys two machines permanently and restores the cluster
// from the backup in the S3 store. It creates another cluster from the backup in the directory.
func TestBackupAndRestore(t *testing.T) {
	s := &subject{Cluster: plane.CreateCluster(t, "default", "bk", "--workers", "1", "--control-plane-machines", "3"), made: map[string]bool{}}
	s.etcd = memberClient(t, s.Kubeconfig)
	harness.Eventually(t, "three machines", limit, func(ctx context.Context) error { return s.NodesReady(ctx, 4) })
	// This is a Secret, not a ConfigMap: it is encrypted in etcd, so the restored cluster needs the key.
	s.write(t, "before")

	s.change(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Backup = controlplanev1.BackupSpec{Store: etcdv1.BackupStore{Directory: etcdv1.DirectoryStore{Path: backupsPath}}, Schedule: "@every 1m"}
	})
	scheduled := s.backup(t, etcdv1.BackupScheduled, "")
	store, data := s3Store(t, s)
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Backup.Schedule, cp.Spec.Backup.Store = "", store
		metav1.SetMetaDataAnnotation(&cp.ObjectMeta, controlplanev1.BackupAnnotation, "before-the-disaster")
	})
	demanded := s.backup(t, etcdv1.BackupOnDemand, "before-the-disaster")
	file := filepath.Join(s.Namespace, s.Name, scheduled.Name+".db")
	info, err := os.Stat(filepath.Join(plane.Root, "backups", file))
	if err != nil || info.Size() != scheduled.SizeBytes || info.Mode().Perm() != 0o600 || scheduled.Location != filepath.Join(backupsPath, file) || len(scheduled.Keys) != 3 {
		t.Errorf("%+v: %v, %v", scheduled, info, err)
	}
	file = filepath.Join(s.Namespace, s.Name, demanded.Name+".db")
	info, err = os.Stat(filepath.Join(data, store.S3.Bucket, file))
	if err != nil || info.Size() != demanded.SizeBytes || !strings.HasPrefix(demanded.Location, "s3://") || !strings.HasSuffix(demanded.Location, "/"+store.S3.Bucket+"/"+file) || len(demanded.Keys) != 3 {
		t.Errorf("%+v: %v, %v", demanded, info, err)
	}
	s.write(t, "after")

	before := s.mustMachines(t)
	s.refused(t, "etcd-never-made", "there is no backup at s3://")
	if now := s.mustMachines(t); !maps.EqualFunc(now, before, func(a, b clusterv1.Machine) bool { return a.UID == b.UID && a.DeletionTimestamp.IsZero() }) {
		t.Fatalf("%v became %v, although the backup does not exist", slices.Sorted(maps.Keys(before)), slices.Sorted(maps.Keys(now)))
	}
	s.wantContent(t, "after", "")
	for _, name := range slices.Sorted(maps.Keys(before))[:2] {
		destroy(t, s, name)
	}
	harness.Eventually(t, "the loss of the majority is reported", limit, func(ctx context.Context) error {
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		if c := conditions.Get(cp, controlplanev1.EtcdClusterHealthyCondition); c == nil || c.Reason != controlplanev1.QuorumLostReason || !strings.Contains(c.Message, "majority is lost") {
			return errors.New(explain(cp, nil))
		}
		return nil
	})

	start := time.Now()
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Restore.Name = demanded.Name })
	s.restored(t)
	t.Logf("the cluster served %.1f s after spec.restore was set", time.Since(start).Seconds())
	s.wantContent(t, "before", "after")
	harness.Eventually(t, "three machines again", limit, func(ctx context.Context) error {
		now, err := s.machines(ctx)
		if err != nil {
			return err
		}
		for name := range now {
			if _, old := before[name]; old {
				return fmt.Errorf("%s still exists", name)
			}
		}
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		if len(now) != 3 || !conditions.IsTrue(cp, controlplanev1.EtcdClusterHealthyCondition) {
			return errors.New(explain(cp, now))
		}
		return s.NodesReady(ctx, 4)
	})
	t.Logf("three machines %.1f s after spec.restore was set", time.Since(start).Seconds())
	s.write(t, "later")

	t.Run("a new cluster", func(t *testing.T) { restoreIntoAnother(t, s, scheduled) })
	s.wantContent(t, "before", "after")
	s.wantContent(t, "later", "")
}

// s3Store starts a real S3-compatible server on the host, at an address that the cluster's machines can reach. It
// creates the Secrets of a user for it. data is its folder.
func s3Store(t *testing.T, s *subject) (store etcdv1.BackupStore, data string) {
	t.Helper()
	cluster := &clusterv1.Cluster{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: s.Namespace, Name: s.Name}, cluster); err != nil {
		t.Fatal(err)
	}
	host := cluster.Spec.ControlPlaneEndpoint.Host
	free, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	certificate, key, err := cert.GenerateSelfSignedCertKey(host, nil, nil)
	if err := errors.Join(err, free.Close()); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	data = filepath.Join(dir, "data")
	if err := errors.Join(os.MkdirAll(filepath.Join(data, "clusters"), 0o700), os.WriteFile(filepath.Join(dir, "crt"), certificate, 0o600),
		os.WriteFile(filepath.Join(dir, "key"), key, 0o600)); err != nil {
		t.Fatal(err)
	}
	const user, password = "someone", "knows-it-well"
	server := exec.Command(filepath.Join(harness.Bin(), "tools", "versitygw"), "--port", address, "--region", "us-east-1", "--quiet",
		"--cert", filepath.Join(dir, "crt"), "--key", filepath.Join(dir, "key"), "posix", "--nometa", data)
	server.Env = append(os.Environ(), "ROOT_ACCESS_KEY_ID="+user, "ROOT_SECRET_ACCESS_KEY="+password)
	var log bytes.Buffer
	server.Stdout, server.Stderr = &log, &log
	if err := server.Start(); err != nil {
		t.Fatalf("%v: run `make versitygw`", err)
	}
	t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait()
		if t.Failed() {
			t.Logf("versitygw:\n%s", log.String())
		}
	})
	for name, content := range map[string]map[string]string{
		"backup-store": {etcdv1.S3AccessKeyID: user, etcdv1.S3SecretAccessKey: password}, "backup-store-ca": {etcdv1.S3CA: string(certificate)},
	} {
		given := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: name}, StringData: content}
		if err := plane.Client.Create(t.Context(), given); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = plane.Client.Delete(context.WithoutCancel(t.Context()), given) })
	}
	harness.Eventually(t, "the S3 store listens", limit, func(ctx context.Context) error {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	return etcdv1.BackupStore{S3: etcdv1.S3Store{
		Endpoint: "https://" + address, Bucket: "clusters", Region: "us-east-1",
		CredentialsSecretRef: etcdv1.BackupSecretReference{Name: "backup-store"}, CASecretRef: etcdv1.BackupSecretReference{Name: "backup-store-ca"},
	}}, data
}

// refused requests a restore that is impossible, waits until one of the machines reports that, and withdraws the
// request.
func (s *subject) refused(t *testing.T, backup, why string) {
	t.Helper()
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Restore.Name = backup })
	harness.Eventually(t, "the restore is refused", limit, func(ctx context.Context) error {
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		if c := conditions.Get(cp, controlplanev1.RestoredCondition); c == nil || c.Reason != controlplanev1.RestoreImpossibleReason || !strings.Contains(c.Message, why) {
			return errors.New(explain(cp, nil))
		}
		return nil
	})
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Restore = controlplanev1.RestoreSpec{} })
}

// write creates a Secret in the cluster.
func (s *subject) write(t *testing.T, name string) {
	t.Helper()
	harness.Eventually(t, "writing "+name, limit, func(ctx context.Context) error {
		err := s.Client.Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, StringData: map[string]string{"value": name}})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	})
}

// wantContent checks that the cluster contains the writes from before the backup, and none from after it.
func (s *subject) wantContent(t *testing.T, has, hasNot string) {
	t.Helper()
	harness.Eventually(t, "the content of the cluster", limit, func(ctx context.Context) error {
		found := &corev1.Secret{}
		if err := s.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: has}, found); err != nil {
			return err
		}
		if string(found.Data["value"]) != has {
			return fmt.Errorf("%s holds %q", has, found.Data["value"])
		}
		if hasNot == "" {
			return nil
		}
		err := s.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: hasNot}, found)
		if err == nil {
			return fmt.Errorf("%s exists, but it was written after the backup", hasNot)
		}
		return client.IgnoreNotFound(err)
	})
}

// backup waits until a backup exists.
func (s *subject) backup(t *testing.T, trigger etcdv1.BackupTrigger, request string) (out controlplanev1.BackupStatus) {
	t.Helper()
	message := "" // of the condition: a failed attempt costs half a minute
	harness.Eventually(t, fmt.Sprintf("a backup %s %s", trigger, request), limit, func(ctx context.Context) error {
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		for _, b := range cp.Status.Backups {
			if b.Trigger == trigger && (request == "" || b.Request == request) {
				out = b
				return nil
			}
		}
		if now := conditions.GetMessage(cp, controlplanev1.BackupSucceededCondition); now != message {
			t.Logf("a backup %s %s: %s", trigger, request, now)
			message = now
		}
		return errors.New(explain(cp, nil))
	})
	return out
}

// restored waits until the cluster is restored.
func (s *subject) restored(t *testing.T) {
	t.Helper()
	harness.Eventually(t, "the cluster is restored", limit, func(ctx context.Context) error {
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		if !conditions.IsTrue(cp, controlplanev1.RestoredCondition) {
			machines, err := s.machines(ctx)
			return errors.Join(errors.New(explain(cp, machines)), err)
		}
		return nil
	})
}

// destroy removes a machine's disk and kills the machine, so that it can never start again.
func destroy(t *testing.T, s *subject, name string) {
	t.Helper()
	infra := &infrav1.CapstanMachine{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: s.Namespace, Name: name}, infra); err != nil {
		t.Fatal(err)
	}
	images, err := filepath.Glob(filepath.Join(plane.Root, "hosts", "*", "machines", infra.Spec.ID, "disk.img"))
	if err != nil || len(images) != 1 {
		t.Fatalf("disks of %s: %v, %v", name, images, err)
	}
	inits := plane.Find(t, name, "capstan-init")
	if err := unix.Unmount(filepath.Join(filepath.Dir(images[0]), "rootfs"), unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(images[0], images[0]+".lost"); err != nil {
		t.Fatal(err)
	}
	for _, p := range inits {
		if len(p.Args) == 1 {
			harness.Kill(t, p)
		}
	}
}

// restoreIntoAnother creates another cluster from a backup. It waits for the keys of the original cluster.
func restoreIntoAnother(t *testing.T, s *subject, b controlplanev1.BackupStatus) {
	const name = "bk2"
	from, to := filepath.Join(plane.Root, "backups", s.Namespace, s.Name), filepath.Join(plane.Root, "backups", s.Namespace, name)
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	for purpose, secretName := range map[string]string{"ca": secret.Name(name, secret.ClusterCA), "sa": secret.Name(name, secret.ServiceAccount), "encryption": bootstrap.EncryptionSecretName(name)} {
		of := map[string]string{"ca": secret.Name(s.Name, secret.ClusterCA), "sa": secret.Name(s.Name, secret.ServiceAccount), "encryption": bootstrap.EncryptionSecretName(s.Name)}[purpose]
		source := &corev1.Secret{}
		if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: s.Namespace, Name: of}, source); err != nil {
			t.Fatal(err)
		}
		given := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: secretName, Labels: map[string]string{clusterv1.ClusterNameLabel: name}}, Type: source.Type, Data: source.Data}
		if err := plane.Client.Create(t.Context(), given); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = plane.Client.Delete(context.WithoutCancel(t.Context()), given) })
	}
	other := &subject{Cluster: &harness.Cluster{Plane: plane, Namespace: s.Namespace, Name: name}, made: map[string]bool{}}
	t.Cleanup(func() { other.Delete(t) })
	for _, object := range objectsOf(t, plane.Must(t, "create", "cluster", name, "--namespace", s.Namespace, "--workers", "0", "--dry-run")) {
		if object.GetKind() == "CapstanControlPlane" {
			restore, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&controlplanev1.RestoreSpec{
				Name: b.Name, Store: etcdv1.BackupStore{Directory: etcdv1.DirectoryStore{Path: backupsPath}}, Keys: b.Keys,
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := unstructured.SetNestedMap(object.Object, restore, "spec", "restore"); err != nil {
				t.Fatal(err)
			}
		}
		if err := plane.Client.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	other.restored(t)
	other.Connect(t)
	other.wantContent(t, "before", "after")
	harness.Eventually(t, "only its own Nodes", limit, func(ctx context.Context) error { return other.NodesReady(ctx, 1) })
	restoreAgain(t, other)
}

// restoreAgain restores a running cluster from the backup that it comes from, after a machine has checked the backup.
func restoreAgain(t *testing.T, s *subject) {
	before := s.mustMachines(t)
	s.write(t, "lost")
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Restore.Attempt = "2" })
	reasons := map[string]bool{}
	harness.Eventually(t, "the cluster is restored again", limit, func(ctx context.Context) error {
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		reasons[conditions.GetReason(cp, controlplanev1.RestoredCondition)] = true
		if cp.Annotations[controlplanev1.RestoredAnnotation] != cp.Spec.Restore.ID() {
			return errors.New(explain(cp, nil))
		}
		return nil
	})
	if !reasons[controlplanev1.RestoringReason] || reasons[controlplanev1.RestoringUncheckedReason] {
		t.Errorf("no machine has checked the backup: %v", slices.Sorted(maps.Keys(reasons)))
	}
	for name := range s.mustMachines(t) {
		if _, old := before[name]; old {
			t.Errorf("%s still exists", name)
		}
	}
	s.wantContent(t, "before", "lost")
}

// objectsOf parses YAML documents.
func objectsOf(t *testing.T, text string) []*unstructured.Unstructured {
	t.Helper()
	out, err := manifest.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

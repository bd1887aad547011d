package backup

import (
	"context"
	"encoding/base64"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

const (
	manager = "capstan-etcd-backup"
	// backupTimeout of one backup: gibibytes over a slow line.
	backupTimeout = time.Hour
	// storeTimeout of the removal of old backups.
	storeTimeout = 2 * time.Minute
	maxMessage   = 1024
)

// Runner makes the backups that name this machine's member of etcd.
type Runner struct {
	// Name of the member.
	Name   string
	Client dynamic.Interface
	Member Member
	// Dir holds a snapshot on its way.
	Dir string
	Log *slog.Logger
}

// Run runs until ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	// A cluster that an older version has made does not know the kind.
	err := kube.Retry(ctx, "watching EtcdBackups", func(ctx context.Context) error {
		_, err := r.Client.Resource(kube.EtcdBackups).List(ctx, metav1.ListOptions{Limit: 1})
		return err
	})
	if err != nil {
		return err
	}
	wake := make(chan struct{}, 1)
	notify := func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: kube.ListWatch(ctx, r.Client, kube.EtcdBackups, ""),
		ObjectType:    &unstructured.Unstructured{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { notify() },
			UpdateFunc: func(any, any) { notify() },
		},
	})
	go controller.RunWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), controller.HasSynced) {
		return ctx.Err()
	}
	done := map[string]bool{} // by UID: the watch may tell late of what was written
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-wake:
		}
		for _, o := range mine(store.List(), r.Name) {
			if done[string(o.UID)] {
				continue
			}
			if err := r.tell(ctx, o.Name, r.make(ctx, o)); err != nil {
				r.Log.Error("telling of a backup", "backup", o.Name, "error", err)
			}
			done[string(o.UID)] = true
		}
	}
}

// mine are the backups that a member has to make, in the order of their names.
func mine(objects []any, member string) []etcdv1.EtcdBackup {
	var out []etcdv1.EtcdBackup
	for _, item := range objects {
		o, ok := item.(*unstructured.Unstructured)
		if !ok {
			continue
		}
		var b etcdv1.EtcdBackup
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &b); err != nil {
			continue
		}
		if b.Spec.Member == member && b.Status.Phase == "" && b.DeletionTimestamp.IsZero() {
			out = append(out, b)
		}
	}
	slices.SortFunc(out, func(a, b etcdv1.EtcdBackup) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// make makes a backup and says what has become of it. Done again, it makes it again, under the same name.
func (r *Runner) make(ctx context.Context, o etcdv1.EtcdBackup) etcdv1.EtcdBackupStatus {
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	status, store, err := r.save(ctx, o)
	status.Time = &metav1.Time{Time: time.Now().UTC().Truncate(time.Second)}
	if err != nil {
		r.Log.Warn("backup failed", "backup", o.Name, "error", err)
		status.Phase, status.Message = etcdv1.BackupFailed, shorten(err.Error())
		return status
	}
	status.Phase = etcdv1.BackupSucceeded
	r.Log.Info("backup made", "backup", o.Name, "location", status.Location, "bytes", status.SizeBytes, "revision", status.Revision)
	remove, stop := context.WithTimeout(ctx, storeTimeout)
	defer stop()
	for _, name := range o.Spec.Remove {
		if err := Remove(remove, store, name); err != nil {
			status.Message = shorten(fmt.Sprintf("an old backup cannot be removed: %s", err))
			break
		}
		status.Removed = append(status.Removed, name)
	}
	return status
}

func (r *Runner) save(ctx context.Context, o etcdv1.EtcdBackup) (etcdv1.EtcdBackupStatus, Store, error) {
	var status etcdv1.EtcdBackupStatus
	config, err := r.config(ctx, o.Spec)
	if err != nil {
		return status, nil, err
	}
	store, err := Open(config)
	if err != nil {
		return status, nil, err
	}
	// What a former run has left.
	if err := os.RemoveAll(r.Dir); err != nil {
		return status, store, err
	}
	if err := os.MkdirAll(r.Dir, 0o700); err != nil {
		return status, store, err
	}
	defer func() { _ = os.RemoveAll(r.Dir) }()
	manifest := Manifest{
		Name: o.Name, Folder: o.Spec.Folder, Trigger: string(o.Spec.Trigger), Request: o.Spec.Request,
		Time: time.Now().UTC().Truncate(time.Second), KubernetesVersion: o.Spec.KubernetesVersion, Keys: map[string]string{},
	}
	for _, k := range o.Spec.Keys {
		manifest.Keys[k.Name] = k.SHA256
	}
	file := filepath.Join(r.Dir, snapshotFile(o.Name))
	if err := r.Member.Snapshot(ctx, file, &manifest); err != nil {
		return status, store, err
	}
	if err := Save(ctx, store, file, manifest); err != nil {
		return status, store, err
	}
	status.Location, status.SizeBytes, status.Revision = store.Location(snapshotFile(o.Name)), manifest.SizeBytes, manifest.Revision
	status.EtcdVersion, status.SHA256 = manifest.EtcdVersion, manifest.SHA256
	return status, store, nil
}

// config is the store with its credentials, which are in a Secret of the cluster.
func (r *Runner) config(ctx context.Context, spec etcdv1.EtcdBackupSpec) (nodeconfig.BackupStore, error) {
	if spec.Store.S3.Bucket == "" {
		return nodeconfig.StoreOf(spec.Store, spec.Folder, nil), nil
	}
	secret, err := r.Client.Resource(kube.Secrets).Namespace(etcdv1.BackupSecretNamespace).Get(ctx, etcdv1.BackupSecretName, metav1.GetOptions{})
	if err != nil {
		return nodeconfig.BackupStore{}, fmt.Errorf("the Secret %s/%s with the credentials of the backup store: %w", etcdv1.BackupSecretNamespace, etcdv1.BackupSecretName, err)
	}
	content := map[string]string{}
	encoded, _, err := unstructured.NestedStringMap(secret.Object, "data")
	if err != nil {
		return nodeconfig.BackupStore{}, err
	}
	for key, value := range encoded {
		text, err := base64.StdEncoding.DecodeString(value)
		if err != nil {
			return nodeconfig.BackupStore{}, fmt.Errorf("the key %s of the Secret %s/%s is not base64", key, etcdv1.BackupSecretNamespace, etcdv1.BackupSecretName)
		}
		content[key] = string(text)
	}
	return nodeconfig.StoreOf(spec.Store, spec.Folder, content), nil
}

// tell writes the status.
func (r *Runner) tell(ctx context.Context, name string, status etcdv1.EtcdBackupStatus) error {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&status)
	if err != nil {
		return err
	}
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": etcdv1.GroupVersion.String(), "kind": "EtcdBackup", "metadata": map[string]any{"name": name}, "status": fields,
	}}
	return kube.Retry(ctx, "status of EtcdBackup "+name, func(ctx context.Context) error {
		_, err := r.Client.Resource(kube.EtcdBackups).ApplyStatus(ctx, name, object, metav1.ApplyOptions{FieldManager: manager, Force: true})
		switch {
		case apierrors.IsNotFound(err): // nobody wants to know any more
			return nil
		case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
			return &kube.FinalError{Err: err}
		}
		return err
	})
}

func shorten(message string) string {
	if len(message) > maxMessage {
		return strings.ToValidUTF8(message[:maxMessage], "") + "…"
	}
	return message
}

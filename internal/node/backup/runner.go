package backup

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/shorten"
	"capstan.dev/capstan/internal/wakeup"
)

const (
	manager = "capstan-etcd-backup"
	// backupTimeout of one backup. It is enough for gibibytes over a slow connection.
	backupTimeout = time.Hour
	// storeTimeout of the removal of old backups.
	storeTimeout = 2 * time.Minute
	maxMessage   = 1024
)

// Runner creates and checks the backups whose objects name this machine's member of etcd.
type Runner struct {
	// Name of the member.
	Name   string
	Client dynamic.Interface
	Member Member
	// Etcdutl is the path of the program.
	Etcdutl string
	// Dir contains a snapshot during its transfer. A snapshot for a check is in Dir.check, because both can happen at
	// once.
	Dir string
	Log *slog.Logger
}

// Run runs until ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	// An agent that was killed leaves snapshots with all objects, and perhaps the EtcdBackup is gone.
	if err := errors.Join(os.RemoveAll(r.Dir), os.RemoveAll(r.checkDir())); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return follow(ctx, r.Client, kube.EtcdBackups, r.makeMine) })
	group.Go(func() error { return follow(ctx, r.Client, kube.EtcdBackupChecks, r.checkMine) })
	return group.Wait()
}

// checkDir is the folder for copies of backups that are checked.
func (r *Runner) checkDir() string { return r.Dir + ".check" }

// done contains the UIDs of finished objects, because the watch may deliver their status late.
type done map[types.UID]bool

// follow calls work with all objects of a kind after each change of one. It waits for a missing kind, because the
// control plane provider installs it.
func follow(ctx context.Context, client dynamic.Interface, kind schema.GroupVersionResource, work func(context.Context, []any, done)) error {
	err := kube.Retry(ctx, "watching "+kind.Resource, func(ctx context.Context) error {
		_, err := client.Resource(kind).List(ctx, metav1.ListOptions{Limit: 1})
		return err
	})
	if err != nil {
		return err
	}
	wake := wakeup.New()
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: kube.ListWatch(ctx, client, kind, ""),
		ObjectType:    &unstructured.Unstructured{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { wake.Send() },
			UpdateFunc: func(any, any) { wake.Send() },
		},
	})
	go controller.RunWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), controller.HasSynced) {
		return ctx.Err()
	}
	known := done{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-wake:
			work(ctx, store.List(), known)
		}
	}
}

// makeMine creates the backups that name this machine.
func (r *Runner) makeMine(ctx context.Context, objects []any, known done) {
	for _, o := range mine(objects, r.Name) {
		if known[o.UID] {
			continue
		}
		if err := r.report(ctx, kube.EtcdBackups, "EtcdBackup", o.Name, r.make(ctx, o)); err != nil {
			r.Log.Error("cannot report a backup", "backup", o.Name, "error", err)
		}
		known[o.UID] = true
	}
}

// mine returns the unfinished backups that name a member, sorted by name.
func mine(objects []any, member string) []etcdv1.EtcdBackup {
	out := slices.DeleteFunc(decode[etcdv1.EtcdBackup](objects), func(b etcdv1.EtcdBackup) bool {
		return b.Spec.Member != member || b.Status.Phase != "" || !b.DeletionTimestamp.IsZero()
	})
	slices.SortFunc(out, func(a, b etcdv1.EtcdBackup) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// decode reads the objects of a store.
func decode[T any](objects []any) []T {
	var out []T
	for _, item := range objects {
		var typed T
		if o, ok := item.(*unstructured.Unstructured); ok && runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &typed) == nil {
			out = append(out, typed)
		}
	}
	return out
}

// make creates a backup and returns its status. A repeated call replaces the backup of the same name.
func (r *Runner) make(ctx context.Context, o etcdv1.EtcdBackup) *etcdv1.EtcdBackupStatus {
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	status, store, err := r.save(ctx, o)
	status.Time = &metav1.Time{Time: time.Now().UTC().Truncate(time.Second)}
	if err != nil {
		r.Log.Warn("backup failed", "backup", o.Name, "error", err)
		status.Phase, status.Message = etcdv1.BackupFailed, shorten.Marked(err.Error(), maxMessage)
		return &status
	}
	status.Phase = etcdv1.BackupSucceeded
	r.Log.Info("backup made", "backup", o.Name, "location", status.Location, "bytes", status.SizeBytes, "revision", status.Revision)
	remove, stop := context.WithTimeout(ctx, storeTimeout)
	defer stop()
	for _, name := range o.Spec.Remove {
		if err := Remove(remove, store, name); err != nil {
			status.Message = shorten.Marked(fmt.Sprintf("cannot remove an old backup: %s", err), maxMessage)
			break
		}
		status.Removed = append(status.Removed, name)
	}
	return &status
}

func (r *Runner) save(ctx context.Context, o etcdv1.EtcdBackup) (etcdv1.EtcdBackupStatus, Store, error) {
	var status etcdv1.EtcdBackupStatus
	store, err := r.open(ctx, o.Spec.Store, o.Spec.Folder, etcdv1.BackupSecretName)
	if err != nil {
		return status, nil, err
	}
	if err := empty(r.Dir); err != nil {
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

// empty creates an empty folder, and removes files of an interrupted run.
func empty(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.MkdirAll(dir, 0o700)
}

// open opens a store, with its credentials from a Secret of the cluster.
func (r *Runner) open(ctx context.Context, store etcdv1.BackupStore, folder, secretName string) (Store, error) {
	if store.S3.Bucket == "" {
		return Open(nodeconfig.StoreOf(store, folder, nil))
	}
	where := etcdv1.BackupSecretNamespace + "/" + secretName
	secret, err := r.Client.Resource(kube.Secrets).Namespace(etcdv1.BackupSecretNamespace).Get(ctx, secretName, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("the Secret %s with the credentials of the backup store: %w", where, err)
	}
	content := map[string]string{}
	encoded, _, err := unstructured.NestedStringMap(secret.Object, "data")
	if err != nil {
		return nil, err
	}
	for key, value := range encoded {
		text, err := base64.StdEncoding.DecodeString(value)
		if err != nil {
			return nil, fmt.Errorf("the key %s of the Secret %s is not base64", key, where)
		}
		content[key] = string(text)
	}
	return Open(nodeconfig.StoreOf(store, folder, content))
}

// report writes the status of an object.
func (r *Runner) report(ctx context.Context, resource schema.GroupVersionResource, kind, name string, status any) error {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(status)
	if err != nil {
		return err
	}
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": etcdv1.GroupVersion.String(), "kind": kind, "metadata": map[string]any{"name": name}, "status": fields,
	}}
	return kube.Retry(ctx, "status of "+kind+" "+name, func(ctx context.Context) error {
		_, err := r.Client.Resource(resource).ApplyStatus(ctx, name, object, metav1.ApplyOptions{FieldManager: manager, Force: true})
		switch {
		case apierrors.IsNotFound(err): // the object was deleted
			return nil
		case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
			return &kube.FinalError{Err: err}
		}
		return err
	})
}

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
)

const (
	manager = "capstan-etcd-backup"
	// backupTimeout of one backup: gibibytes over a slow line.
	backupTimeout = time.Hour
	// storeTimeout of the removal of old backups.
	storeTimeout = 2 * time.Minute
	maxMessage   = 1024
)

// Runner makes the backups, and the checks of backups, that name this machine's member of etcd.
type Runner struct {
	// Name of the member.
	Name   string
	Client dynamic.Interface
	Member Member
	// Etcdutl is the program.
	Etcdutl string
	// Dir holds a snapshot on its way. One that is checked is in Dir.check: both may be there at once.
	Dir string
	Log *slog.Logger
}

// Run runs until ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return follow(ctx, r.Client, kube.EtcdBackups, r.makeMine) })
	group.Go(func() error { return follow(ctx, r.Client, kube.EtcdBackupChecks, r.checkMine) })
	return group.Wait()
}

// done are the objects that were worked on, by UID: the watch may tell late of what was written.
type done map[types.UID]bool

// follow calls work with all objects of a kind whenever one of them has changed. It waits for a kind that is not there: the
// control plane provider brings it.
func follow(ctx context.Context, client dynamic.Interface, kind schema.GroupVersionResource, work func(context.Context, []any, done)) error {
	err := kube.Retry(ctx, "watching "+kind.Resource, func(ctx context.Context) error {
		_, err := client.Resource(kind).List(ctx, metav1.ListOptions{Limit: 1})
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
		ListerWatcher: kube.ListWatch(ctx, client, kind, ""),
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

// makeMine makes the backups that this machine has to make.
func (r *Runner) makeMine(ctx context.Context, objects []any, known done) {
	for _, o := range mine(objects, r.Name) {
		if known[o.UID] {
			continue
		}
		if err := r.tell(ctx, kube.EtcdBackups, "EtcdBackup", o.Name, r.make(ctx, o)); err != nil {
			r.Log.Error("telling of a backup", "backup", o.Name, "error", err)
		}
		known[o.UID] = true
	}
}

// mine are the backups that a member has to make, in the order of their names.
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

// make makes a backup and says what has become of it. Done again, it makes it again, under the same name.
func (r *Runner) make(ctx context.Context, o etcdv1.EtcdBackup) *etcdv1.EtcdBackupStatus {
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	status, store, err := r.save(ctx, o)
	status.Time = &metav1.Time{Time: time.Now().UTC().Truncate(time.Second)}
	if err != nil {
		r.Log.Warn("backup failed", "backup", o.Name, "error", err)
		status.Phase, status.Message = etcdv1.BackupFailed, shorten(err.Error())
		return &status
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

// empty makes an empty folder: a former run may have left something.
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

// tell writes the status of an object.
func (r *Runner) tell(ctx context.Context, resource schema.GroupVersionResource, kind, name string, status any) error {
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

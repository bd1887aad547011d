package controlplane

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/bootstrap/render"
)

// secretRetry is when Secrets that the user names are looked for again: those without the cluster's label are no events.
const secretRetry = 30 * time.Second

// reconcileBackups sees to the backups. What goes wrong with them is told, and tried again: machines are repaired all the same.
func (r *Reconciler) reconcileBackups(ctx context.Context, s *scope) (again time.Duration) {
	again, err := r.backUp(ctx, s)
	if err == nil {
		return again
	}
	ctrl.LoggerFrom(ctx).Error(err, "The backups could not be seen to")
	r.tellBackups(s, nil, err.Error())
	return secretRetry
}

// backUp has the backups made that are due, and tells of those that there are. s.held says then why no other version
// can be rolled out yet.
func (r *Reconciler) backUp(ctx context.Context, s *scope) (again time.Duration, err error) {
	spec := s.controlPlane.Spec.Backup
	if !spec.IsDefined() || !s.stacked() {
		conditions.Delete(s.controlPlane, controlplanev1.BackupSucceededCondition)
		return 0, nil
	}
	w := backupWish{since: s.controlPlane.CreationTimestamp.Time, onDemand: s.controlPlane.Annotations[controlplanev1.BackupAnnotation]}
	if w.schedule, err = parseSchedule(spec.Schedule); err != nil {
		r.tellBackups(s, nil, "spec.backup.schedule: "+err.Error())
		return 0, nil
	}
	if outdated, begun := rolling(s.machines.UnsortedList(), wantedVersion(s.controlPlane)); outdated && s.initialized() && ptr.Deref(spec.BeforeUpgrade, true) {
		w.upgradeTo, w.begun = wantedVersion(s.controlPlane), begun
	}
	s.held = holds(w, attemptsOf(s.controlPlane.Status.Backups, nil), now())
	f := s.fleet()
	if f.unknown != "" {
		return 0, nil // What is known of backups stands.
	}
	found, err := r.readBackups(ctx, s)
	if err != nil || found == nil {
		return unhealthyRetry, err
	}
	if found, err = r.clearBackups(ctx, s, f, found); err != nil {
		return 0, err
	}
	attempts := attemptsOf(s.controlPlane.Status.Backups, found)
	s.held = holds(w, attempts, now())
	next, again := nextBackup(w, attempts, now())
	problem := ""
	if next != nil {
		problem, err = r.makeBackup(ctx, s, f, *next)
		if err != nil {
			return 0, err
		}
		if problem != "" {
			again = secretRetry
		}
	}
	r.tellBackups(s, attempts, problem)
	return again, nil
}

// holds says why another version cannot be rolled out yet; "" when it can.
func holds(w backupWish, attempts []attempt, now time.Time) string {
	if !upgradeHeld(w, attempts, now) {
		return ""
	}
	return fmt.Sprintf("the backup before the upgrade to %s is not there yet; see the condition %s, or set spec.backup.beforeUpgrade to false to go on without it", w.upgradeTo, controlplanev1.BackupSucceededCondition)
}

// tellBackups sets the condition, and tells when it changes.
func (r *Reconciler) tellBackups(s *scope, attempts []attempt, problem string) {
	before := conditions.Get(s.controlPlane, controlplanev1.BackupSucceededCondition)
	c := backupCondition(attempts, problem)
	conditions.Set(s.controlPlane, c)
	if c.Status == metav1.ConditionFalse && (before == nil || before.Message != c.Message) {
		r.event(s, corev1.EventTypeWarning, "BackupFailed", "Backup", "%s", c.Message)
	}
}

// readBackups lists what the workload cluster says of backups, and adds it to the status; nil when it does not know the kind.
func (r *Reconciler) readBackups(ctx context.Context, s *scope) ([]etcdv1.EtcdBackup, error) {
	ctx, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	list := &etcdv1.EtcdBackupList{}
	err := s.workload.client.List(ctx, list)
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		r.reinstall(s)
		r.tellBackups(s, nil, "the cluster does not know the kind EtcdBackup yet")
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read EtcdBackups: %w", err)
	}
	had := map[string]bool{}
	for _, b := range s.controlPlane.Status.Backups {
		had[b.Name] = true
	}
	s.controlPlane.Status.Backups = mergeBackups(s.controlPlane.Status.Backups, list.Items)
	for _, b := range s.controlPlane.Status.Backups {
		if !had[b.Name] {
			r.event(s, corev1.EventTypeNormal, "BackupSucceeded", "Backup", "Backup %s (%s) is at %s", b.Name, b.Trigger, b.Location)
		}
	}
	measureBackups(s.controlPlane)
	out := list.Items
	if out == nil {
		out = []etcdv1.EtcdBackup{}
	}
	return out, r.watchWorkload(ctx, s, "etcdbackups", &etcdv1.EtcdBackup{})
}

// clearBackups deletes the EtcdBackups that nobody needs any more, and returns the others.
func (r *Reconciler) clearBackups(ctx context.Context, s *scope, f fleet, found []etcdv1.EtcdBackup) ([]etcdv1.EtcdBackup, error) {
	known := s.controlPlane.Status.Backups
	gone := superseded(known, found)
	var out []etcdv1.EtcdBackup
	for i := range found {
		b := &found[i]
		if !slices.Contains(gone, b.Name) && !lost(b, known, f, now()) {
			out = append(out, *b)
			continue
		}
		if err := client.IgnoreNotFound(s.workload.client.Delete(ctx, b, client.Preconditions{UID: &b.UID})); err != nil {
			return nil, fmt.Errorf("cannot delete the EtcdBackup %s: %w", b.Name, err)
		}
	}
	return out, nil
}

// makeBackup has a machine make a backup; problem says why that is not possible now.
func (r *Reconciler) makeBackup(ctx context.Context, s *scope, f fleet, want wanted) (problem string, err error) {
	spec := s.controlPlane.Spec.Backup
	members := backupMembers(f, s.workload.members)
	if len(members) == 0 {
		return "no member of etcd is healthy", nil
	}
	credentials, problem, err := r.storeSecret(ctx, s, spec.Store)
	if err != nil || problem != "" {
		return problem, err
	}
	if credentials != nil {
		if err := r.bringSecret(ctx, s, etcdv1.BackupSecretName, credentials); err != nil {
			return "", err
		}
	}
	keys, err := r.backupKeys(ctx, s)
	if err != nil {
		return "", err
	}
	b := &etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: backupName(s.cluster, now())}, Spec: etcdv1.EtcdBackupSpec{
		Member: members[0], Trigger: want.trigger, Request: want.request, Store: spec.Store, Folder: backupFolder(s.cluster),
		KubernetesVersion: lowestVersion(s), Keys: keys,
		Remove: expired(s.controlPlane.Status.Backups, int(ptr.Deref(spec.Retention, controlplanev1.DefaultBackupRetention)), want.trigger, s.controlPlane.Spec.Restore.Name),
	}}
	if err := s.workload.client.Create(ctx, b); err != nil {
		return "", fmt.Errorf("cannot make the EtcdBackup %s: %w", b.Name, err)
	}
	return "", nil
}

// backupName is the same for two managers that make one backup at the same time, and another one for each cluster: clusters
// of one name, in two management clusters that share a bucket, share a folder, and their schedules are due in the same second.
func backupName(cluster *clusterv1.Cluster, at time.Time) string {
	sum := sha256.Sum256([]byte(cluster.UID))
	return "etcd-" + at.UTC().Format("20060102-150405") + "-" + hex.EncodeToString(sum[:3])
}

// backupFolder of a cluster in a store.
func backupFolder(cluster *clusterv1.Cluster) string { return cluster.Namespace + "/" + cluster.Name }

func lowestVersion(s *scope) string {
	if all := versions(s.machines); len(all) > 0 {
		return all[0].Version
	}
	return wantedVersion(s.controlPlane)
}

// storeSecret is what the Secrets of a store hold; nil when it needs none. problem says what is missing, never anything of
// their content.
func (r *Reconciler) storeSecret(ctx context.Context, s *scope, store etcdv1.BackupStore) (data map[string][]byte, problem string, err error) {
	if store.S3.Bucket == "" {
		return nil, "", nil
	}
	data = map[string][]byte{}
	take := func(name string, keys ...string) error {
		if name == "" || problem != "" {
			return nil
		}
		found, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.cluster.Namespace, Name: name})
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

// bringSecret gives the machines the credentials of a store: in a Secret that their agents may read.
func (r *Reconciler) bringSecret(ctx context.Context, s *scope, name string, data map[string][]byte) error {
	out := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: etcdv1.BackupSecretNamespace, Name: name}}
	_, err := controllerutil.CreateOrPatch(ctx, s.workload.client, out, func() error {
		out.Data = data
		return nil
	})
	if err != nil {
		return fmt.Errorf("cannot give the Secret %s/%s to the machines: %w", out.Namespace, out.Name, err)
	}
	return nil
}

// backupKeys tells the keys apart that what is in a backup needs.
func (r *Reconciler) backupKeys(ctx context.Context, s *scope) ([]etcdv1.BackupKey, error) {
	var out []etcdv1.BackupKey
	add := func(name string, content []byte) {
		sum := sha256.Sum256(content)
		out = append(out, etcdv1.BackupKey{Name: name, SHA256: hex.EncodeToString(sum[:])})
	}
	for name, purpose := range map[string]secret.Purpose{etcdv1.KeyCA: secret.ClusterCA, etcdv1.KeyServiceAccount: secret.ServiceAccount} {
		found, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.cluster.Namespace, Name: secret.Name(s.cluster.Name, purpose)})
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
	encryption := s.controlPlane.Spec.Config.Cluster.Encryption
	from, key := bootstrap.EncryptionSecretName(s.cluster.Name), secret.KubeconfigDataName
	if ref := encryption.Configuration.Secret; ref.Name != "" {
		from, key = ref.Name, ref.Key
	}
	if encryption.Configuration.Secret.Name != "" || render.NeedsEncryptionKey(encryption) {
		found, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.cluster.Namespace, Name: from})
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

// lastBackup is when the newest backup was complete.
func lastBackup(cp *controlplanev1.CapstanControlPlane) (at time.Time) {
	for _, b := range cp.Status.Backups {
		at = slices.MaxFunc([]time.Time{at, b.Time.Time}, func(a, b time.Time) int { return cmp.Compare(a.Unix(), b.Unix()) })
	}
	return at
}

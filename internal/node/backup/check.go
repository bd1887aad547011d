package backup

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/kube"
)

// spareBytes stay free on a machine that checks a backup: its own etcd writes to the same disk.
const spareBytes = 256 << 20

// Check looks at a backup as a machine that begins with it would, without beginning: it is there, whole, the one that is
// meant, and etcd's data can be read. The folder dir holds it meanwhile.
func Check(ctx context.Context, store Store, etcdutl, name, dir, sum string) (Manifest, error) {
	manifest, err := loadManifest(ctx, store, name, dir)
	if err != nil {
		return manifest, err
	}
	if err := Room(dir, manifest.SizeBytes); err != nil {
		return manifest, err
	}
	file, err := loadSnapshot(ctx, store, manifest, name, dir, sum)
	if err != nil {
		return manifest, err
	}
	// It goes through every page of the database.
	if out, err := exec.CommandContext(ctx, etcdutl, "snapshot", "status", file).CombinedOutput(); err != nil {
		return manifest, errors.Join(ctx.Err(), fmt.Errorf("the snapshot at %s is damaged: etcdutl snapshot status: %w: %s", store.Location(snapshotFile(name)), err, lastLine(string(out))))
	}
	return manifest, nil
}

// Room says when a disk has no room for so many bytes, and some more for what else writes to it.
func Room(dir string, bytes int64) error {
	var free syscall.Statfs_t
	if err := syscall.Statfs(dir, &free); err != nil {
		return fmt.Errorf("the free bytes of %s: %w", dir, err)
	}
	if has := int64(free.Bavail) * free.Bsize; has < bytes+spareBytes {
		return fmt.Errorf("this machine has no room for the backup: it has %d bytes, and %d bytes are free, of which %d are kept", bytes, has, int64(spareBytes))
	}
	return nil
}

// checkMine looks at the backups that this machine has to look at. It tells that it has begun: who asked knows then that the
// machine can do it, however long it takes.
func (r *Runner) checkMine(ctx context.Context, objects []any, known done) {
	for _, o := range myChecks(objects, r.Name) {
		if known[o.UID] {
			continue
		}
		tell := func(status *etcdv1.EtcdBackupCheckStatus) error {
			return r.tell(ctx, kube.EtcdBackupChecks, "EtcdBackupCheck", o.Name, status)
		}
		err := tell(&etcdv1.EtcdBackupCheckStatus{Phase: etcdv1.CheckBegun})
		if err == nil {
			err = tell(r.check(ctx, o))
		}
		if err != nil { // The description of a backup may hold what no backup of ours has.
			r.Log.Error("telling of the check of a backup", "backup", o.Spec.Backup, "error", err)
			_ = tell(failed(err))
		}
		known[o.UID] = true
	}
}

func failed(err error) *etcdv1.EtcdBackupCheckStatus {
	return &etcdv1.EtcdBackupCheckStatus{Phase: etcdv1.CheckFailed, Message: shorten(err.Error())}
}

// myChecks are the checks that a member has to make, also those that it has begun before it was started again.
func myChecks(objects []any, member string) []etcdv1.EtcdBackupCheck {
	out := slices.DeleteFunc(decode[etcdv1.EtcdBackupCheck](objects), func(c etcdv1.EtcdBackupCheck) bool {
		return c.Spec.Member != member || c.Status.Phase != "" && c.Status.Phase != etcdv1.CheckBegun || !c.DeletionTimestamp.IsZero()
	})
	slices.SortFunc(out, func(a, b etcdv1.EtcdBackupCheck) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// check makes a check and says what it has found.
func (r *Runner) check(ctx context.Context, o etcdv1.EtcdBackupCheck) *etcdv1.EtcdBackupCheckStatus {
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	status, err := r.look(ctx, o.Spec)
	if err != nil {
		r.Log.Warn("a backup that is to be restored cannot be used", "backup", o.Spec.Backup, "error", err)
		return failed(err)
	}
	r.Log.Info("a backup that is to be restored can be used", "backup", o.Spec.Backup, "location", status.Location)
	status.Phase = etcdv1.CheckSucceeded
	return &status
}

func (r *Runner) look(ctx context.Context, spec etcdv1.EtcdBackupCheckSpec) (status etcdv1.EtcdBackupCheckStatus, err error) {
	dir := r.Dir + ".check"
	store, err := r.open(ctx, spec.Store, spec.Folder, etcdv1.RestoreSecretName)
	if err != nil {
		return status, err
	}
	if err := empty(dir); err != nil {
		return status, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	manifest, err := Check(ctx, store, r.Etcdutl, spec.Backup, dir, spec.SHA256)
	if err != nil {
		return status, err
	}
	for _, name := range slices.Sorted(maps.Keys(manifest.Keys)) {
		status.Keys = append(status.Keys, etcdv1.BackupKey{Name: name, SHA256: manifest.Keys[name]})
	}
	status.Location, status.SizeBytes, status.KubernetesVersion = store.Location(snapshotFile(spec.Backup)), manifest.SizeBytes, manifest.KubernetesVersion
	return status, nil
}

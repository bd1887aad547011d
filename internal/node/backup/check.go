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
	"capstan.dev/capstan/internal/shorten"
)

// spareBytes stay free on a machine that makes or checks a backup: its own etcd writes to the same disk.
const spareBytes = 256 << 20

// ErrNoRoom is the error of a machine whose disk has too little free space.
var ErrNoRoom = errors.New("this machine has no room for the backup")

// Check verifies a backup in the same way as a machine that starts from it: the backup exists, is complete, has the
// expected checksum, and etcd can read its data. The folder dir contains the copy meanwhile.
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
	// `snapshot status` reads every page of the database.
	if out, err := exec.CommandContext(ctx, etcdutl, "snapshot", "status", file).CombinedOutput(); err != nil {
		return manifest, errors.Join(ctx.Err(), fmt.Errorf("the snapshot at %s is damaged: etcdutl snapshot status: %w: %s", store.Location(snapshotFile(name)), err, lastLine(string(out))))
	}
	return manifest, nil
}

// Room returns an error if a disk lacks space for the bytes and for spareBytes.
func Room(dir string, bytes int64) error {
	var free syscall.Statfs_t
	if err := syscall.Statfs(dir, &free); err != nil {
		return fmt.Errorf("reading the free space of %s: %w", dir, err)
	}
	if has := int64(free.Bavail) * free.Bsize; has < bytes+spareBytes {
		return fmt.Errorf("%w: the backup has %d bytes, %d bytes are free, and %d bytes must stay free", ErrNoRoom, bytes, has, int64(spareBytes))
	}
	return nil
}

// checkMine does the checks that name this machine. It first reports the start of a check: this shows that the machine
// supports checks, however long one takes.
func (r *Runner) checkMine(ctx context.Context, objects []any, known done) {
	for _, o := range myChecks(objects, r.Name) {
		if known[o.UID] {
			continue
		}
		report := func(status *etcdv1.EtcdBackupCheckStatus) error {
			return r.report(ctx, kube.EtcdBackupChecks, "EtcdBackupCheck", o.Name, status)
		}
		err := report(&etcdv1.EtcdBackupCheckStatus{Phase: etcdv1.CheckBegun})
		if err == nil {
			err = report(r.check(ctx, o))
		}
		if err != nil { // The manifest of a backup may contain anything, also data that no backup of Capstan has.
			r.Log.Error("cannot report the check of a backup", "backup", o.Spec.Backup, "error", err)
			_ = report(failed(err))
		}
		known[o.UID] = true
	}
}

func failed(err error) *etcdv1.EtcdBackupCheckStatus {
	return &etcdv1.EtcdBackupCheckStatus{Phase: etcdv1.CheckFailed, Message: shorten.Marked(err.Error(), maxMessage)}
}

// myChecks returns the unfinished checks that name a member, including those that it began before a restart.
func myChecks(objects []any, member string) []etcdv1.EtcdBackupCheck {
	out := slices.DeleteFunc(decode[etcdv1.EtcdBackupCheck](objects), func(c etcdv1.EtcdBackupCheck) bool {
		return c.Spec.Member != member || c.Status.Phase != "" && c.Status.Phase != etcdv1.CheckBegun || !c.DeletionTimestamp.IsZero()
	})
	slices.SortFunc(out, func(a, b etcdv1.EtcdBackupCheck) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// check does a check and returns its result.
func (r *Runner) check(ctx context.Context, o etcdv1.EtcdBackupCheck) *etcdv1.EtcdBackupCheckStatus {
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	status, err := r.look(ctx, o.Spec)
	if err != nil {
		r.Log.Warn("a backup cannot be restored", "backup", o.Spec.Backup, "error", err)
		return failed(err)
	}
	r.Log.Info("a backup can be restored", "backup", o.Spec.Backup, "location", status.Location)
	status.Phase = etcdv1.CheckSucceeded
	return &status
}

func (r *Runner) look(ctx context.Context, spec etcdv1.EtcdBackupCheckSpec) (status etcdv1.EtcdBackupCheckStatus, err error) {
	dir := r.checkDir()
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

package embedded

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/mod/semver"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/embedded/archive"
	"capstan.dev/capstan/internal/node/backup"
	"capstan.dev/capstan/internal/version"
)

// RestoreOptions of `capstan restore`.
type RestoreOptions struct {
	Options
	// Archive is the backup: a file, or s3://BUCKET/KEY.
	Archive BackupTarget
	// Replace allows the replacement of an existing installation. Its files are moved to a folder beside it.
	Replace bool
}

// Restored is the result of a restore.
type Restored struct {
	archive.Manifest
	// PlaneKubernetesVersion is the version with which the plane starts. That of the backup may not be installed.
	PlaneKubernetesVersion string `json:"planeKubernetesVersion"`
	// Kept is the folder with the replaced files; empty when there were none.
	Kept string `json:"kept,omitempty"`
}

// restoredParts lists the restored files in the order of their move. The state is last: it marks a complete installation.
var restoredParts = []string{pkiName, "etcd", stateName}

// Restore creates an installation from a backup. It unpacks and checks the whole backup before it changes existing files. Then
// it renames the new files to their places. After a crash, another Restore of the same backup or the start of the plane
// continues.
func Restore(ctx context.Context, o RestoreOptions) (Restored, error) {
	l, assets, err := o.complete()
	if err != nil {
		return Restored{}, err
	}
	lock, err := lockRoot(ctx, l, o.wait)
	if err != nil {
		return Restored{}, err
	}
	defer lock.Close()
	planeLock, err := lockPlane(l)
	if errors.Is(err, errRunning) {
		return Restored{}, fmt.Errorf("expected a stopped plane: %w; stop it with `capstan down --keep-state`", err)
	}
	if err != nil {
		return Restored{}, err
	}
	defer planeLock.Close()
	if err := emptyDir(l.restorePart()); err != nil {
		return Restored{}, err
	}
	defer func() { _ = os.RemoveAll(l.restorePart()) }()
	file, err := fetchArchive(ctx, l, o.Archive)
	if err != nil {
		return Restored{}, err
	}
	manifest, err := archive.Read(file)
	if err != nil {
		return Restored{}, err
	}
	if done, err := finishSame(l, manifest); err != nil {
		return Restored{}, err
	} else if done {
		return l.restored(manifest)
	}
	if err := mayRestore(l, assets, manifest, o.Replace); err != nil {
		return Restored{}, err
	}
	if err := unpack(ctx, l, assets, file, lock); err != nil {
		return Restored{}, err
	}
	if err := atomicfile.Rename(l.restorePart(), l.restoreReady()); err != nil {
		return Restored{}, err
	}
	if err := finishRestore(l); err != nil {
		return Restored{}, err
	}
	return l.restored(manifest)
}

// restorePart is the folder of a restore in preparation. restoreReady is the name of this folder when it is complete. From
// then on the restore is always completed.
func (l Layout) restorePart() string  { return filepath.Join(l.Root, "restore.part") }
func (l Layout) restoreReady() string { return filepath.Join(l.Root, "restore.ready") }

// before is the folder for the files that a restore replaces.
func (l Layout) before(m archive.Manifest) string {
	return filepath.Join(l.Root, "before-"+archiveID(m))
}

// restored returns the result of a complete restore.
func (l Layout) restored(m archive.Manifest) (Restored, error) {
	state, err := LoadState(l)
	r := Restored{Manifest: m, PlaneKubernetesVersion: state.KubernetesVersion}
	if dir := l.before(m); atomicfile.Exists(dir) {
		r.Kept = dir
	}
	return r, err
}

// archiveID identifies a backup.
func archiveID(m archive.Manifest) string {
	return m.Installation + "-" + m.Time.UTC().Format("20060102-150405")
}

const restoreManifest = "manifest.json"

// fetchArchive returns the path of the archive on this box. It downloads the archive if needed.
func fetchArchive(ctx context.Context, l Layout, from BackupTarget) (string, error) {
	if !from.inS3() {
		return from.To, nil
	}
	store, err := from.open()
	if err != nil {
		return "", err
	}
	_, name := from.split()
	local := filepath.Join(l.restorePart(), "archive")
	if err := store.Get(ctx, name, local); err != nil {
		return "", fmt.Errorf("expected a backup at %s: %w", store.Location(name), err)
	}
	return local, nil
}

// finishSame continues an interrupted restore of this backup.
func finishSame(l Layout, m archive.Manifest) (bool, error) {
	var begun archive.Manifest
	err := atomicfile.ReadJSON(filepath.Join(l.restoreReady(), restoreManifest), &begun)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	// An interrupted restore of another backup is completed first, so that the files to replace belong together.
	if err := finishRestore(l); err != nil {
		return false, err
	}
	if archiveID(begun) == archiveID(m) && slices.Equal(begun.Files, m.Files) {
		return true, nil
	}
	return false, os.RemoveAll(l.restoreReady())
}

// mayRestore returns an error if the backup cannot be restored here.
func mayRestore(l Layout, assets string, m archive.Manifest, replace bool) error {
	for _, name := range []string{snapshotName, stateName} {
		if !m.Has(name) {
			return fmt.Errorf("expected a backup of a management plane, found one without %s", name)
		}
	}
	for _, path := range keyFiles(l) {
		if name, err := filepath.Rel(l.Root, path); err != nil || !m.Has(name) {
			return errors.Join(err, fmt.Errorf("expected a backup with all keys, found one without %s", name))
		}
	}
	if semver.Compare(m.CapstanVersion, version.Version) > 0 {
		return fmt.Errorf("expected a backup of Capstan %s or older, found one of %s: use that version of Capstan or a newer one", version.Version, m.CapstanVersion)
	}
	if _, err := versionFor(assets, m); err != nil {
		return fmt.Errorf("cannot restore a backup of Kubernetes %s: %w", m.KubernetesVersion, err)
	}
	if err := checkHosts(l); err != nil {
		return err
	}
	if replace {
		return mayReplace(l)
	}
	for _, part := range restoredParts {
		if path := filepath.Join(l.Root, part); atomicfile.Exists(path) {
			return fmt.Errorf("expected an empty --root, found an installation in %s (%s): choose another folder, or replace its data with --replace; its machines stay", l.Root, path)
		}
	}
	return nil
}

// checkHosts refuses a restore beside machines of a newer release: a restore replaces the plane and not its machines, and the capstand of this
// release does not start with them.
func checkHosts(l Layout) error {
	for i := range hostsWithFolder(l) {
		root := l.HostRoot(hostName(i))
		if err := version.CheckWriter(version.WriterOfHost(root), "the machines in "+root); err != nil {
			return err
		}
	}
	return nil
}

// mayReplace returns an error if a restore cannot move the existing files to another folder. A mount point cannot be renamed, and after the
// rename of a link the new files would be on the disk of the root folder.
func mayReplace(l Layout) error {
	for _, part := range restoredParts {
		path := filepath.Join(l.Root, part)
		info, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if info.Mode().Type() == fs.ModeSymlink {
			return fmt.Errorf("expected files of %s that --replace can move, found a symbolic link %s: remove the link, and create it again after you have moved the restored files to its target", l.Root, path)
		}
		mounted, err := mountinfo.Mounted(path)
		if err != nil {
			return err
		}
		if mounted {
			return fmt.Errorf("expected files of %s that --replace can move, found a mount point %s: unmount it, and mount it again after you have moved the restored files to its file system", l.Root, path)
		}
	}
	return nil
}

// versionFor returns the Kubernetes version for the restored data, by the rules of `capstan up`: the version of the backup, or else the
// newest installed one that can follow it.
func versionFor(assets string, m archive.Manifest) (string, error) {
	return kubernetesOf(Assets{assets}, m.KubernetesVersion, "")
}

// unpack checks the archive and creates the files of the installation in a separate folder. lock is that of the commands.
func unpack(ctx context.Context, l Layout, assets, file string, lock *os.File) error {
	info, err := os.Stat(file)
	if err != nil {
		return err
	}
	manifest, err := archive.Read(file)
	if err != nil {
		return err
	}
	// The space for the files, and for the data from the snapshot.
	if err := backup.Room(l.Root, 2*manifest.SizeBytes()+info.Size()); err != nil {
		return err
	}
	owner, err := ensureUser()
	if err != nil {
		return err
	}
	from := Layout{Root: filepath.Join(l.restorePart(), "files")}
	if err := os.Mkdir(from.Root, 0o700); err != nil {
		return err
	}
	if _, err := archive.Extract(file, from.Root); err != nil {
		return err
	}
	to := Layout{Root: l.restorePart()}
	if err := unpackKeys(from, to, owner); err != nil {
		return err
	}
	if err := unpackData(ctx, from, to, assets, manifest, owner, lock); err != nil {
		return err
	}
	if err := unpackState(l, from, to, assets, manifest); err != nil {
		return err
	}
	if err := atomicfile.WriteJSON(filepath.Join(to.Root, restoreManifest), manifest, 0o600); err != nil {
		return err
	}
	return os.RemoveAll(from.Root)
}

// unpackKeys moves the folder of the keys. Two keys belong to the user of the API server.
func unpackKeys(from, to Layout, owner user) error {
	for _, path := range []string{from.ServiceAccountKey(), from.EncryptionConfig()} {
		if err := os.Chown(path, owner.uid, owner.gid); err != nil {
			return err
		}
	}
	for _, name := range authorities {
		if err := os.Chmod(filepath.Join(from.PKI(), name+".crt"), 0o644); err != nil {
			return err
		}
	}
	return atomicfile.Rename(from.PKI(), to.PKI())
}

// unpackData creates etcd's data from the snapshot. etcd checks the snapshot. Its program can outlive a killed restore, so it keeps the lock:
// the next command must not work on the same files.
func unpackData(ctx context.Context, from, to Layout, assets string, m archive.Manifest, owner user, lock *os.File) error {
	version, err := versionFor(assets, m)
	if err != nil {
		return err
	}
	state, err := LoadState(from)
	if err != nil {
		return err
	}
	member := backup.FirstMember{Name: etcdName, PeerURL: loopback("https", state.port(portEtcdPeer)), Token: archiveID(m), Lock: lock}
	if err := member.Restore(ctx, filepath.Join(Assets{assets}.Kubernetes(), version, "etcdutl"), filepath.Join(from.Root, snapshotName), to.Etcd()); err != nil {
		return err
	}
	return owner.takeTree(to.Etcd())
}

// unpackState adapts the state to this box: the path of the programs, no unit, hosts that are newer than the backup, and the address for remote
// managers if its certificates are missing.
func unpackState(l Layout, from, to Layout, assets string, m archive.Manifest) error {
	state, err := LoadState(from)
	if err != nil {
		return err
	}
	state.Assets, state.StoppedUnit = assets, ""
	if state.KubernetesVersion, err = versionFor(assets, m); err != nil {
		return err
	}
	if state.Hosts, err = hostsOf(state.Hosts, max(len(state.Hosts), hostsWithFolder(l))); err != nil {
		return err
	}
	if checkListen(state.Settings) != nil || checkListenCertificates(l, state) != nil {
		state.Listen = ""
	}
	return state.save(to)
}

// hostsWithFolder returns the number of hosts up to the last one with a folder, because this host can have machines.
func hostsWithFolder(l Layout) (count int) {
	for i := range maxHosts {
		if isDir(l.HostRoot(hostName(i))) {
			count = i + 1
		}
	}
	return count
}

// finishRestore moves existing files to the folder before, and then the prepared files to their places. It can be repeated
// after a crash at any point.
func finishRestore(l Layout) error {
	var m archive.Manifest
	err := atomicfile.ReadJSON(filepath.Join(l.restoreReady(), restoreManifest), &m)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, part := range restoredParts {
		ready, place := filepath.Join(l.restoreReady(), part), filepath.Join(l.Root, part)
		if !atomicfile.Exists(ready) {
			continue
		}
		if atomicfile.Exists(place) {
			if err := keep(l, m, part); err != nil {
				return err
			}
		}
		if err := atomicfile.Rename(ready, place); err != nil {
			return err
		}
	}
	return nil
}

// keep moves the replaced files to their folder. Files of an earlier restore of the same backup stay there.
func keep(l Layout, m archive.Manifest, part string) error {
	if err := os.MkdirAll(l.before(m), 0o700); err != nil {
		return err
	}
	to := filepath.Join(l.before(m), part)
	if atomicfile.Exists(to) {
		to += "-" + time.Now().UTC().Format("20060102-150405.000000000")
	}
	return atomicfile.Rename(filepath.Join(l.Root, part), to)
}

// endRestore is called at the start of the plane. Later restores of the same backup start from the beginning.
func endRestore(l Layout) error {
	if err := finishRestore(l); err != nil {
		return fmt.Errorf("cannot continue the interrupted restore in %s: %w", l.restoreReady(), err)
	}
	return errors.Join(os.RemoveAll(l.restoreReady()), os.RemoveAll(l.restorePart()))
}

func emptyDir(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.Mkdir(dir, 0o700)
}

package embedded

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/embedded/archive"
	"capstan.dev/capstan/internal/node/backup"
	"capstan.dev/capstan/internal/version"
)

const (
	snapshotName = "etcd.db"
	stateName    = "state.json"
	pkiName      = "pki"
	// backupTimeout limits one backup. It allows gibibytes over a slow connection.
	backupTimeout = time.Hour
)

// Backup is a complete backup.
type Backup struct {
	Location  string    `json:"location"`
	Time      time.Time `json:"time"`
	SizeBytes int64     `json:"sizeBytes"`
	Revision  int64     `json:"revision"`
	// Removed lists older backups that were removed because of the retention.
	Removed []string `json:"removed,omitempty"`
}

// MakeBackup creates a backup of the running plane: a snapshot of its etcd, and all keys that the data needs. A backup gets
// its final name when it is complete. Concurrent calls wait for each other.
func MakeBackup(ctx context.Context, l Layout, target BackupTarget) (Backup, error) {
	if os.Getuid() != 0 {
		return Backup{}, ErrNotRoot
	}
	state, err := LoadState(l)
	if err != nil {
		return Backup{}, err
	}
	store, err := target.open()
	if err != nil {
		return Backup{}, err
	}
	unlock, err := lockBackups(ctx, l)
	if err != nil {
		return Backup{}, err
	}
	defer unlock()
	if err := clearInterrupted(ctx, l, store, target); err != nil {
		return Backup{}, err
	}
	defer func() { _ = os.RemoveAll(l.backupScratch()) }()
	return makeBackup(ctx, l, state, store, target)
}

// backupScratch is the folder of a backup in progress.
func (l Layout) backupScratch() string { return filepath.Join(l.Root, "backup.part") }

// interrupted is the name of a backup that is not complete in its store.
type interrupted struct{ Name string }

// interrupted is the record of the last backup to the folder of a target. It exists until that backup is complete, or until its files were
// removed from the store.
func (l Layout) interrupted(target BackupTarget) string {
	folder, _ := target.split()
	return filepath.Join(l.Root, "backup-"+hash(target.S3.Endpoint+" "+folder)+".part")
}

func lockBackups(ctx context.Context, l Layout) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(l.Root, "backup.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flock(ctx, f); err != nil {
		f.Close()
		return nil, fmt.Errorf("another backup of %s is in progress: %w", l.Root, err)
	}
	return func() { f.Close() }, nil
}

// clearInterrupted removes the files of an interrupted backup, on this box and in the same store.
func clearInterrupted(ctx context.Context, l Layout, store backup.Store, target BackupTarget) error {
	var last interrupted
	if err := atomicfile.ReadJSON(l.interrupted(target), &last); err == nil {
		complete, err := store.List(ctx)
		if err != nil {
			return err
		}
		if !slices.Contains(complete, last.Name) {
			if err := store.Remove(ctx, last.Name); err != nil {
				return err
			}
		}
	}
	if err := errors.Join(atomicfile.Remove(l.interrupted(target)), os.RemoveAll(l.backupScratch())); err != nil {
		return err
	}
	return os.Mkdir(l.backupScratch(), 0o700)
}

func makeBackup(ctx context.Context, l Layout, state State, store backup.Store, target BackupTarget) (Backup, error) {
	dir := filepath.Join(l.backupScratch(), "files")
	manifest, names, err := gather(ctx, l, state, dir)
	if err != nil {
		return Backup{}, err
	}
	name, err := newName(ctx, store, target, state.ID, manifest.Time)
	if err != nil {
		return Backup{}, err
	}
	if err := atomicfile.WriteJSON(l.interrupted(target), interrupted{name}, 0o600); err != nil {
		return Backup{}, err
	}
	file := filepath.Join(l.backupScratch(), "archive")
	if err := archive.Write(file, manifest, dir, names); err != nil {
		return Backup{}, err
	}
	info, err := os.Stat(file)
	if err != nil {
		return Backup{}, err
	}
	if err := store.Put(ctx, name, file); err != nil {
		return Backup{}, err
	}
	_ = os.Remove(l.interrupted(target)) // With the record, the next backup finds this one complete.
	made := Backup{Location: store.Location(name), Time: manifest.Time, SizeBytes: info.Size(), Revision: manifest.Revision}
	if target.Keep > 0 && !target.Exact {
		made.Removed, err = removeOld(ctx, store, state.ID, target.Keep, name)
	}
	if err != nil {
		err = fmt.Errorf("the backup %s is complete, but an older one cannot be removed: %w", made.Location, err)
	}
	return made, err
}

// newName returns the name of a file that does not exist. Existing files are never overwritten. A second backup within one
// second gets the name of a later second, so that a complete file is never mistaken for that of an interrupted backup.
func newName(ctx context.Context, store backup.Store, target BackupTarget, id string, at time.Time) (string, error) {
	existing, err := store.List(ctx)
	if err != nil {
		return "", err
	}
	for {
		name := target.nameOf(id, at)
		if !slices.Contains(existing, name) {
			return name, nil
		}
		if target.Exact {
			return "", fmt.Errorf("expected a new file for the backup, found %s: choose another name, or remove it", store.Location(name))
		}
		at = at.Add(time.Second)
	}
}

// gather writes the files of a backup to a new folder.
func gather(ctx context.Context, l Layout, state State, dir string) (archive.Manifest, []string, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return archive.Manifest{}, nil, err
	}
	m := archive.Manifest{
		Installation: state.ID, Time: time.Now().UTC().Truncate(time.Second),
		CapstanVersion: version.Version, KubernetesVersion: state.KubernetesVersion,
	}
	member, err := etcdMember(l, state)
	if err != nil {
		return m, nil, err
	}
	var snapshot backup.Manifest
	if err := member.Snapshot(ctx, filepath.Join(dir, snapshotName), &snapshot); err != nil {
		if !errors.Is(err, backup.ErrNoRoom) {
			err = fmt.Errorf("%w; a backup needs a running plane: start it with `capstan up`", err)
		}
		return m, nil, err
	}
	m.EtcdVersion, m.Revision = snapshot.EtcdVersion, snapshot.Revision
	names := []string{snapshotName, stateName}
	if err := state.save(Layout{Root: dir}); err != nil {
		return m, nil, err
	}
	for _, key := range keyFiles(l) {
		name, err := filepath.Rel(l.Root, key)
		if err != nil {
			return m, nil, err
		}
		data, err := os.ReadFile(key)
		if err != nil {
			return m, nil, fmt.Errorf("a backup without this key could not be restored: %w", err)
		}
		to := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o700), os.WriteFile(to, data, 0o600)); err != nil {
			return m, nil, err
		}
		names = append(names, name)
	}
	return m, names, nil
}

// keyFiles lists the files that cannot be created again. All other certificates and kubeconfigs are derived from them.
func keyFiles(l Layout) []string {
	files := []string{l.ServiceAccountKey(), l.EncryptionConfig()}
	for _, name := range authorities {
		files = append(files, filepath.Join(l.PKI(), name+".crt"), filepath.Join(l.PKI(), name+".key"))
	}
	return files
}

// etcdMember returns a client configuration for the plane's etcd, with the client certificate of the API server.
func etcdMember(l Layout, s State) (backup.Member, error) {
	config, err := etcdTLS(l)
	return backup.Member{Endpoint: loopback("https", s.port(portEtcd)), TLS: config}, err
}

// etcdTLS trusts the plane's etcd. Each connection reads the client certificate again, because it is renewed.
func etcdTLS(l Layout) (*tls.Config, error) {
	dir := l.Component(apiServer)
	ca, err := os.ReadFile(filepath.Join(dir, "etcd-ca.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	load := func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "etcd-client.crt"), filepath.Join(dir, "etcd-client.key"))
		return &pair, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, GetClientCertificate: load}, nil
}

// archiveName returns the file name of a backup. It contains the id of the plane, because planes can share a folder.
func archiveName(id string, at time.Time) string {
	return "capstan-" + id + "-" + at.UTC().Format("20060102-150405") + ".tar.gz"
}

// ownArchives returns the names of the backups of one plane, the oldest first.
func ownArchives(names []string, id string) []string {
	own := regexp.MustCompile(`^capstan-` + regexp.QuoteMeta(id) + `-\d{8}-\d{6}\.tar\.gz$`)
	out := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !own.MatchString(name) })
	slices.Sort(out)
	return out
}

// removeOld removes all backups of a plane except for the newest ones. The backup that was just made is one of them, although a clock that
// was ahead can have given later times to others.
func removeOld(ctx context.Context, store backup.Store, id string, keep int, made string) (removed []string, err error) {
	names, err := store.List(ctx)
	if err != nil {
		return nil, err
	}
	others := slices.DeleteFunc(ownArchives(names, id), func(name string) bool { return name == made })
	for _, name := range others[:max(0, len(others)-(keep-1))] {
		if err := store.Remove(ctx, name); err != nil {
			return removed, err
		}
		removed = append(removed, name)
	}
	return removed, nil
}

package backup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/snapshot"
	"go.uber.org/zap"
)

// Manifest is the content of the .json file of a backup.
type Manifest struct {
	Name              string    `json:"name"`
	Folder            string    `json:"folder"`
	Trigger           string    `json:"trigger,omitempty"`
	Request           string    `json:"request,omitempty"`
	Time              time.Time `json:"time"`
	SizeBytes         int64     `json:"sizeBytes"`
	Revision          int64     `json:"revision"`
	EtcdVersion       string    `json:"etcdVersion"`
	KubernetesVersion string    `json:"kubernetesVersion,omitempty"`
	SHA256            string    `json:"sha256"`
	// Keys that the data of the backup needs and that the backup does not contain: name and fingerprint.
	Keys map[string]string `json:"keys,omitempty"`
}

func snapshotFile(name string) string { return name + ".db" }
func manifestFile(name string) string { return name + ".json" }

const (
	// readTimeout of the linearizable read before a snapshot.
	readTimeout = 10 * time.Second
	dialTimeout = 5 * time.Second
)

// Member is the etcd member whose data is saved.
type Member struct {
	Endpoint string
	TLS      *tls.Config
}

// Snapshot writes a snapshot of the member to a file that must not exist, and its description to the manifest. It does not fill the disk of
// the file, which can be that of the member.
func (m Member) Snapshot(ctx context.Context, file string, manifest *Manifest) error {
	config := clientv3.Config{Endpoints: []string{m.Endpoint}, TLS: m.TLS, DialTimeout: dialTimeout, Logger: zap.NewNop()}
	status, revision, err := caughtUp(ctx, config)
	if err != nil {
		return fmt.Errorf("the etcd member %s does not answer: %w", m.Endpoint, err)
	}
	if err := Room(filepath.Dir(file), status.DbSize); err != nil {
		return err
	}
	// The version that etcd adds to a snapshot is that of its file format, and empty in the first seconds of a new member.
	if _, err := snapshot.SaveWithVersion(ctx, zap.NewNop(), config, file); err != nil {
		return fmt.Errorf("taking a snapshot of the etcd member %s: %w", m.Endpoint, err)
	}
	manifest.EtcdVersion, manifest.Revision = status.Version, revision
	manifest.SHA256, manifest.SizeBytes, err = check(file)
	return err
}

// caughtUp returns the status of the member, once the member has every write that was acknowledged until now. A linearizable read
// waits for that. Without it, the snapshot of a follower can lack acknowledged writes.
func caughtUp(ctx context.Context, config clientv3.Config) (status *clientv3.StatusResponse, revision int64, err error) {
	c, err := clientv3.New(config)
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	answer, err := c.Get(ctx, "/registry/health")
	if err != nil {
		return nil, 0, err
	}
	status, err = c.Status(ctx, config.Endpoints[0])
	if err != nil {
		return nil, 0, err
	}
	return status, answer.Header.Revision, nil
}

// check reads a snapshot and returns the checksum and the size of the whole file. The last bytes of a snapshot are the
// checksum of the bytes before them.
func check(file string) (sum string, size int64, err error) {
	f, err := os.Open(file)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", 0, err
	}
	size = info.Size()
	if size < 512+sha256.Size {
		return "", 0, fmt.Errorf("the snapshot %s is incomplete: it has %d bytes", filepath.Base(file), size)
	}
	content, whole := sha256.New(), sha256.New()
	if _, err := io.CopyN(io.MultiWriter(content, whole), f, size-sha256.Size); err != nil {
		return "", 0, err
	}
	trailer, err := io.ReadAll(io.TeeReader(f, whole))
	if err != nil {
		return "", 0, err
	}
	if !bytes.Equal(trailer, content.Sum(nil)) {
		return "", 0, fmt.Errorf("the snapshot %s is damaged: its checksum does not match", filepath.Base(file))
	}
	return hex.EncodeToString(whole.Sum(nil)), size, nil
}

// Save copies a snapshot and its manifest to the store.
func Save(ctx context.Context, store Store, file string, manifest Manifest) error {
	data, err := json.MarshalIndent(manifest, "", "  ")
	if err != nil {
		return err
	}
	text := file + ".json"
	if err := os.WriteFile(text, append(data, '\n'), 0o600); err != nil {
		return err
	}
	defer func() { _ = os.Remove(text) }()
	if err := store.Put(ctx, snapshotFile(manifest.Name), file); err != nil {
		return err
	}
	err = store.Put(ctx, manifestFile(manifest.Name), text)
	if err == nil {
		return nil
	}
	// A snapshot without a manifest is no backup. On a full disk it would take the space of the next attempt.
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	return errors.Join(err, Remove(undo, store, manifest.Name))
}

// Remove removes a backup from the store.
func Remove(ctx context.Context, store Store, name string) error {
	if err := store.Remove(ctx, manifestFile(name)); err != nil {
		return err
	}
	return store.Remove(ctx, snapshotFile(name))
}

// Load copies a backup from the store to the folder dir, verifies it, and returns the path of the snapshot. sum is the
// expected checksum; "" means the one in the manifest.
func Load(ctx context.Context, store Store, name, dir, sum string) (string, Manifest, error) {
	manifest, err := loadManifest(ctx, store, name, dir)
	if err != nil {
		return "", manifest, err
	}
	file, err := loadSnapshot(ctx, store, manifest, name, dir, sum)
	return file, manifest, err
}

// loadManifest is the first step: the manifest is small, and a backup exists only with a manifest.
func loadManifest(ctx context.Context, store Store, name, dir string) (manifest Manifest, err error) {
	file, err := fetch(ctx, store, manifestFile(name), dir)
	if err != nil {
		return manifest, err
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return manifest, err
	}
	if err := json.Unmarshal(data, &manifest); err != nil {
		return manifest, fmt.Errorf("%s is not the manifest of a backup: %w", store.Location(manifestFile(name)), err)
	}
	return manifest, nil
}

func loadSnapshot(ctx context.Context, store Store, manifest Manifest, name, dir, sum string) (string, error) {
	file, err := fetch(ctx, store, snapshotFile(name), dir)
	if err != nil {
		return "", err
	}
	location := store.Location(snapshotFile(name))
	info, err := os.Stat(file)
	if err != nil {
		return "", err
	}
	if info.Size() != manifest.SizeBytes {
		return "", fmt.Errorf("the snapshot at %s is incomplete: expected %[3]d bytes, found %[2]d", location, info.Size(), manifest.SizeBytes)
	}
	found, _, err := check(file)
	if err != nil {
		return "", fmt.Errorf("%s: %w", location, err)
	}
	if sum == "" {
		sum = manifest.SHA256
	}
	if found != sum {
		return "", fmt.Errorf("the snapshot at %s is a different one: expected SHA-256 %[3]s, found %[2]s", location, found, sum)
	}
	return file, nil
}

// fetch copies a file of a backup from the store.
func fetch(ctx context.Context, store Store, name, dir string) (string, error) {
	to := filepath.Join(dir, name)
	if err := os.RemoveAll(to); err != nil {
		return "", err
	}
	err := store.Get(ctx, name, to)
	if errors.Is(err, errNotFound) {
		return "", fmt.Errorf("there is no backup at %s", store.Location(name))
	}
	return to, err
}

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

// Manifest is what the .json file of a backup says.
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
	// Keys that what is in the backup needs, and that are not in it: name and fingerprint.
	Keys map[string]string `json:"keys,omitempty"`
}

func snapshotFile(name string) string { return name + ".db" }
func manifestFile(name string) string { return name + ".json" }

const (
	// readTimeout of the one question before a snapshot.
	readTimeout = 10 * time.Second
	dialTimeout = 5 * time.Second
)

// Member of etcd that a snapshot is taken from.
type Member struct {
	Endpoint string
	TLS      *tls.Config
}

// Snapshot writes a snapshot of the member to a file that does not exist, and tells of it in the manifest.
func (m Member) Snapshot(ctx context.Context, file string, manifest *Manifest) error {
	config := clientv3.Config{Endpoints: []string{m.Endpoint}, TLS: m.TLS, DialTimeout: dialTimeout, Logger: zap.NewNop()}
	revision, err := caughtUp(ctx, config)
	if err != nil {
		return fmt.Errorf("the etcd member %s does not answer: %w", m.Endpoint, err)
	}
	version, err := snapshot.SaveWithVersion(ctx, zap.NewNop(), config, file)
	if err != nil {
		return fmt.Errorf("taking a snapshot of the etcd member %s: %w", m.Endpoint, err)
	}
	manifest.EtcdVersion, manifest.Revision = version, revision
	manifest.SHA256, manifest.SizeBytes, err = check(file)
	return err
}

// caughtUp returns once the member has everything that was acknowledged until now: a linearizable read does not return
// before. A snapshot of a follower may lag behind otherwise.
func caughtUp(ctx context.Context, config clientv3.Config) (revision int64, err error) {
	c, err := clientv3.New(config)
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	answer, err := c.Get(ctx, "/registry/health")
	if err != nil {
		return 0, err
	}
	return answer.Header.Revision, nil
}

// check reads a snapshot, whose last bytes are the checksum of all before them, and returns the checksum and the size of
// the whole file.
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
		return "", 0, fmt.Errorf("the snapshot %s has %d bytes: it is not whole", filepath.Base(file), size)
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
		return "", 0, fmt.Errorf("the snapshot %s is damaged: its checksum is wrong", filepath.Base(file))
	}
	return hex.EncodeToString(whole.Sum(nil)), size, nil
}

// Save brings a snapshot and its manifest to the store.
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
	return store.Put(ctx, manifestFile(manifest.Name), text)
}

// Remove removes a backup from the store.
func Remove(ctx context.Context, store Store, name string) error {
	if err := store.Remove(ctx, manifestFile(name)); err != nil {
		return err
	}
	return store.Remove(ctx, snapshotFile(name))
}

// Load brings a backup from the store to the folder dir, checked, and returns where the snapshot is. sum is the checksum
// that it must have; "" for the one in its manifest.
func Load(ctx context.Context, store Store, name, dir, sum string) (string, Manifest, error) {
	manifest, err := loadManifest(ctx, store, name, dir)
	if err != nil {
		return "", manifest, err
	}
	file, err := loadSnapshot(ctx, store, manifest, name, dir, sum)
	return file, manifest, err
}

// loadManifest comes first: it is small, and without it there is no backup.
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
		return manifest, fmt.Errorf("%s is not what a backup has: %w", store.Location(manifestFile(name)), err)
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
		return "", fmt.Errorf("the snapshot at %s is not whole: it has %d bytes, wanted %d", location, info.Size(), manifest.SizeBytes)
	}
	found, _, err := check(file)
	if err != nil {
		return "", fmt.Errorf("%s: %w", location, err)
	}
	if sum == "" {
		sum = manifest.SHA256
	}
	if found != sum {
		return "", fmt.Errorf("the snapshot at %s is another one: its SHA-256 is %s, wanted %s", location, found, sum)
	}
	return file, nil
}

// fetch brings a file of a backup from the store.
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

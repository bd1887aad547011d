package provision

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/node/backup"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

const (
	// restoreTimeout bounds the restore, and restoreTries is the number of attempts, because a store may be unavailable for
	// a moment. Then the machine reports the failure with its cause.
	restoreTimeout = time.Hour
	restoreTries   = 5
	restorePause   = 10 * time.Second
)

// restoreEtcd initializes this machine's etcd from a backup if the bootstrap data names one. Afterwards it erases the name
// of the backup and the credentials of the store, because the machine has its own data from then on.
func (n *node) restoreEtcd(ctx context.Context, path string) error {
	r, err := loadRestore(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	restoring := backup.Restoring{
		Restore: r, Etcdutl: n.program("etcdutl"), Member: n.name, PeerURL: n.peerURL(), Cluster: n.ClusterName,
		DataDir: valueOf(n.etcdService().Command, "data-dir"), Log: n.log,
	}
	ctx, cancel := context.WithTimeout(ctx, restoreTimeout)
	defer cancel()
	for try := 1; ; try++ {
		err = restoring.Run(ctx)
		if err == nil {
			n.log.Info("etcd was restored from a backup", "backup", r.Name)
			return os.Remove(path)
		}
		n.log.Warn("Cannot restore etcd; the machine tries again", "backup", r.Name, "error", err)
		if try == restoreTries {
			return fmt.Errorf("restoring etcd from the backup %s: %w", r.Name, err)
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(restorePause):
		}
	}
}

func loadRestore(path string) (nodeconfig.Restore, error) {
	var r nodeconfig.Restore
	data, err := os.ReadFile(path)
	if err != nil {
		return r, err
	}
	if err := yaml.UnmarshalStrict(data, &r); err != nil {
		return r, fmt.Errorf("%s is not a Restore", path) // not %w, because the error may quote a credential
	}
	return r, nil
}

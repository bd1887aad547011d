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
	// restoreTimeout of everything, and restoreTries how often it is tried: a store may be away for a moment. After that
	// the machine says that it has failed, and why.
	restoreTimeout = time.Hour
	restoreTries   = 5
	restorePause   = 10 * time.Second
)

// restoreEtcd lets this machine's etcd begin with a backup, if the bootstrap data name one. What names it, with the
// credentials of the store, is erased once it is done: from then on the machine has its own data.
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
		DataDir: valueOf(n.etcdService().Command, "data-dir"),
	}
	ctx, cancel := context.WithTimeout(ctx, restoreTimeout)
	defer cancel()
	for try := 1; ; try++ {
		err = restoring.Run(ctx)
		if err == nil {
			n.log.Info("etcd begins with a backup", "backup", r.Name)
			return os.Remove(path)
		}
		n.log.Warn("restoring etcd", "backup", r.Name, "error", err)
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
		return r, fmt.Errorf("%s is not a Restore", path) // not %w: it may quote a credential
	}
	return r, nil
}

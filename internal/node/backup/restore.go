package backup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// revisionBump is added to the revisions of a restored etcd, and all earlier revisions are marked as compacted. Clients
// that watched the lost data have seen lower revisions. They start a new watch instead of waiting for revisions that
// now have another content.
const revisionBump = 1_000_000_000

// Restoring is a machine whose etcd starts from a backup.
type Restoring struct {
	nodeconfig.Restore
	// Etcdutl is the path of the program. It has the version of the etcd that will run.
	Etcdutl string
	// Member is the name of the only member. PeerURL is its address for other members.
	Member, PeerURL string
	// Cluster is the name of the cluster.
	Cluster string
	// DataDir of etcd.
	DataDir string
}

// Run creates the data of etcd from the backup, if etcd has none. The data appears at once and complete. A machine that
// stops at any moment starts again, and never overwrites data that etcd has written.
func (r Restoring) Run(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(r.DataDir, "member")); err == nil {
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	scratch := r.DataDir + ".restore"
	if err := os.RemoveAll(scratch); err != nil {
		return err
	}
	if err := os.MkdirAll(scratch, 0o700); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	store, err := Open(r.Store)
	if err != nil {
		return err
	}
	file, manifest, err := Load(ctx, store, r.Name, scratch, r.SHA256)
	if err != nil {
		return err
	}
	if problems := nodeconfig.DifferentKeys(manifest.Keys, r.Keys, r.OtherAuthorities); len(problems) > 0 {
		return fmt.Errorf("the backup %s cannot be used in this cluster: %s", store.Location(snapshotFile(r.Name)), strings.Join(problems, "; "))
	}
	data := filepath.Join(scratch, "data")
	first := FirstMember{Name: r.Member, PeerURL: r.PeerURL, Token: r.Cluster + "/" + r.Name + "/" + r.Member}
	if err := first.Restore(ctx, r.Etcdutl, file, data); err != nil {
		return err
	}
	if err := os.MkdirAll(r.DataDir, 0o700); err != nil {
		return err
	}
	return atomicfile.Rename(filepath.Join(data, "member"), filepath.Join(r.DataDir, "member"))
}

// FirstMember is the only member of an etcd that starts from a snapshot.
type FirstMember struct {
	Name, PeerURL string
	// Token of the etcd cluster. A new token makes a new cluster, which does not communicate with members of the old
	// one.
	Token string
	// Lock stays held until etcdutl ends, also if this process ends before; nil for none.
	Lock *os.File
}

// Restore creates the data folder of the member from a snapshot, and verifies the snapshot. The folder must not exist.
func (m FirstMember) Restore(ctx context.Context, etcdutl, snapshot, dataDir string) error {
	cmd := exec.CommandContext(ctx, etcdutl, "snapshot", "restore", snapshot, "--data-dir="+dataDir,
		"--name="+m.Name, "--initial-cluster="+m.Name+"="+m.PeerURL, "--initial-advertise-peer-urls="+m.PeerURL,
		"--initial-cluster-token="+m.Token, fmt.Sprintf("--bump-revision=%d", revisionBump), "--mark-compacted")
	if m.Lock != nil {
		cmd.ExtraFiles = []*os.File{m.Lock}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("etcdutl snapshot restore: %w: %s", err, lastLine(string(out)))
	}
	return nil
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

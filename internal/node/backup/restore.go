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

// revisionBump is added to the revisions of a restored etcd, and everything before is marked as compacted: whoever watched
// the lost data has seen lower ones, and begins again instead of waiting for revisions that mean something else now.
const revisionBump = 1_000_000_000

// Restoring is a machine whose etcd begins with a backup.
type Restoring struct {
	nodeconfig.Restore
	// Etcdutl is the program. The same version of etcd that will run reads the snapshot.
	Etcdutl string
	// Member is the name of the only member, PeerURL where others reach it.
	Member, PeerURL string
	// Cluster is the name of the cluster.
	Cluster string
	// DataDir of etcd.
	DataDir string
}

// Run makes the data of etcd from the backup, if there are none yet. They appear at once, complete: a machine that dies at
// any moment begins again, and never restores over what etcd has written.
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

// FirstMember is the only member of an etcd that begins with a snapshot.
type FirstMember struct {
	Name, PeerURL string
	// Token of the etcd cluster. Another token makes another cluster: members of the former one are not talked to.
	Token string
}

// Restore makes the data folder of the member from a snapshot, which it checks. The folder must not exist.
func (m FirstMember) Restore(ctx context.Context, etcdutl, snapshot, dataDir string) error {
	out, err := exec.CommandContext(ctx, etcdutl, "snapshot", "restore", snapshot, "--data-dir="+dataDir,
		"--name="+m.Name, "--initial-cluster="+m.Name+"="+m.PeerURL, "--initial-advertise-peer-urls="+m.PeerURL,
		"--initial-cluster-token="+m.Token, fmt.Sprintf("--bump-revision=%d", revisionBump), "--mark-compacted").CombinedOutput()
	if err != nil {
		return fmt.Errorf("etcdutl snapshot restore: %w: %s", err, lastLine(string(out)))
	}
	return nil
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

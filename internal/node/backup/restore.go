package backup

import (
	"context"
	"fmt"
	"log/slog"
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
	// DataDir of etcd. It can be a volume with the data of a former machine.
	DataDir string
	Log     *slog.Logger
}

// origin is the file in the data of a restored etcd with the token of its restore. etcd does not read it.
const origin = "restored-from"

// Run creates the data of etcd from the backup, unless it has done so before. The data appears at once and complete. A machine that
// stops at any moment starts again, and never overwrites data that etcd has written. The data of a former machine stays beside it.
func (r Restoring) Run(ctx context.Context) error {
	scratch := filepath.Join(r.DataDir, "restore") // in the same file system
	// A machine can stop while it removes the folder of a finished restore, with a copy of all objects.
	if err := os.RemoveAll(scratch); err != nil {
		return err
	}
	if done, err := r.done(); done || err != nil {
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
	first := FirstMember{Name: r.Member, PeerURL: r.PeerURL, Token: r.token()}
	if err := first.Restore(ctx, r.Etcdutl, file, data); err != nil {
		return err
	}
	if err := atomicfile.WriteFile(filepath.Join(data, "member", origin), []byte(r.token()), 0o600); err != nil {
		return err
	}
	if err := SetAside(r.Log, r.DataDir, r.Member); err != nil {
		return err
	}
	return atomicfile.Rename(filepath.Join(data, "member"), r.member())
}

func (r Restoring) member() string { return filepath.Join(r.DataDir, "member") }

// token makes a new etcd cluster of each restored machine.
func (r Restoring) token() string { return r.Cluster + "/" + r.Name + "/" + r.Member }

// done reports whether the data of etcd is that of this restore.
func (r Restoring) done() (bool, error) {
	token, err := restoredFrom(r.DataDir)
	return token == r.token(), err
}

// SetAside renames the data of a former member for a machine that starts another etcd there: etcd would keep its peer URL, and other members
// could not join.
func SetAside(log *slog.Logger, dataDir, machine string) error {
	to := filepath.Join(dataDir, "member-before-"+machine)
	err := atomicfile.Rename(filepath.Join(dataDir, "member"), to)
	if err == nil {
		log.Warn("The folder of etcd has the data of a former machine. It stays beside the new data", "folder", to)
	}
	return atomicfile.IgnoreMissing(err)
}

// Restored returns whether a machine has restored the data of etcd in a folder.
func Restored(dataDir, machine string) (bool, error) {
	token, err := restoredFrom(dataDir)
	return strings.HasSuffix(token, "/"+machine), err
}

// restoredFrom returns the token of the restore that made the data of etcd in a folder, or "".
func restoredFrom(dataDir string) (string, error) {
	token, err := os.ReadFile(filepath.Join(dataDir, "member", origin))
	return string(token), atomicfile.IgnoreMissing(err)
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

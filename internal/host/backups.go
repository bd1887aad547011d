package host

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/util/validation"

	"capstan.dev/capstan/internal/host/hostpb"
)

const (
	backupsDir = "backups"
	// backupsIn is the folder in which machines find the backups of their cluster: <backupsIn>/<namespace>/<cluster>.
	backupsIn = "/var/lib/capstan/backups"
)

// backups returns the folder of the host where a control plane machine keeps the backups of its cluster's etcd, or "" for
// other machines. A machine cannot see the backups of other clusters. capstand never removes the folder, because backups
// must outlive their cluster.
func (p *platform) backups(spec *hostpb.MachineSpec) (string, error) {
	if !spec.ControlPlane || spec.Cluster == "" || spec.Namespace == "" {
		return "", nil
	}
	for _, name := range []string{spec.Namespace, spec.Cluster} {
		if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
			return "", fmt.Errorf("machine %[2]s: expected a DNS label as the namespace and the cluster name, found %[1]q: %[3]s", name, spec.Id, problems[0])
		}
	}
	root := cmp.Or(p.config.Backups, p.store.path(backupsDir))
	dir := filepath.Join(root, spec.Namespace, spec.Cluster)
	// Backups are often in a network file system, which can hang. The end of capstand waits for the start of a machine.
	return dir, p.backupFolders.await(context.Background(), dir, func() error { return os.MkdirAll(dir, 0o700) })
}

package host

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/util/validation"

	"capstan.dev/capstan/internal/host/hostpb"
)

const (
	backupsDir = "backups"
	// backupsIn is where machines find the backups of their cluster: <backupsIn>/<namespace>/<cluster>.
	backupsIn = "/var/lib/capstan/backups"
)

// backups is the folder of the host that a control plane machine keeps backups of its cluster's etcd in; "" for other
// machines. A machine sees nothing of other clusters. Nobody removes the folder: a backup is there to outlive its cluster.
func (p *platform) backups(spec *hostpb.MachineSpec) (string, error) {
	if !spec.ControlPlane || spec.Cluster == "" || spec.Namespace == "" {
		return "", nil
	}
	for _, name := range []string{spec.Namespace, spec.Cluster} {
		if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
			return "", fmt.Errorf("the namespace or the cluster %q of the machine %s is no name: %s", name, spec.Id, problems[0])
		}
	}
	root := cmp.Or(p.config.Backups, p.store.path(backupsDir))
	dir := filepath.Join(root, spec.Namespace, spec.Cluster)
	return dir, os.MkdirAll(dir, 0o700)
}

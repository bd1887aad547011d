package embedded

import (
	"path/filepath"
	"strings"
)

// DefaultRoot is the default folder of an installation's state.
const DefaultRoot = "/var/lib/capstan"

// SystemUser runs all components except for capstand. It has no home and no shell.
const SystemUser = "capstan"

// Layout contains the paths of an installation. All are in its root folder, so that a box can have several installations.
type Layout struct{ Root string }

// Lock is the lock file of the running plane. It contains the process id.
func (l Layout) Lock() string { return filepath.Join(l.Root, "plane.lock") }

// StatusSocket is the socket on which the running plane serves its status, for root only.
func (l Layout) StatusSocket() string { return filepath.Join(l.Root, "plane.sock") }

// hadData is a file that exists once etcd has had the objects of the plane. It is not a part of a backup.
func (l Layout) hadData() string { return filepath.Join(l.Root, "had-data") }

// State is the file with the persistent decisions, for example ports and hosts.
func (l Layout) State() string { return filepath.Join(l.Root, "state.json") }

// PKI contains the certificate authorities (root only), and a folder per component with its certificates.
func (l Layout) PKI() string { return filepath.Join(l.Root, "pki") }

// Component is the folder with the certificates of one component.
func (l Layout) Component(name string) string { return filepath.Join(l.PKI(), name) }

// Kubeconfig of a component. It names certificate files, so that renewal needs no restart.
func (l Layout) Kubeconfig(name string) string { return filepath.Join(l.Component(name), "kubeconfig") }

// AdminKubeconfig is the kubeconfig for users. It contains its certificate, so that it can be copied.
func (l Layout) AdminKubeconfig() string { return filepath.Join(l.Root, "admin.kubeconfig") }

// EncryptionConfig contains the key that encrypts Secrets in etcd.
func (l Layout) EncryptionConfig() string {
	return filepath.Join(l.Component(apiServer), "encryption.yaml")
}

// ServiceAccountKey signs the tokens of service accounts.
func (l Layout) ServiceAccountKey() string {
	return filepath.Join(l.Component(apiServer), "service-account.key")
}

// Etcd is the database's folder.
func (l Layout) Etcd() string { return filepath.Join(l.Root, "etcd") }

// Bin contains links to, or copies of, the programs that run as the system user. This user may be unable to enter the assets
// folder, for example in root's home.
func (l Layout) Bin() string { return filepath.Join(l.Root, "bin") }

// Logs contains a log per component.
func (l Layout) Logs() string { return filepath.Join(l.Root, "logs") }

// Log of a component.
func (l Layout) Log(component string) string { return filepath.Join(l.Logs(), component+".log") }

// Sockets contains the sockets of the capstands. Only the system user can enter it.
func (l Layout) Sockets() string { return filepath.Join(l.Root, "sockets") }

// HostSocket is the socket of a host's capstand.
func (l Layout) HostSocket(host string) string { return filepath.Join(l.Sockets(), host+".sock") }

// HostRoot is the state folder of a host's capstand.
func (l Layout) HostRoot(host string) string { return filepath.Join(l.Root, "hosts", host) }

// Backups contains the etcd backups of workload clusters on this box, of all its hosts.
func (l Layout) Backups() string { return filepath.Join(l.Root, "backups") }

// JoinedHost is the state folder of capstand.service: of a host that belongs to another management cluster. It is below the default
// root folder, and no part of the plane.
func (l Layout) JoinedHost() string { return filepath.Join(l.Root, "host") }

// lostAndFound is the folder of a file system for files that a check of it finds.
const lostAndFound = "lost+found"

// foreign reports whether a path in the root folder, or the entry that contains it, outlives the plane and can be there before it.
func (l Layout) foreign(path string) bool {
	for _, dir := range []string{l.Backups(), l.JoinedHost(), filepath.Join(l.Root, lostAndFound)} {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			return true
		}
	}
	return false
}

// Assets is the folder with the programs: the output of `make build`.
type Assets struct{ Dir string }

// Manager is the manager of Capstan's providers.
func (a Assets) Manager() string { return filepath.Join(a.Dir, "manager") }

// Capstand is the host daemon.
func (a Assets) Capstand() string { return filepath.Join(a.Dir, "capstand") }

// CoreManager is the manager of Cluster API core.
func (a Assets) CoreManager() string { return filepath.Join(a.Dir, "capi", "capi-core-manager") }

// CoreComponents contains the manifests of Cluster API core: <version>/core-components.yaml.
func (a Assets) CoreComponents() string {
	return filepath.Join(a.Dir, "capi", "repository", "cluster-api")
}

// Kubernetes contains a folder per Kubernetes version.
func (a Assets) Kubernetes() string { return filepath.Join(a.Dir, "kubernetes") }

// EchoImage is the archive of the test image.
func (a Assets) EchoImage() string { return filepath.Join(a.Dir, "images", "echo.tar") }

// Runc is the container runtime of the machines.
func (a Assets) Runc() string { return filepath.Join(a.Dir, "node", "bin", "runc") }

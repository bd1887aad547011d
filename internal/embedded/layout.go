package embedded

import (
	"path/filepath"
)

// DefaultRoot is where an installation keeps its state when --root is not given.
const DefaultRoot = "/var/lib/capstan"

// SystemUser runs everything but capstand. It has no home and no shell.
const SystemUser = "capstan"

// Layout says where the parts of an installation lie below its root folder. Nothing is ever written
// outside of it, so that two installations stand side by side.
type Layout struct{ Root string }

// Lock is held by the running plane and contains its process id.
func (l Layout) Lock() string { return filepath.Join(l.Root, "plane.lock") }

// StatusSocket is where the running plane serves its status, to root only.
func (l Layout) StatusSocket() string { return filepath.Join(l.Root, "plane.sock") }

// State is the file with what was decided once: ports, hosts.
func (l Layout) State() string { return filepath.Join(l.Root, "state.json") }

// PKI holds certificate authorities (root only) and, in a folder per component, what each one needs.
func (l Layout) PKI() string { return filepath.Join(l.Root, "pki") }

// Component is the folder with the certificates of one component.
func (l Layout) Component(name string) string { return filepath.Join(l.PKI(), name) }

// Kubeconfig of a component. It names certificate files, so that renewal needs no restart.
func (l Layout) Kubeconfig(name string) string { return filepath.Join(l.Component(name), "kubeconfig") }

// AdminKubeconfig is the one for people; it contains its certificate, so that it can be copied.
func (l Layout) AdminKubeconfig() string { return filepath.Join(l.Root, "admin.kubeconfig") }

// EncryptionConfig holds the key that Secrets are encrypted with in etcd.
func (l Layout) EncryptionConfig() string {
	return filepath.Join(l.Component(apiServer), "encryption.yaml")
}

// ServiceAccountKey signs the tokens of service accounts.
func (l Layout) ServiceAccountKey() string {
	return filepath.Join(l.Component(apiServer), "service-account.key")
}

// Etcd is the database's folder.
func (l Layout) Etcd() string { return filepath.Join(l.Root, "etcd") }

// Bin holds links to, or copies of, the programs that run as the system user: the folder of the
// assets may be one that this user cannot enter, such as root's home.
func (l Layout) Bin() string { return filepath.Join(l.Root, "bin") }

// Logs holds a log per component.
func (l Layout) Logs() string { return filepath.Join(l.Root, "logs") }

// Log of a component.
func (l Layout) Log(component string) string { return filepath.Join(l.Logs(), component+".log") }

// Sockets is entered by the system user only: the capstands' sockets are there.
func (l Layout) Sockets() string { return filepath.Join(l.Root, "sockets") }

// HostSocket is where the capstand of a host listens.
func (l Layout) HostSocket(host string) string { return filepath.Join(l.Sockets(), host+".sock") }

// HostRoot is the state folder of a host's capstand.
func (l Layout) HostRoot(host string) string { return filepath.Join(l.Root, "hosts", host) }

// Backups holds the backups of the clusters' etcd that are kept on this box, whichever of its hosts made them.
func (l Layout) Backups() string { return filepath.Join(l.Root, "backups") }

// Assets is the folder that `make build` fills.
type Assets struct{ Dir string }

// Manager of our providers.
func (a Assets) Manager() string { return filepath.Join(a.Dir, "manager") }

// Capstand is the host daemon.
func (a Assets) Capstand() string { return filepath.Join(a.Dir, "capstand") }

// CoreManager of Cluster API.
func (a Assets) CoreManager() string { return filepath.Join(a.Dir, "capi", "capi-core-manager") }

// CoreComponents is where the manifests of Cluster API core are: <version>/core-components.yaml.
func (a Assets) CoreComponents() string {
	return filepath.Join(a.Dir, "capi", "repository", "cluster-api")
}

// Kubernetes is the folder with a folder per version.
func (a Assets) Kubernetes() string { return filepath.Join(a.Dir, "kubernetes") }

// EchoImage is the archive of the test image.
func (a Assets) EchoImage() string { return filepath.Join(a.Dir, "images", "echo.tar") }

// Runc is the runtime that the machines were made with.
func (a Assets) Runc() string { return filepath.Join(a.Dir, "node", "bin", "runc") }

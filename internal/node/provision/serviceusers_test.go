package provision

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"capstan.dev/capstan/internal/node/accounts"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/supervisor"
)

func servicesByName(n *node) map[string]supervisor.Service {
	all := map[string]supervisor.Service{}
	for _, s := range append(n.controlPlaneServices(), n.nodeServices()...) {
		all[s.Name] = s
	}
	return all
}

// All services are confined except those that create containers. Each confined service has its own user. Each private file
// belongs to one service.
// Row CP-23.
func TestRights(t *testing.T) {
	services := servicesByName(testNode(nodeconfig.RoleInit, nil))
	root := map[string]bool{"containerd": true, "kubelet": true, "node-agent": true}
	capabilities := map[string][]string{"coredns": {"NET_BIND_SERVICE"}, "kube-proxy": {"NET_ADMIN"}, "node-agent": agentCapabilities}
	owner := map[string]string{}
	for name, s := range services {
		if (s.User == "") != root[name] {
			t.Errorf("%s has the user %q", name, s.User)
		}
		if diff := cmp.Diff(capabilities[name], s.Capabilities); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		for _, path := range append(slices.Clone(s.Owns), s.User) {
			if other := owner[path]; other != "" && path != "" {
				t.Errorf("%s belongs to %s and %s", path, other, name)
			}
			owner[path] = name
		}
	}
	for path, want := range map[string]string{
		nodeconfig.PKIDir + "/ca.key": "kube-controller-manager", "/var/lib/etcd": "etcd", "/var/log/kubernetes": "kube-apiserver",
		nodeconfig.PKIDir + "/etcd/ca.key": "", nodeconfig.PKIDir + "/etcd/healthcheck-client.key": "",
	} {
		if owner[path] != want {
			t.Errorf("%s belongs to %q, want %q", path, owner[path], want)
		}
	}
	// Each file on a command line belongs to the service or is readable by all users.
	for name, s := range services {
		for _, a := range s.Command[1:] {
			if _, path, _ := strings.Cut(a, "="); s.User != "" && strings.HasPrefix(path, "/etc/kubernetes") && !strings.HasSuffix(path, ".crt") && owner[path] != name {
				t.Errorf("%s: %s belongs to %q", name, a, owner[path])
			}
		}
	}
}

func TestPrivilegedPort(t *testing.T) {
	n := testNode(nodeconfig.RoleInit, func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.APIServerPort = 443 })
	if got := servicesByName(n)["kube-apiserver"].Capabilities; !slices.Equal(got, []string{"NET_BIND_SERVICE"}) {
		t.Errorf("capabilities for port 443: %v", got)
	}
}

// The user's arguments work with a confined API server. It can read the files in the arguments and the files that these
// reference. It can write to folders. With a socket in the arguments, the API server runs as root.
func TestUserArgumentsKeepTheirFiles(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"admission.yaml": "plugins: [{path: " + dir + "/plugin.yaml}, {path: " + dir + "/none.yaml}]", "plugin.yaml": "a: b", "unused.yaml": "",
		"kms.yaml": "kms: {endpoint: unix:///run/kms.sock}",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	with := func(extra ...nodeconfig.Arg) supervisor.Service {
		return servicesByName(testNode(nodeconfig.RoleInit, func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.APIServer.ExtraArgs = extra }))["kube-apiserver"]
	}
	s := with(arg("admission-control-config-file", dir+"/admission.yaml"), arg("audit-log-path", dir+"/audit/audit.log"))
	if diff := cmp.Diff([]string{dir + "/admission.yaml", dir + "/plugin.yaml"}, s.Reads); diff != "" || s.User != accounts.APIServer {
		t.Errorf("user %q reads %s", s.User, diff)
	}
	// The log exists at the second start. The API server could replace it by a link.
	if err := errors.Join(os.Mkdir(dir+"/audit", 0o700), os.WriteFile(dir+"/audit/audit.log", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if s := with(arg("audit-log-path", dir+"/audit/audit.log")); len(s.Reads) > 0 {
		t.Errorf("root shares %v", s.Reads)
	}
	if !slices.Contains(s.Owns, dir+"/audit") || slices.Contains(s.Owns, "/var/log/kubernetes") {
		t.Errorf("owns %v", s.Owns)
	}
	if s := with(arg("encryption-provider-config", dir+"/kms.yaml")); s.User != "" || s.Owns != nil || s.Capabilities != nil {
		t.Errorf("with a socket: %+v", s)
	}
}

// The user of a component can enter the folders above its own, however many are missing. Folders of the system are never given away.
func TestFoldersOfComponents(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "log", "etcd")
	for range 2 {
		if err := makePrivateFolder(folder); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]os.FileMode{folder: 0o700, filepath.Dir(folder): 0o755} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", path, info, err)
		}
	}
	for wal, want := range map[string][]string{"/wal": nil, "/srv/wal": nil, "/srv/wal/etcd": {"/srv/wal"}} {
		if got := ownFolders([]string{"etcd", "--wal-dir=" + wal}); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", wal, got, want)
		}
	}
	if got := ownFolders([]string{"kube-apiserver", "--audit-log-path=/var/log/audit.log"}); len(got) > 0 {
		t.Errorf("the API server owns %v", got)
	}
}

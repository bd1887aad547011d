package provision

import (
	"bytes"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"capstan.dev/capstan/internal/node/accounts"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/supervisor"
)

// rights are the rights of a service in addition to files that every user can read.
type rights struct {
	// user is empty for root.
	user         string
	capabilities []string
	// owns are files that no other user reads, and folders that no other user writes to.
	owns []string
}

// agentCapabilities let the node agent, which runs as root, create routes and nftables rules, and renew certificates whose
// keys belong to other users.
var agentCapabilities = []string{"CHOWN", "DAC_OVERRIDE", "FOWNER", "NET_ADMIN"}

// serviceRights by the service's name. containerd and the kubelet make containers: they are root with all
// capabilities, and are not here. Each private file is in one list only.
func serviceRights(command []string) map[string]rights {
	key := func(names ...string) []string {
		var paths []string
		for _, name := range names {
			paths = append(paths, nodeconfig.PKIDir+"/"+name+".key")
		}
		return paths
	}
	client := func(name string) []string { return append(key(clientDir+"/"+name), kubeconfigs[name]) }
	apiServer := rights{user: accounts.APIServer, owns: append(
		key("apiserver", "apiserver-kubelet-client", "apiserver-etcd-client", "front-proxy-client", "sa"),
		nodeconfig.PKIDir+"/sa.pub", authenticationFile, nodeconfig.EncryptionConfigPath, auditPolicyFile, nodeconfig.AuditPolicyPath)}
	if port, err := strconv.Atoi(valueOf(command, "secure-port")); err == nil && port < 1024 {
		apiServer.capabilities = []string{"NET_BIND_SERVICE"}
	}
	return map[string]rights{
		"etcd":           {user: accounts.Etcd, owns: key("etcd/server", "etcd/peer")},
		"kube-apiserver": apiServer,
		"kube-controller-manager": {user: accounts.ControllerManager,
			owns: append(client("controller-manager"), append(key("ca", "components"), controllerManagerSAKey)...)},
		"kube-scheduler": {user: accounts.Scheduler, owns: append(client("scheduler"), key("scheduler")...)},
		"coredns":        {user: accounts.CoreDNS, capabilities: []string{"NET_BIND_SERVICE"}, owns: append(client("coredns"), corefile)},
		"metrics-server": {user: accounts.MetricsServer, owns: append(client("metrics-server"), key("metrics-server")...)},
		"kube-proxy":     {user: accounts.KubeProxy, capabilities: []string{"NET_ADMIN"}, owns: append(client("kube-proxy"), kubeProxyConfigFile)},
		"node-agent":     {capabilities: agentCapabilities},
	}
}

// confine gives the service the rights that it needs. A service whose configuration names a unix socket stays root, because
// the socket belongs to a process of the user, for example a key management plugin.
func (n *node) confine(service *supervisor.Service) {
	r, found := serviceRights(service.Command)[service.Name]
	if !found {
		return
	}
	reads := filesNamedIn(n.extraArgs(service.Name))
	if r.user != "" && namesSocket(service.Command, append(reads, r.owns...)) {
		return
	}
	service.User, service.Capabilities = r.user, r.capabilities
	service.Owns = slices.Concat(r.owns, ownFolders(service.Command))
	// The service could replace a file in its own folders by a link.
	service.Reads = slices.DeleteFunc(reads, func(path string) bool {
		return slices.ContainsFunc(service.Owns, func(own string) bool { return nodeconfig.Within(path, own) })
	})
}

// extraArgs returns the user's own arguments of a service.
func (n *node) extraArgs(service string) []nodeconfig.Arg {
	if n.ControlPlane == nil {
		return nil
	}
	switch service {
	case "etcd":
		return n.ControlPlane.Etcd.ExtraArgs
	case "kube-apiserver":
		return n.ControlPlane.APIServer.ExtraArgs
	case "kube-controller-manager":
		return n.ControlPlane.ControllerManager.ExtraArgs
	case "kube-scheduler":
		return n.ControlPlane.Scheduler.ExtraArgs
	}
	return nil
}

// ownFolders returns the folders that a service writes to, according to its command line.
func ownFolders(command []string) []string {
	var folders []string
	for _, name := range nodeconfig.FolderArguments {
		// A former manager can have rendered data with a shared folder. The component reports that it cannot write there.
		if folder := nodeconfig.OwnFolder(name, valueOf(command, name)); folder != "" && !nodeconfig.IsShared(folder) {
			folders = append(folders, folder)
		}
	}
	return folders
}

// maxConfig is the part of a file that is searched for the names of other files.
const maxConfig = 1 << 20

var absolutePath = regexp.MustCompile(`/[A-Za-z0-9_./-]+`)

// filesNamedIn returns the files that arguments name, and the files that those files name: the configuration of admission
// names the configuration of each plugin.
func filesNamedIn(args []nodeconfig.Arg) []string {
	var files []string
	add := func(text string) {
		for _, path := range absolutePath.FindAllString(text, -1) {
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && !slices.Contains(files, path) {
				files = append(files, path)
			}
		}
	}
	for _, a := range args {
		add(a.Value)
	}
	for _, path := range slices.Clone(files) {
		add(string(readConfig(path)))
	}
	return files
}

func readConfig(path string) []byte {
	if info, err := os.Stat(path); err != nil || info.Size() > maxConfig {
		return nil
	}
	data, _ := os.ReadFile(path)
	return data
}

// namesSocket returns whether the command line, or one of the files, names a unix socket.
func namesSocket(command, files []string) bool {
	if strings.Contains(strings.Join(command, " "), "unix://") {
		return true
	}
	return slices.ContainsFunc(files, func(path string) bool {
		data := readConfig(path)
		return bytes.Contains(data, []byte("unix://")) || bytes.Contains(data, []byte("udsName"))
	})
}

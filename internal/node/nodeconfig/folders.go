package nodeconfig

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// sharedFolders contain files of several programs.
var sharedFolders = []string{
	"/", "/boot", "/dev", "/etc", "/home", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/srv", "/sys", "/tmp", "/usr", "/usr/local", "/var",
	"/var/cache", "/var/lib", "/var/log", "/var/spool", "/var/tmp",
}

// takenFolders belong to the machine and to the services of a Node, with all folders in them.
var takenFolders = []string{
	"/bin", "/lib", "/lib64", "/sbin", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/sbin", "/etc/capstan", "/etc/cni", "/etc/containerd", "/etc/kubernetes",
	"/opt/capstan", "/opt/cni", "/run/capstan", "/run/containerd", "/var/lib/capstan", "/var/lib/cni", "/var/lib/containerd", "/var/lib/kubelet",
	"/var/log/capstan", "/var/log/containers", "/var/log/pods",
}

// CheckFolders refuses arguments whose folders have files of others: a component's user becomes the owner of everything in its folders. It is a
// rule for rendered data, of new machines and of updates. A machine does not check it: it could renew neither its certificates nor its services.
func (c *NodeConfiguration) CheckFolders() []error {
	if c.ControlPlane == nil {
		return nil
	}
	etcd, apiServer := c.ControlPlane.Etcd.ExtraArgs, c.ControlPlane.APIServer.ExtraArgs
	var errs []error
	check := func(component, argument, folder string, others ...string) {
		if folder == "" {
			return
		}
		if err := checkOwnFolder(folder, others...); err != nil {
			errs = append(errs, fmt.Errorf("cluster.%s.extraArgs: %s: %w", component, argument, err))
		}
	}
	data, wal := OwnFolder("data-dir", last(etcd, "data-dir")), OwnFolder("wal-dir", last(etcd, "wal-dir"))
	check("etcd", "data-dir", data)
	check("etcd", "wal-dir", wal)
	log := cmp.Or(last(apiServer, "audit-log-path"), DefaultAuditLog)
	check("apiServer", "audit-log-path", OwnFolder("audit-log-path", log), cmp.Or(data, DefaultEtcdFolder), wal)
	return errs
}

// FolderArguments are the arguments with files that their component writes.
var FolderArguments = append(slices.Clone(EtcdFolders), "audit-log-path")

// OwnFolder returns the folder that a component gets for a value of one of FolderArguments; "" without an absolute path.
func OwnFolder(argument, value string) string {
	switch {
	case !filepath.IsAbs(value):
		return ""
	case argument == "data-dir":
		return filepath.Clean(value)
	}
	return filepath.Dir(filepath.Clean(value)) // of the log file, and of wal-dir, which etcd makes under another name first
}

// last returns the value of an argument that has an effect; "" without one.
func last(arguments []Arg, name string) string {
	values := Values(arguments, name)
	if len(values) == 0 {
		return ""
	}
	return values[len(values)-1]
}

// IsShared reports whether a folder has files of the system or of several components.
func IsShared(folder string) bool {
	folder = clean(folder)
	return slices.Contains(sharedFolders, folder) || slices.ContainsFunc(takenFolders, func(t string) bool { return Within(folder, t) })
}

// Within reports whether a path is a folder, or in it.
func Within(path, folder string) bool {
	return path == folder || strings.HasPrefix(path, strings.TrimSuffix(folder, "/")+"/")
}

// checkOwnFolder refuses a folder with files of others: of the system, or in common with the others.
func checkOwnFolder(folder string, others ...string) error {
	folder = clean(folder)
	common := func(o string) bool { return o != "" && (Within(folder, clean(o)) || Within(clean(o), folder)) }
	if IsShared(folder) || slices.ContainsFunc(others, common) {
		return fmt.Errorf("expected files in a folder for this component alone, found the folder %s, which has files of others", folder)
	}
	return nil
}

// clean returns the shortest form of a path. /var/run is a link to /run.
func clean(path string) string {
	path = filepath.Clean(path)
	if rest, ok := strings.CutPrefix(path, "/var/run"); ok && (rest == "" || rest[0] == '/') {
		return "/run" + rest
	}
	return path
}

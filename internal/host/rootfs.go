package host

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/boundedfolder"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machineimage"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/machineapi"
)

// makeDisk creates a machine's root folder before the machine's first start. Folders that the container mounts over stay
// empty. It completes a partly created folder. A link that leads out of the folder is an error.
func makeDisk(rootfs string, spec *hostpb.MachineSpec, system runc.System) error {
	if err := os.MkdirAll(rootfs, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(rootfs)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	folders := []string{
		"dev", "etc/ssl/certs", "etc/alternatives", "home", "mnt", "opt/capstan", "proc", "root",
		"run", "srv", "sys", "tmp", "usr", "var/lib", "var/log/capstan", "var/cache", "var/tmp",
	}
	for _, folder := range append(folders, system.Folders...) {
		if err := root.MkdirAll(inRoot(folder), 0o755); err != nil {
			return err
		}
	}
	for _, links := range []map[string]string{system.Links, {"var/run": "/run"}, alternatives(system.Root)} {
		if err := makeLinks(root, links); err != nil {
			return err
		}
	}
	files := tables(system.Root)
	maps.Copy(files, etc(spec))
	for path, content := range files {
		if err := errors.Join(root.MkdirAll(filepath.Dir(path), 0o755), root.WriteFile(path, []byte(content), 0o644)); err != nil {
			return err
		}
	}
	return errors.Join(root.Chmod("root", 0o700), root.Chmod("var/tmp", 0o1777), root.Chmod("etc/shadow", 0o600))
}

// inRoot returns a path of a machine in the form that os.Root expects.
func inRoot(path string) string { return strings.TrimPrefix(path, "/") }

// makeLinks creates links from a map of path to target. It keeps existing files.
func makeLinks(root *os.Root, links map[string]string) error {
	for path, target := range links {
		if err := root.Symlink(target, inRoot(path)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// etc returns the machine's own files in /etc, by path.
func etc(spec *hostpb.MachineSpec) map[string]string {
	address := ""
	if len(spec.Addresses) > 0 {
		address = spec.Addresses[0].Address + " " + spec.Name + "\n"
	}
	return map[string]string{
		"etc/hostname":      spec.Name + "\n",
		"etc/hosts":         "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n" + address,
		"etc/machine-id":    machineapi.MachineID(spec.Id),
		"etc/passwd":        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
		"etc/group":         "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
		"etc/shadow":        "root:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n",
		"etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n",
	}
}

// hostResolvConf lists the files that can contain the host's resolver configuration.
var hostResolvConf = []string{"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"}

// resolvConf returns the first of the files that names a server which machines can reach, or nil. Machines cannot reach a
// resolver on the host's loopback address.
func resolvConf(files []string) []byte {
	for _, file := range files {
		if data, err := os.ReadFile(file); err == nil && len(nameServers(data)) > 0 {
			return data
		}
	}
	return nil
}

// nameServers returns the servers of a resolver configuration, except those on the host's loopback address.
func nameServers(conf []byte) (all []netip.Addr) {
	for line := range strings.Lines(string(conf)) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if ip, err := netip.ParseAddr(fields[1]); err == nil && !ip.IsLoopback() {
			all = append(all, ip)
		}
	}
	return all
}

// tables returns the files of the host or of an image that programs in /usr expect: the certificates of public authorities, for
// image pulls, and a few tables. Files that do not exist there are omitted.
func tables(root string) map[string]string {
	files := map[string]string{}
	for _, path := range []string{
		"etc/ssl/certs/ca-certificates.crt", "etc/pki/tls/certs/ca-bundle.crt", "etc/ssl/ca-bundle.pem",
		"etc/ld.so.cache", "etc/login.defs", "etc/services", "etc/protocols", "etc/os-release",
	} {
		if data, err := machineimage.ReadFile(root, path); err == nil {
			files[path] = string(data)
		}
	}
	return files
}

// alternatives returns the alternatives of the host or of an image, for example iptables, with their targets.
func alternatives(root string) map[string]string {
	links := map[string]string{}
	paths, _ := filepath.Glob(filepath.Join(root, "etc/alternatives/*"))
	for _, path := range paths {
		if target, err := os.Readlink(path); err == nil {
			links[filepath.Join("/etc/alternatives", filepath.Base(path))] = target
		}
	}
	return links
}

// runDirLimits bound what a machine can write into its folder. The bootstrap data and the data of an update have a few MiB at most.
var runDirLimits = boundedfolder.Limits{Bytes: 32 << 20, Files: 1024}

// makeRunDir creates the folder that capstand shares with a machine. It contains the machine's metadata, the host's current
// resolver configuration if it exists, and the bootstrap data until the machine has used it. The machine has written into the folder
// of its last start, so its content does not delay this start.
func (s store) makeRunDir(id string, metadata machineapi.Metadata, bootstrapData, resolvConf []byte) error {
	dir := s.path(runDir, id)
	if err := s.removeRunDir(id); err != nil {
		return err
	}
	if err := boundedfolder.Make(dir, 0, runDirLimits); err != nil {
		return fmt.Errorf("creating the folder that the machine shares with capstand: %w", err)
	}
	if err := atomicfile.WriteJSON(filepath.Join(dir, machineapi.MetadataFile), metadata, 0o644); err != nil {
		return err
	}
	if resolvConf != nil {
		if err := atomicfile.WriteFile(filepath.Join(dir, machineapi.ResolvConfFile), resolvConf, 0o644); err != nil {
			return err
		}
	}
	if bootstrapData == nil {
		return nil
	}
	return atomicfile.WriteFile(filepath.Join(dir, machineapi.BootstrapDataFile), bootstrapData, 0o600)
}

// removeRunDir removes the folder that capstand shares with a machine. That of a machine which an earlier version started is on the disk.
func (s store) removeRunDir(id string) error {
	dir := s.path(runDir, id)
	if err := boundedfolder.Unmount(dir); err != nil {
		return err
	}
	return s.discard(dir)
}

// removeRunDirs removes the folders of all machines. After a reboot, those on the disk are left, and nothing is mounted on the others. That
// is not so if only the record of the boot was lost.
func (s store) removeRunDirs() error {
	entries, err := os.ReadDir(s.path(runDir))
	for _, entry := range entries {
		err = errors.Join(err, s.removeRunDir(entry.Name()))
	}
	return err
}

// metadata returns the machine's metadata.
func (m *machine) metadata(spec *hostpb.MachineSpec) machineapi.Metadata {
	data := metadata(spec, m.diskSize(spec))
	data.Logging = m.host.config.Logging
	return data
}

// metadata returns the metadata of a machine. diskBytes is the size of its own disk, 0 if it has none.
func metadata(spec *hostpb.MachineSpec, diskBytes int64) machineapi.Metadata {
	m := machineapi.Metadata{
		ID: spec.Id, Name: spec.Name, Hostname: spec.Name, Cluster: spec.Cluster, ProviderID: spec.ProviderId,
		FailureDomain: spec.FailureDomain, KubernetesVersion: spec.KubernetesVersion,
		CPUs: spec.Cpus, MemoryBytes: spec.MemoryBytes, PidsLimit: admission.PidsLimit(spec), DiskBytes: diskBytes, ControlPlane: spec.ControlPlane,
	}
	for _, a := range admission.Normalized(spec).Addresses {
		m.Addresses = append(m.Addresses, machineapi.Address{Address: a.Address, Prefix: a.Prefix, Gateway: a.Gateway})
	}
	return m
}

// writeBundle writes the files that runc needs in addition to the machine's disk. edit changes the configuration of the container.
func writeBundle(bundle string, edit func(*oci.Spec) error, p runc.Params) error {
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return err
	}
	if err := runc.WriteViews(p, string(cpuinfo)); err != nil {
		return fmt.Errorf("writing the files with the machine's size: %w", err)
	}
	spec := runc.Spec(p)
	if err := edit(spec); err != nil {
		return err
	}
	var config bytes.Buffer
	if err := json.NewEncoder(&config).Encode(spec); err != nil {
		return err
	}
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		return err
	}
	return atomicfile.WriteFile(filepath.Join(bundle, "config.json"), config.Bytes(), 0o600)
}

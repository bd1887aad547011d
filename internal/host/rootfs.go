package host

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/uuid"

	"capstan.dev/capstan/internal/host/disk"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/runc"
)

// makeDisk makes a machine's root folder. Folders that the container mounts over are empty here.
// Done again over a half-made one it gives the same.
func makeDisk(rootfs string, spec *hostpb.MachineSpec, system runc.System) error {
	for _, dir := range []string{
		"dev", "etc/ssl/certs", "etc/alternatives", "home", "mnt", "opt/capstan", "proc", "root",
		"run", "srv", "sys", "tmp", "usr", "var/lib", "var/log/capstan", "var/cache", "var/tmp",
	} {
		if err := os.MkdirAll(filepath.Join(rootfs, dir), 0o755); err != nil {
			return err
		}
	}
	for name, target := range system.Links {
		if err := link(target, filepath.Join(rootfs, name)); err != nil {
			return err
		}
	}
	for _, folder := range system.Folders {
		if err := os.MkdirAll(filepath.Join(rootfs, folder), 0o755); err != nil {
			return err
		}
	}
	if err := link("/run", filepath.Join(rootfs, "var/run")); err != nil {
		return err
	}
	for name, content := range etc(spec) {
		if err := os.WriteFile(filepath.Join(rootfs, "etc", name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	if err := copyFromHost(rootfs); err != nil {
		return err
	}
	return errors.Join(os.Chmod(filepath.Join(rootfs, "root"), 0o700), os.Chmod(filepath.Join(rootfs, "var/tmp"), 0o1777),
		os.Chmod(filepath.Join(rootfs, "etc/shadow"), 0o600))
}

func link(target, path string) error {
	if err := os.Symlink(target, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// etc is a machine's own configuration.
func etc(spec *hostpb.MachineSpec) map[string]string {
	address := ""
	if len(spec.Addresses) > 0 {
		address = spec.Addresses[0].Address + " " + spec.Name + "\n"
	}
	return map[string]string{
		"hostname": spec.Name + "\n",
		"hosts":    "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n" + address,
		// Always the same for the same machine, and never that of another.
		"machine-id":    strings.ReplaceAll(uuid.NewSHA1(uuid.NameSpaceOID, []byte(spec.Id)).String(), "-", "") + "\n",
		"passwd":        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
		"group":         "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
		"shadow":        "root:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n",
		"nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n",
		"resolv.conf":   resolvConf("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"),
		"os-release":    hostFile("/etc/os-release"),
	}
}

// resolvConf takes the first of the host's files that names a server which machines can reach: a
// resolver on the host's loopback is not among them.
func resolvConf(files ...string) string {
	for _, file := range files {
		text := hostFile(file)
		for line := range strings.Lines(text) {
			server, is := strings.CutPrefix(strings.TrimSpace(line), "nameserver ")
			if is && !strings.HasPrefix(server, "127.") && server != "::1" {
				return text
			}
		}
	}
	return ""
}

func hostFile(path string) string {
	data, _ := os.ReadFile(path) // what the host does not have the machine does without
	return string(data)
}

// copyFromHost copies what programs in /usr expect in /etc: the certificates of public authorities
// (images are pulled with them), the names of alternatives (iptables is one), and a few tables.
func copyFromHost(rootfs string) error {
	for _, path := range []string{
		"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem",
		"/etc/ld.so.cache", "/etc/login.defs", "/etc/services", "/etc/protocols",
	} {
		data, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		to := filepath.Join(rootfs, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, data, 0o644)); err != nil {
			return err
		}
	}
	alternatives, _ := filepath.Glob("/etc/alternatives/*")
	for _, path := range alternatives {
		target, err := os.Readlink(path)
		if err != nil {
			continue
		}
		if err := link(target, filepath.Join(rootfs, path)); err != nil {
			return err
		}
	}
	return nil
}

// metadata is /run/capstan/metadata.json in the machine.
type metadata struct {
	ID                string            `json:"id"`
	Name              string            `json:"name"`
	Hostname          string            `json:"hostname"`
	Cluster           string            `json:"cluster"`
	ProviderID        string            `json:"providerID"`
	Addresses         []metadataAddress `json:"addresses"`
	FailureDomain     string            `json:"failureDomain"`
	KubernetesVersion string            `json:"kubernetesVersion"`
	CPUs              int32             `json:"cpus"`
	MemoryBytes       int64             `json:"memoryBytes"`
	ControlPlane      bool              `json:"controlPlane"`
}

type metadataAddress struct {
	Address string `json:"address"`
	Prefix  int32  `json:"prefix"`
	Gateway string `json:"gateway"`
}

// makeRunDir makes the folder that capstand shares with the machine, with the machine's metadata and,
// while it was not used, the bootstrap data.
func makeRunDir(dir string, spec *hostpb.MachineSpec, bootstrapData []byte) error {
	if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)); err != nil {
		return err
	}
	m := metadata{
		ID: spec.Id, Name: spec.Name, Hostname: spec.Name, Cluster: spec.Cluster, ProviderID: spec.ProviderId,
		FailureDomain: spec.FailureDomain, KubernetesVersion: spec.KubernetesVersion,
		CPUs: spec.Cpus, MemoryBytes: spec.MemoryBytes, ControlPlane: spec.ControlPlane,
	}
	for _, a := range normal(spec).Addresses {
		m.Addresses = append(m.Addresses, metadataAddress{a.Address, a.Prefix, a.Gateway})
	}
	if err := disk.WriteJSON(filepath.Join(dir, "metadata.json"), m, 0o644); err != nil {
		return err
	}
	if bootstrapData == nil {
		return nil
	}
	return disk.WriteFile(filepath.Join(dir, "bootstrap-data"), bootstrapData, 0o600)
}

// writeBundle writes what runc needs beside the machine's disk.
func writeBundle(bundle string, p runc.Params) error {
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return err
	}
	if err := runc.WriteViews(p.Views, p.CPUs, p.MemoryBytes, string(cpuinfo)); err != nil {
		return fmt.Errorf("views of the machine's size: %w", err)
	}
	var config bytes.Buffer
	if err := json.NewEncoder(&config).Encode(runc.Spec(p)); err != nil {
		return err
	}
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		return err
	}
	return disk.WriteFile(filepath.Join(bundle, "config.json"), config.Bytes(), 0o600)
}

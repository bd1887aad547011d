// Package runc describes a machine as an OCI container and runs it.
//
// Layer: host.
package runc

import (
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"

	"capstan.dev/capstan/internal/host/cgroup"
)

// Init is PID 1 of every machine, below the assets folder.
const Init = "/opt/capstan/capstan-init"

// Annotations of the container: the namespace and name of its machine, and the id of its network.
const (
	NamespaceAnnotation = "dev.capstan.namespace"
	NameAnnotation      = "dev.capstan.name"
	NetworkAnnotation   = "dev.capstan.network"
)

// Params is all that differs between the containers of two machines.
type Params struct {
	// Hostname is the machine's name, in Namespace, and NetworkID its network: by these the container is known even if capstand has
	// lost its record.
	Hostname, Namespace, NetworkID string
	// Rootfs is the machine's disk.
	Rootfs string
	// Assets is bound read-only to /opt/capstan.
	Assets string
	// Run is the folder shared between capstand and the machine, bound to /run/capstan.
	Run string
	// Backups is a folder of the host that the machine finds at BackupsIn; none when empty.
	Backups   string
	BackupsIn string
	// Views holds the files that WriteViews made.
	Views string
	// NetNS is the path of the machine's network namespace.
	NetNS  string
	Cgroup cgroup.Group
	// CPUs limits the machine; 0 is all of the host's.
	CPUs int32
	// MemoryBytes limits the machine.
	MemoryBytes int64
	// PidsLimit is the most processes and threads of the machine.
	PidsLimit int64
	// Capabilities by name; all that capstand has.
	Capabilities []string
	// System is the host's own system: the links and folders that make up its programs.
	System System
}

// System is how the host lays out its programs: on today's distributions /usr holds all and /bin,
// /sbin and /lib* are links into it; elsewhere they are folders, which are then bound too.
type System struct {
	// Links by name, for example bin: usr/bin.
	Links map[string]string
	// Folders to bind read-only, for example /usr.
	Folders []string
	// Devices of the host that machines get beside the usual ones, for example /dev/fuse.
	Devices []specs.LinuxDevice
}

// cpuPeriod is the kernel's usual scheduling period, in microseconds.
const cpuPeriod = 100_000

// Spec is the OCI configuration of a machine. The machine is not confined from its host as a pod is
// (it has every capability and device, see "Trust" in the README), but it sees and fills only its own
// namespaces.
func Spec(p Params) *specs.Spec {
	return &specs.Spec{
		Version: specs.Version,
		Annotations: map[string]string{
			NamespaceAnnotation: p.Namespace, NameAnnotation: p.Hostname, NetworkAnnotation: p.NetworkID,
		},
		Hostname: p.Hostname,
		Root:     &specs.Root{Path: p.Rootfs},
		Process: &specs.Process{
			Args: []string{Init},
			Env: []string{
				"PATH=/opt/capstan/node/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
				"HOME=/root", "LANG=C.UTF-8", "container=capstan",
			},
			Cwd: "/",
			Capabilities: &specs.LinuxCapabilities{
				Bounding: p.Capabilities, Effective: p.Capabilities, Permitted: p.Capabilities,
			},
		},
		Mounts: mounts(p),
		Linux: &specs.Linux{
			CgroupsPath: string(p.Cgroup),
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
				{Type: specs.MountNamespace}, {Type: specs.CgroupNamespace},
				{Type: specs.NetworkNamespace, Path: p.NetNS},
			},
			Resources: resources(p),
			Devices:   p.System.Devices,
			// Pods with mountPropagation Bidirectional need it.
			RootfsPropagation: "rshared",
			// These are the host's, not the machine's: capstand sets them once. Those of the network
			// namespace (/proc/sys/net) stay writable.
			ReadonlyPaths: []string{"/proc/sys/kernel", "/proc/sys/vm", "/proc/sysrq-trigger"},
		},
	}
}

func resources(p Params) *specs.LinuxResources {
	r := &specs.LinuxResources{
		Devices: []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}},
		Memory:  &specs.LinuxMemory{Limit: &p.MemoryBytes},
		Pids:    &specs.LinuxPids{Limit: &p.PidsLimit},
	}
	if p.CPUs > 0 {
		quota, period := int64(p.CPUs)*cpuPeriod, uint64(cpuPeriod)
		// Shares keep the proportion between machines when they ask for more than the host has.
		shares := uint64(p.CPUs) * 1024
		r.CPU = &specs.LinuxCPU{Quota: &quota, Period: &period, Shares: &shares}
	}
	return r
}

func mounts(p Params) []specs.Mount {
	all := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc"},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "rw"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "nodev", "mode=1777"}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/run", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=755"}},
		{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777"}},
		// The kubelet watches the kernel's log for out-of-memory kills.
		bind("/dev/kmsg", "/dev/kmsg", "rw"),
		bind(p.Run, "/run/capstan", "rw"),
		bind(p.Assets, "/opt/capstan", "ro", "nosuid", "nodev"),
	}
	if p.Backups != "" {
		all = append(all, bind(p.Backups, p.BackupsIn, "rw", "nosuid", "nodev", "noexec"))
	}
	for _, folder := range p.System.Folders {
		all = append(all, bind(folder, folder, "ro"))
	}
	for _, view := range views(p.CPUs) {
		all = append(all, bind(filepath.Join(p.Views, view), "/"+view, "ro"))
	}
	return all
}

// bind mounts a part of the host, cut off from the host's later mounts and from the machine's.
func bind(from, to string, options ...string) specs.Mount {
	return specs.Mount{Source: from, Destination: to, Type: "bind", Options: append([]string{"rbind", "rprivate"}, options...)}
}

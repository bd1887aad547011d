// Package runc describes a machine as an OCI container and runs it.
//
// Layer: host. Allowed imports: api, library, contract.
package runc

import (
	"maps"
	"path/filepath"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"

	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/machineapi"
)

// Annotations of the container: the namespace and name of its machine, and the id of its network.
const (
	NamespaceAnnotation = "dev.capstan.namespace"
	NameAnnotation      = "dev.capstan.name"
	NetworkAnnotation   = "dev.capstan.network"
)

// Params are the differences between the containers of two machines.
type Params struct {
	// Hostname is the name of the machine in Namespace, and NetworkID is its network. They identify the container if
	// capstand has lost its record.
	Hostname, Namespace, NetworkID string
	// Rootfs is the machine's disk.
	Rootfs string
	// Assets is bound read-only to machineapi.AssetsFolder.
	Assets string
	// Run is the folder shared between capstand and the machine, bound to machineapi.SharedFolder.
	Run string
	// ContainerImages is the folder of the host with archives that the machine imports; none if empty.
	ContainerImages string
	// Backups is a folder of the host that is mounted at BackupsIn in the machine; none if empty.
	Backups   string
	BackupsIn string
	// Volumes are folders of the host by their paths in the machine.
	Volumes map[string]string
	// HostMounts are folders and files of the host in the machine.
	HostMounts []HostMount
	// Devices of the host in the machine, in addition to those of System.
	Devices []specs.LinuxDevice
	// Views is the folder with the files of WriteViews.
	Views string
	// NetNS is the path of the machine's network namespace.
	NetNS  string
	Cgroup cgroup.Group
	// CPUs limits the machine; 0 is no limit.
	CPUs int32
	// ControlPlane machines get more processor time than workers when the host has too little for all.
	ControlPlane bool
	// MemoryBytes limits the machine.
	MemoryBytes int64
	// SwapBytes is the swap that the machine can use and sees, beside its memory. With nil, runc sets no limit, and the machine sees no swap.
	SwapBytes *int64
	// PidsLimit is the largest number of processes and threads of the machine.
	PidsLimit int64
	// Capabilities of the machine by name: all capabilities of capstand.
	Capabilities []string
	// System is the part of the machine's image, or of the host's file system, that contains the programs.
	System System
}

// System describes the layout of the programs of the host or of an image. On current distributions /usr contains all programs, and /bin, /sbin
// and /lib* are links into it. On others they are folders, which are bound too.
type System struct {
	// Root of the file system: / is that of the host.
	Root string
	// Links by name, for example bin: usr/bin.
	Links map[string]string
	// Folders to bind read-only, for example /usr.
	Folders []string
	// Devices of the host that machines get in addition to the usual ones, for example /dev/fuse.
	Devices []specs.LinuxDevice
	// AppArmor is true if the host has AppArmor.
	AppArmor bool
}

// HostMount is a folder or file of the host in a machine.
type HostMount struct {
	// Source is a path of the open folder or file.
	Source string
	// Path in the machine.
	Path     string
	ReadOnly bool
}

// mount returns the mount without the file systems that are mounted below its source: a read-only mount would leave them writable.
// Its files have no setuid bits and no devices: a user with write access to the folder could otherwise create both.
func (m HostMount) mount() specs.Mount {
	access := "rw"
	if m.ReadOnly {
		access = "ro"
	}
	return specs.Mount{Source: m.Source, Destination: m.Path, Type: "bind", Options: []string{"bind", "rprivate", "nosuid", "nodev", access}}
}

// options of the mounts. The files of an image get no privileges and no devices, regardless of their mode bits.
func (s System) options() []string {
	if s.Root == "/" {
		return []string{"ro"}
	}
	return []string{"ro", "nosuid", "nodev"}
}

// cpuPeriod is the kernel's usual scheduling period, in microseconds.
const cpuPeriod = 100_000

// Spec returns the OCI configuration of a machine. A machine is not confined like a pod: it has every capability and device
// (see "Trust" in the README). It sees and fills only its own namespaces.
func Spec(p Params) *specs.Spec {
	return &specs.Spec{
		Version: specs.Version,
		Annotations: map[string]string{
			NamespaceAnnotation: p.Namespace, NameAnnotation: p.Hostname, NetworkAnnotation: p.NetworkID,
		},
		Hostname: p.Hostname,
		Root:     &specs.Root{Path: p.Rootfs},
		Process: &specs.Process{
			Args: []string{machineapi.InitPath},
			Env: []string{
				"PATH=" + machineapi.SearchPath,
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
			Devices:   slices.Concat(p.System.Devices, p.Devices),
			// Pods with mountPropagation Bidirectional need it.
			RootfsPropagation: "rshared",
			// These settings belong to the host, and capstand sets them once. The settings of the network namespace
			// (/proc/sys/net) stay writable.
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
	if p.SwapBytes != nil {
		sum := p.MemoryBytes + *p.SwapBytes // runc subtracts the memory on cgroup v2.
		r.Memory.Swap = &sum
	}
	shares := cpuShares(p)
	r.CPU = &specs.LinuxCPU{Shares: &shares}
	if p.CPUs > 0 {
		quota, period := int64(p.CPUs)*cpuPeriod, uint64(cpuPeriod)
		r.CPU.Quota, r.CPU.Period = &quota, &period
	}
	return r
}

// cpuShares keep the proportion between machines when together they need more processor time than the host has. All workloads of a
// cluster depend on its control plane, so a worker that computes must not delay an API server or an etcd of the same host.
func cpuShares(p Params) uint64 {
	const share, controlPlaneFactor, most = 1024, 8, 262144 // runc refuses more than the kernel's maximum.
	shares := uint64(max(p.CPUs, 1)) * share
	if p.ControlPlane {
		shares *= controlPlaneFactor
	}
	return min(shares, most)
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
		bind(p.Run, machineapi.SharedFolder, "rw", "nosuid", "nodev", "noexec"),
		bind(p.Assets, machineapi.AssetsFolder, "ro", "nosuid", "nodev"),
	}
	// containerd loads its profile for pods and applies it if it sees AppArmor here, unless the machine has no apparmor_parser. A
	// machine that may not load profiles must not see it: its pods would fail, and so they run without a profile.
	if p.System.AppArmor && slices.Contains(p.Capabilities, "CAP_MAC_ADMIN") {
		all = append(all, bind(securityFS, securityFS, "rw", "nosuid", "nodev", "noexec"))
	}
	if p.ContainerImages != "" {
		all = append(all, bind(p.ContainerImages, machineapi.SharedFolder+"/"+machineapi.ContainerImagesFolder, "ro", "nosuid", "nodev", "noexec"))
	}
	if p.Backups != "" {
		all = append(all, bind(p.Backups, p.BackupsIn, "rw", "nosuid", "nodev", "noexec"))
	}
	for _, path := range slices.Sorted(maps.Keys(p.Volumes)) {
		all = append(all, bind(p.Volumes[path], path, "rw", "nosuid", "nodev"))
	}
	for _, folder := range p.System.Folders {
		all = append(all, bind(filepath.Join(p.System.Root, folder), folder, p.System.options()...))
	}
	for _, m := range p.HostMounts {
		all = append(all, m.mount())
	}
	for _, view := range views(p.CPUs) {
		all = append(all, bind(filepath.Join(p.Views, view), "/"+view, "ro"))
	}
	return all
}

// bind mounts a part of the host. Later mounts of the host or of the machine do not propagate.
func bind(from, to string, options ...string) specs.Mount {
	return specs.Mount{Source: from, Destination: to, Type: "bind", Options: append([]string{"rbind", "rprivate"}, options...)}
}

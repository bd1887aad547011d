package host

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machinedisk"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/host/versions"
	"capstan.dev/capstan/internal/version"
)

// Driver that makes machines.
const Driver = "runc"

// hostMemory reads the host's memory, in bytes.
func hostMemory() (int64, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	return meminfoBytes(string(data), "MemTotal")
}

// meminfoBytes returns a value of /proc/meminfo in bytes.
func meminfoBytes(meminfo, name string) (int64, error) {
	for line := range strings.Lines(meminfo) {
		value, found := strings.CutPrefix(line, name+":")
		if !found {
			continue
		}
		kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		return kb << 10, err
	}
	return 0, fmt.Errorf("expected a line %s in /proc/meminfo, found none", name)
}

// swapLimit returns the swap that a machine with this memory may use, in bytes: the machine's share of the host's swap, in whole MiB.
// It returns nil on cgroup v1: not every kernel can limit swap there, and the kubelet gives none to pods.
func swapLimit(cgroupVersion int, meminfo string, memoryBytes int64) (*int64, error) {
	if cgroupVersion != 2 {
		return nil, nil
	}
	memory, err := meminfoBytes(meminfo, "MemTotal")
	if err != nil {
		return nil, err
	}
	swap, err := meminfoBytes(meminfo, "SwapTotal")
	if err != nil {
		return nil, err
	}
	share := int64(float64(swap)*min(1, float64(memoryBytes)/float64(max(memory, 1)))) >> 20 << 20
	return &share, nil
}

// installed returns the versions of Kubernetes, those of the last time if the assets cannot be read: a capstand that has no free
// descriptor must not report a host without versions. mu is held.
func (ms *machines) installed() []string {
	names, err := versions.Names(filepath.Join(ms.config.Assets, "kubernetes"), "kubelet")
	if err != nil {
		ms.log.Error("The versions of Kubernetes cannot be listed", "error", err)
		return ms.versions
	}
	ms.versions = names
	return names
}

// lookPause is the time between two looks at facts of the host. A watch of files would use one of the inotify instances of the host,
// which its machines need.
const lookPause = 5 * time.Second

// keepLooking calls look now and then every lookPause, until ctx ends.
func keepLooking(ctx context.Context, look func()) {
	ticker := time.NewTicker(lookPause)
	defer ticker.Stop()
	for {
		look()
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// restoreVersions makes versions usable again that an interrupted removal hid: a machine can have one of them.
func (ms *machines) restoreVersions() error {
	return versions.Restore(filepath.Join(ms.config.Assets, "kubernetes"))
}

// keepVersions publishes the versions of Kubernetes that an administrator adds or removes, until ctx ends.
func (ms *machines) keepVersions(ctx context.Context) {
	ms.mu.Lock()
	before := ms.installed()
	ms.mu.Unlock()
	var errs lastErrors
	keepLooking(ctx, func() {
		err := ms.restoreVersions()
		ms.mu.Lock()
		defer ms.mu.Unlock()
		if errs.news(ms.config.Assets, err) {
			ms.log.Error("A version of Kubernetes whose removal was interrupted cannot be restored", "error", err)
		}
		now := ms.installed()
		if !slices.Equal(now, before) {
			ms.log.Info("Kubernetes versions changed", "versions", now, "before", before)
			ms.broadcaster.Publish(events.Host(ms.info()))
		}
		before = now
	})
}

// keepLinks publishes the MTUs of the host's links and the problems of its tunnels, until ctx ends. info is too frequent for a look at all
// links.
func (ms *machines) keepLinks(ctx context.Context) {
	keepLooking(ctx, func() {
		ms.mu.Lock()
		overlays := ms.networks.overlays()
		ms.mu.Unlock()
		mtus, errLinks := network.LinkMTUs()
		problems, errTunnels := ms.networks.tunnelProblems(overlays)
		ms.mu.Lock()
		defer ms.mu.Unlock()
		changed := false
		if errLinks == nil && !maps.Equal(mtus, ms.linkMTUs) {
			ms.linkMTUs, changed = mtus, true
		}
		if errTunnels == nil && !slices.Equal(problems, ms.tunnelProblems) {
			level := slog.LevelWarn
			if len(problems) == 0 {
				level = slog.LevelInfo
			}
			ms.log.Log(ctx, level, "The tunnels of networks to other hosts changed", "problems", problems, "before", ms.tunnelProblems)
			ms.tunnelProblems, changed = problems, true
		}
		if changed {
			ms.broadcaster.Publish(events.Host(ms.info()))
		}
	})
}

// info describes the host; mu is held. It reads the assets at each call, so a new Kubernetes version needs no restart.
func (ms *machines) info() *hostpb.HostInfo {
	info := &hostpb.HostInfo{
		Id: ms.id, Hostname: ms.config.Name, Architecture: runtime.GOARCH, OperatingSystem: "linux",
		Cpus: int32(runtime.NumCPU()), MemoryBytes: ms.capacity,
		Machines:           int32(len(ms.byID)),
		KubernetesVersions: ms.installed(),
		Driver:             Driver, CgroupVersion: int32(cgroup.Version()), CapstandVersion: version.Version,
		ProtocolVersion: hostpb.ProtocolVersion, MinimumManagerVersion: hostpb.MinimumManagerVersion, Fencing: fencingOf(ms.fence.Settings()),
		BoxId: ms.boxID, DiskBackend: ms.diskBackend, LocalVolumeSizes: ms.localVolumeSizes, KernelVersion: kernelVersion(), OsImage: osImage("/"),
	}
	info.Images, info.MachineImages = ms.imageInfo()
	info.ContainerArchives = ms.containerArchives
	info.HostMounts, info.Devices = true, ms.deviceKinds()
	info.HostPorts, info.Lans, info.Vlans, info.Ipv6Lans = true, true, true, network.HasIPv6()
	if ms.config.Reboot != nil {
		info.BootId, info.BootedAt, info.UptimeMilliseconds = proc.BootID(), bootedAt(), boottime.Now().Milliseconds()
	}
	info.LinkMtus, info.TunnelProblems = ms.linkMTUs, ms.tunnelProblems
	if ms.box.Link != nil {
		info.OverlayPublicKey = ms.box.Link.Public.String()
	}
	info.TunnelAddress = admission.TunnelAddress(maps.Values(ms.networks.byID))
	info.DiskBytes, _, _ = machinedisk.Space(ms.config.Root) // 0 is unknown
	info.Volumes, info.VolumeBytes = ms.diskBackend == diskImage, ms.volumeBytes()
	info.AllocatedDiskBytes = info.VolumeBytes
	for _, m := range ms.byID {
		info.AllocatedMemoryBytes += m.reservedMemory()
		info.AllocatedDiskBytes += admission.DiskBytes(m.current.Load())
	}
	return info
}

// kernelVersion is the release of the running kernel, or empty.
func kernelVersion() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// osImage is PRETTY_NAME of os-release(5), or empty. Its value may be quoted.
func osImage(root string) string {
	for _, file := range []string{"etc/os-release", "usr/lib/os-release"} {
		data, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(data)) {
			if name, found := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); found {
				return strings.Trim(name, `"'`)
			}
		}
	}
	return ""
}

package host

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/blang/semver/v4"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machinedisk"
)

// Driver that makes machines.
const Driver = "runc"

// Version of capstand, stamped by the build.
var Version = "v0.0.0-dev"

var memTotal = regexp.MustCompile(`(?m)^MemTotal:\s+(\d+) kB$`)

// hostMemory reads the host's memory, in bytes.
func hostMemory() (int64, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	found := memTotal.FindSubmatch(data)
	if found == nil {
		return 0, fmt.Errorf("expected a MemTotal line in /proc/meminfo, found none")
	}
	kb, err := strconv.ParseInt(string(found[1]), 10, 64)
	return kb << 10, err
}

// kubernetesVersions lists the versions that the assets hold, oldest first.
func kubernetesVersions(assets string) ([]string, error) {
	dir := filepath.Join(assets, "kubernetes")
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var versions []string
	for _, entry := range entries {
		if _, err := semver.Parse(strings.TrimPrefix(entry.Name(), "v")); err == nil && atomicfile.Exists(filepath.Join(dir, entry.Name(), "kubelet")) {
			versions = append(versions, entry.Name())
		}
	}
	slices.SortFunc(versions, func(a, b string) int {
		return semver.MustParse(a[1:]).Compare(semver.MustParse(b[1:]))
	})
	return versions, nil
}

// installed returns the versions of Kubernetes, those of the last time if the assets cannot be read: a capstand that has no free
// descriptor must not report a host without versions. mu is held.
func (ms *machines) installed() []string {
	versions, err := kubernetesVersions(ms.config.Assets)
	if err != nil {
		ms.log.Error("The versions of Kubernetes cannot be listed", "error", err)
		return ms.versions
	}
	ms.versions = versions
	return versions
}

// boxID identifies the box, so that hosts on one box report the same value. It is a hash of machine-id(5), which must not be
// published, or else of the kernel's boot id. It is empty if neither can be read.
func boxID(root string) string {
	for _, file := range []string{"etc/machine-id", "proc/sys/kernel/random/boot_id"} {
		if id, err := os.ReadFile(filepath.Join(root, file)); err == nil && len(bytes.TrimSpace(id)) >= 32 {
			mac := hmac.New(sha256.New, bytes.TrimSpace(id))
			mac.Write([]byte("capstan box"))
			return hex.EncodeToString(mac.Sum(nil)[:16])
		}
	}
	return ""
}

// info describes the host; mu is held. It reads the assets at each call, so a new Kubernetes version needs no restart.
func (ms *machines) info() *hostpb.HostInfo {
	info := &hostpb.HostInfo{
		Id: ms.id, Hostname: ms.config.Name, Architecture: runtime.GOARCH, OperatingSystem: "linux",
		Cpus: int32(runtime.NumCPU()), MemoryBytes: ms.capacity,
		Machines:           int32(len(ms.byID)),
		KubernetesVersions: ms.installed(), Images: []string{admission.HostImage},
		Driver: Driver, CgroupVersion: int32(cgroup.Version()), CapstandVersion: Version,
		BoxId: ms.boxID, DiskBackend: ms.diskBackend,
	}
	info.DiskBytes, _, _ = machinedisk.Space(ms.config.Root) // 0 is unknown
	for _, m := range ms.byID {
		info.AllocatedMemoryBytes += m.spec.MemoryBytes
		info.AllocatedDiskBytes += admission.DiskBytes(m.spec)
	}
	return info
}

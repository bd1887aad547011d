package capstanhost

import (
	"context"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/shorten"
)

// setStatus copies the report of a host about itself.
func setStatus(s *infrav1.CapstanHostStatus, info *hostpb.HostInfo) {
	cpu := *resource.NewQuantity(int64(info.GetCpus()), resource.DecimalSI)
	s.Capacity = corev1.ResourceList{
		corev1.ResourceCPU:    cpu,
		corev1.ResourceMemory: *resource.NewQuantity(info.GetMemoryBytes(), resource.BinarySI),
	}
	s.Allocatable = corev1.ResourceList{
		corev1.ResourceCPU:    cpu,
		corev1.ResourceMemory: *resource.NewQuantity(max(0, info.GetMemoryBytes()-info.GetAllocatedMemoryBytes()), resource.BinarySI),
	}
	if disk := info.GetDiskBytes(); disk > 0 {
		s.Capacity[corev1.ResourceEphemeralStorage] = *resource.NewQuantity(disk, resource.BinarySI)
		s.Allocatable[corev1.ResourceEphemeralStorage] = *resource.NewQuantity(max(0, disk-info.GetAllocatedDiskBytes()), resource.BinarySI)
	}
	setDevices(s, info)
	s.DiskBackend = known(infrav1.DiskBackend(info.GetDiskBackend()), infrav1.DiskBackendImage, infrav1.DiskBackendNone)
	s.LocalVolumeSizes = known(infrav1.LocalVolumeSizes(info.GetLocalVolumeSizes()), infrav1.LocalVolumeSizesEnforced, infrav1.LocalVolumeSizesNotEnforced)
	s.Machines = ptr.To(max(0, info.GetMachines()))
	s.Versions, s.Images = versions(info), images(info)
	s.ContainerImages = containerImages(info)
	s.NodeInfo = infrav1.NodeInfo{Architecture: shorten.To(info.GetArchitecture(), maxWord), OperatingSystem: shorten.To(info.GetOperatingSystem(), maxWord)}
	s.System = infrav1.HostSystem{
		CapstandVersion: limited(info.GetCapstandVersion()), KernelVersion: limited(info.GetKernelVersion()), OSImage: limited(info.GetOsImage()),
	}
	if v := info.GetCgroupVersion(); v == 1 || v == 2 {
		s.System.CgroupVersion = ptr.To(v)
	}
	s.BoxID = shorten.To(info.GetBoxId(), maxWord)
	s.TunnelAddress = tunnelAddress(info)
}

// Limits of the API.
const (
	maxVersions = 100
	maxWord     = 64
)

// known returns a value that the API knows. A newer capstand can report another one, which is left out.
func known[T comparable](value T, all ...T) (none T) {
	if slices.Contains(all, value) {
		return value
	}
	return none
}

// versions returns the Kubernetes versions of a host that the API accepts.
func versions(info *hostpb.HostInfo) (out []string) {
	for _, v := range info.GetKubernetesVersions() {
		if v != "" && len(v) <= maxWord && len(out) < maxVersions {
			out = append(out, v)
		}
	}
	return out
}

// wireGuardKey matches the keys that the API accepts.
var wireGuardKey = regexp.MustCompile(`^[A-Za-z0-9+/]{43}=$`)

// overlayKey returns the WireGuard key that a host reports, or "".
func overlayKey(info *hostpb.HostInfo) string {
	if key := info.GetOverlayPublicKey(); wireGuardKey.MatchString(key) {
		return key
	}
	return ""
}

// setOverlayKey copies the WireGuard key that a host reports, unless another host has it.
func (r *Reconciler) setOverlayKey(ctx context.Context, host *infrav1.CapstanHost, reported string) error {
	if reported == host.Status.OverlayPublicKey {
		return nil
	}
	list := &infrav1.CapstanHostList{}
	if err := r.Client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	host.Status.OverlayPublicKey = hostselection.KeyOwnersOf(list.Items).Admit(host, reported)
	if host.Status.OverlayPublicKey != reported {
		ctrl.LoggerFrom(ctx).Info("Ignored the WireGuard key that the host reports: a CapstanHost with another tunnel address has it", "key", limited(reported))
	}
	return nil
}

// tunnelAddress returns the tunnel address that a host reports in the notation of spec, with which it is compared, or "".
func tunnelAddress(info *hostpb.HostInfo) string {
	address, err := netip.ParseAddr(info.GetTunnelAddress())
	if err != nil || address.Zone() != "" {
		return ""
	}
	return address.String()
}

// maxImages and maxDigest are limits of the API.
const (
	maxImages = 64
	maxDigest = 71
)

// images returns the images of a host that the API accepts.
func images(info *hostpb.HostInfo) (out []infrav1.HostImage) {
	names := map[string]bool{}
	for _, i := range info.GetMachineImages() {
		name := i.GetName()
		if len(out) == maxImages || names[name] || len(validation.IsDNS1123Subdomain(strings.ReplaceAll(name, "_", "-"))) > 0 || len(name) > validation.DNS1123LabelMaxLength || len(i.GetDigest()) > maxDigest {
			continue
		}
		names[name] = true
		out = append(out, infrav1.HostImage{Name: name, Digest: i.GetDigest(), Problem: limited(i.GetProblem())})
	}
	return out
}

// Limits of the API, and of the names of container images in one status: etcd stores at most 60 KB of a host that reports nonsense.
const (
	maxArchives     = 64
	maxArchiveName  = 255
	maxArchiveNames = 16
	maxImageNames   = 64
	maxImageName    = 256
)

// printable matches names of archives and images: administrators read them on terminals.
var printable = regexp.MustCompile(`^[[:graph:]]+$`)

// containerImages returns the archives of a host that the API accepts.
func containerImages(info *hostpb.HostInfo) (out []infrav1.HostContainerImages) {
	seen, left := map[string]bool{}, maxImageNames
	for _, a := range info.GetContainerArchives() {
		name := a.GetName()
		if len(out) == maxArchives {
			break
		}
		if seen[name] || len(name) > maxArchiveName || !printable.MatchString(name) {
			continue
		}
		seen[name] = true
		archive := infrav1.HostContainerImages{Archive: name, Problem: limited(a.GetProblem())}
		for _, image := range a.GetImages() {
			if len(archive.Names) < min(maxArchiveNames, left) && len(image) <= maxImageName && printable.MatchString(image) {
				archive.Names = append(archive.Names, image)
			}
		}
		left -= len(archive.Names)
		out = append(out, archive)
	}
	return out
}

// limited shortens a text of a host to the longest that the API accepts: one field must not refuse the whole status.
func limited(text string) string { return shorten.To(text, 256) }

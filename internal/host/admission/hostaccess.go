package admission

import (
	"fmt"
	"regexp"
	"slices"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// maxHostMounts and maxDevices are limits of the API.
const (
	maxHostMounts = 16
	maxDevices    = 16
	maxCount      = 64
	maxPath       = 256
)

var (
	pathForm = regexp.MustCompile(`^(/[A-Za-z0-9._+@=:-]+)+$`)
	dotted   = regexp.MustCompile(`/[.]{1,2}(/|$)`)
	// systemPath matches folders of a host that no machine can mount: they contain the system, capstand's state or that of a
	// Kubernetes node. capstand also refuses its own state folder, wherever it is.
	systemPath = regexp.MustCompile(`^(/(bin|boot|dev|etc|lib|lib32|lib64|libx32|proc|root|run|sbin|sys|usr|var/run|var/lib/(capstan|containerd|etcd|kubelet))(/.*)?|/var(/lib)?)$`)
	// freePath matches the places in a machine that belong to neither the system nor Capstan.
	freePath     = regexp.MustCompile(`^/(data|home|media|mnt|opt|srv)/`)
	capstanPath  = regexp.MustCompile(`^/opt/(capstan|cni)(/|$)`)
	deviceForm   = regexp.MustCompile(`^/dev(/[A-Za-z0-9._:+-]+)+$`)
	noDevicePath = regexp.MustCompile(`^/dev/(fd|mqueue|pts|shm)(/|$)`)
	kindForm     = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$`)
)

// checkHostAccess returns an error for mounts and devices that no host gives to a machine.
func checkHostAccess(s *hostpb.MachineSpec) error {
	if len(s.HostMounts) > maxHostMounts || len(s.Devices) > maxDevices {
		return fmt.Errorf("it requests %d mounts and %d devices of the host: expected at most %d and %d", len(s.HostMounts), len(s.Devices), maxHostMounts, maxDevices)
	}
	for i, m := range s.HostMounts {
		if err := checkHostMount(m); err != nil {
			return err
		}
		for _, v := range s.Volumes {
			if overlapping(m.Path, v.Path) {
				return fmt.Errorf("the mount at %s and the volume at %s overlap: expected different paths, none below another", m.Path, v.Path)
			}
		}
		for _, other := range s.HostMounts[:i] {
			if overlapping(m.Path, other.Path) {
				return fmt.Errorf("the mounts at %s and %s overlap: expected different paths, none below another", other.Path, m.Path)
			}
		}
	}
	for i, d := range s.Devices {
		if err := checkDevice(d); err != nil {
			return err
		}
		if slices.ContainsFunc(s.Devices[:i], func(other *hostpb.MachineDevice) bool { return other.Name == d.Name }) {
			return fmt.Errorf("it requests the device %s twice: expected one entry with a count", d.Name)
		}
	}
	return nil
}

func checkHostMount(m *hostpb.HostMount) error {
	for what, path := range map[string]string{"source": m.Source, "path": m.Path} {
		if len(path) > maxPath || !pathForm.MatchString(path) || dotted.MatchString(path) {
			return fmt.Errorf("the %s %q of a mount is not valid: expected an absolute path without . and .. of at most %d letters, digits and the characters ._+@=:-", what, path, maxPath)
		}
	}
	if systemPath.MatchString(m.Source) {
		return fmt.Errorf("the source %s of a mount belongs to the host's system or to Capstan: expected a folder of its own, for example /srv/models", m.Source)
	}
	if !freePath.MatchString(m.Path) || capstanPath.MatchString(m.Path) {
		return fmt.Errorf("the path %s of a mount is not valid: expected one below /data, /home, /media, /mnt, /opt or /srv, and not in /opt/capstan or /opt/cni", m.Path)
	}
	return nil
}

func checkDevice(d *hostpb.MachineDevice) error {
	switch {
	case d.IsNode() && (len(d.Name) > maxPath || !deviceForm.MatchString(d.Name) || dotted.MatchString(d.Name) || noDevicePath.MatchString(d.Name)):
		return fmt.Errorf("the device %q is not valid: expected the path of a device node below /dev, for example /dev/kvm", d.Name)
	case !d.IsNode() && (len(d.Name) > maxPath || !kindForm.MatchString(d.Name)):
		return fmt.Errorf("the device %q is not valid: expected a device node such as /dev/kvm, or a CDI kind such as nvidia.com/gpu", d.Name)
	case d.Count < 1 || d.Count > maxCount || d.IsNode() && d.Count != 1:
		return fmt.Errorf("it requests %d devices %s: expected 1 device node, or 1 to %d CDI devices", d.Count, d.Name, maxCount)
	}
	return nil
}

// hasDevices refuses a machine for which the host has too few free CDI devices (NOT_PROVIDED). Device nodes are checked by capstand.
func hasDevices(s *hostpb.MachineSpec, info *hostpb.HostInfo) error {
	for _, d := range s.Devices {
		if d.IsNode() {
			continue
		}
		count, free := int32(0), int32(0)
		for _, k := range info.Devices {
			if k.Name == d.Name {
				count, free = k.Count, k.Count-k.Allocated
			}
		}
		if free < d.Count {
			return refusal.Errorf(hostpb.Refusal_NOT_PROVIDED, "machine %s/%s requests %d devices %s, %d of %d are free on this host; delete machines that have them, or add a host with more",
				s.Namespace, s.Name, d.Count, d.Name, max(0, free), count)
		}
	}
	return nil
}

package admission

import (
	"iter"
	"path"
	"regexp"
	"strings"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machinedisk"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/machineapi"
)

// maxMounts is the largest number of volumes of a machine.
const maxMounts = 8

// mountForm is the form of the path of a volume in a machine. No component starts with a dot, so the path is clean.
var mountForm = regexp.MustCompile(`^/(srv|mnt|data|opt|var/lib)(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$`)

// reservedPaths contain the folders that a machine must have of its own. The API has the same list.
var reservedPaths = []string{
	machineapi.AssetsFolder, "/opt/cni", "/var/lib/capstan", "/var/lib/cni", "/var/lib/containerd", "/var/lib/etcd", "/var/lib/kubelet",
}

// CheckVolume refuses a volume that is invalid on every host (INVALID).
func CheckVolume(v *hostpb.Volume) error {
	if err := CheckID("volume", v.GetId()); err != nil {
		return err
	}
	if v.SizeBytes < machinedisk.MinBytes {
		return invalid("volume %s/%s has a size of %d bytes: expected at least %d", v.Namespace, v.Name, v.SizeBytes, machinedisk.MinBytes)
	}
	return owner.Given("volume", v.Id, v)
}

// checkMounts refuses mounts that are invalid on every host (INVALID).
func checkMounts(s *hostpb.MachineSpec) error {
	if len(s.Volumes) > maxMounts {
		return invalid("machine %s/%s requests %d volumes: expected at most %d", s.Namespace, s.Name, len(s.Volumes), maxMounts)
	}
	for i, m := range s.Volumes {
		if err := CheckID("volume", m.GetId()); err != nil {
			return err
		}
		if !mountForm.MatchString(m.Path) || path.Clean(m.Path) != m.Path {
			return invalid("machine %s/%s: volume %s has the path %q: expected a clean path below /srv, /mnt, /data, /opt or /var/lib", s.Namespace, s.Name, m.Id, m.Path)
		}
		for _, reserved := range reservedPaths {
			if overlapping(m.Path, reserved) {
				return invalid("machine %s/%s: volume %s has the path %s, and %s belongs to the machine itself", s.Namespace, s.Name, m.Id, m.Path, reserved)
			}
		}
		for _, other := range s.Volumes[:i] {
			if other.Id == m.Id || overlapping(m.Path, other.Path) {
				return invalid("machine %s/%s: the volumes at %s and %s are the same, or one contains the other", s.Namespace, s.Name, other.Path, m.Path)
			}
		}
	}
	return nil
}

// overlapping reports whether one path is the other one or a folder above it.
func overlapping(a, b string) bool {
	return strings.HasPrefix(a+"/", b+"/") || strings.HasPrefix(b+"/", a+"/")
}

// Volume decides whether a host may make a volume that CheckVolume accepted, or already has it. have is the volume of that id, or nil.
// deleted is true if the host deleted a volume of that id within the last day. others are the volumes of the host.
func Volume(v, have *hostpb.Volume, info *hostpb.HostInfo, deleted bool, others iter.Seq[*hostpb.Volume]) error {
	if have != nil {
		return sameVolume(have, v)
	}
	if deleted {
		return refusal.Errorf(hostpb.Refusal_DELETED, "volume %s was deleted within the last day: create its CapstanVolume again with a new id", v.Id)
	}
	if !info.GetVolumes() {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "this host cannot have volumes: it needs e2fsprogs and loop devices")
	}
	for other := range others {
		if owner.Same(other, v) {
			return refusal.Errorf(hostpb.Refusal_NAME_IN_USE, "volume %s/%s is %s on this host, not %s: it belongs to another management cluster or to an earlier object of that name; delete it first",
				v.Namespace, v.Name, other.Id, v.Id)
		}
	}
	if free := info.GetDiskBytes() - info.GetVolumeBytes(); info.GetDiskBytes() > 0 && v.SizeBytes > free {
		return refusal.Errorf(hostpb.Refusal_NO_DISK_SPACE, "volume %s/%s needs %d MiB, the other volumes of this host leave %d MiB of its disk; choose a smaller size, or delete a CapstanVolume that nobody needs",
			v.Namespace, v.Name, v.SizeBytes>>20, free>>20)
	}
	return nil
}

// VolumeBytes returns the sizes of volumes together.
func VolumeBytes(volumes iter.Seq[*hostpb.Volume]) (sum int64) {
	for v := range volumes {
		sum += v.GetSizeBytes()
	}
	return sum
}

// sameVolume accepts the volume that the host has.
func sameVolume(have, want *hostpb.Volume) error {
	if err := owner.Ensure("volume", have.Id, have, want); err != nil {
		return err
	}
	if have.SizeBytes != want.SizeBytes {
		return refusal.Errorf(hostpb.Refusal_SPEC_CHANGED, "volume %s/%s (%s) has %d bytes, and a volume cannot change its size: found a request of %d",
			have.Namespace, have.Name, have.Id, have.SizeBytes, want.SizeBytes)
	}
	return nil
}

// VolumeSpace refuses a volume that leaves less free space on the host than it reserves, in bytes (NO_DISK_SPACE).
func VolumeSpace(v *hostpb.Volume, free, reserve int64) error {
	if free-v.SizeBytes < reserve {
		return refusal.Errorf(hostpb.Refusal_NO_DISK_SPACE, "volume %s/%s needs %d MiB, the host has %d MiB left and reserves %d MiB; free space on the host, or choose a smaller size",
			v.Namespace, v.Name, v.SizeBytes>>20, free>>20, reserve>>20)
	}
	return nil
}

// Mounts decides whether a new machine may have its volumes: they exist on the host (NOT_FOUND), belong to the namespace of the
// machine (NOT_OWNER), and no other machine has them (VOLUME_IN_USE). volume returns the volume of an id, or nil.
func Mounts(spec *hostpb.MachineSpec, volume func(id string) *hostpb.Volume, machines iter.Seq[*hostpb.MachineSpec]) error {
	for _, m := range spec.Volumes {
		v := volume(m.Id)
		if v == nil {
			return refusal.Errorf(hostpb.Refusal_NOT_FOUND, "machine %s/%s: no volume %q on this host, so its data is lost; delete its CapstanVolume and the Machine to start with an empty volume",
				spec.Namespace, spec.Name, m.Id)
		}
		if v.Namespace != spec.Namespace {
			return refusal.Errorf(hostpb.Refusal_NOT_OWNER, "volume %s belongs to namespace %s on this host, and machine %s/%s cannot have it",
				m.Id, v.Namespace, spec.Namespace, spec.Name)
		}
		if err := UnusedVolume(m.Id, machines); err != nil {
			return err
		}
	}
	return nil
}

// UnusedVolume refuses a volume that a machine has (VOLUME_IN_USE). A machine has its volumes until nothing of it is left.
func UnusedVolume(id string, machines iter.Seq[*hostpb.MachineSpec]) error {
	for other := range machines {
		for _, m := range other.GetVolumes() {
			if m.Id == id {
				return refusal.Errorf(hostpb.Refusal_VOLUME_IN_USE, "volume %s is in use by machine %s/%s; delete that machine first", id, other.Namespace, other.Name)
			}
		}
	}
	return nil
}

// NoVolume is the refusal of a volume whose file is gone (DAMAGED).
func NoVolume(v *hostpb.Volume, file string) error {
	return refusal.Errorf(hostpb.Refusal_DAMAGED, "the data of volume %s/%s is lost: %s does not exist; delete its CapstanVolume and the Machine to start with an empty volume",
		v.Namespace, v.Name, file)
}

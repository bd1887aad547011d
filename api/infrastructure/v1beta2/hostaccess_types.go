package v1beta2

import "strings"

// AllowedMount is a folder or file of a host that machines of some namespaces can mount.
type AllowedMount struct {
	// path is a folder or file of the host. Machines can mount it, and everything below it. It is an absolute path without
	// symbolic links. Not allowed, with everything below them: /bin, /boot, /dev, /etc, /lib, /lib32, /lib64, /libx32, /proc, /root, /run,
	// /sbin, /sys, /usr, /var/lib/capstan, /var/lib/containerd, /var/lib/etcd, /var/lib/kubelet, /var/run. Not allowed themselves: /, /var,
	// /var/lib; other folders below /var are allowed.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.matches('^(/[A-Za-z0-9._+@=:-]+)+$') && !self.matches('/[.]{1,2}(/|$)')",message="path must be an absolute path of letters, digits and ._+@=:- without . and .. and without a slash at its end, for example /srv/models"
	// +kubebuilder:validation:XValidation:rule="!self.matches('^(/(bin|boot|dev|etc|lib|lib32|lib64|libx32|proc|root|run|sbin|sys|usr|var/run|var/lib/(capstan|containerd|etcd|kubelet))(/.*)?|/var(/lib)?)$')",message="path must not be a folder of the host's system or of Capstan: use a folder of its own, for example /srv/models"
	Path string `json:"path,omitempty"`

	// readOnly allows only mounts that are read-only. A cluster-admin of a workload cluster has root access to the host and can
	// write nevertheless: see docs/security.md. Default: true.
	// +optional
	ReadOnly *bool `json:"readOnly,omitempty"`

	// allowedNamespaces selects the namespaces whose machines can mount the path. It has to be set: a host that admits the machines
	// of a namespace does not thereby give its files to it.
	// +required
	AllowedNamespaces AllowedNamespaces `json:"allowedNamespaces,omitempty,omitzero"`
}

// AllowedDevice is a device of a host that machines of some namespaces can have.
type AllowedDevice struct {
	// name is the path of a device node of the host, for example /dev/kvm, or a kind of CDI devices, for example nvidia.com/gpu.
	// +required
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:XValidation:rule="self.startsWith('/') ? self.matches('^/dev(/[A-Za-z0-9._:+-]+)+$') && !self.matches('/[.]{1,2}(/|$)') && !self.matches('^/dev/(fd|mqueue|pts|shm)(/|$)') : self.matches('^[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$')",message="name must be the path of a device node below /dev, for example /dev/kvm, or a CDI kind, for example nvidia.com/gpu"
	Name string `json:"name,omitempty"`

	// allowedNamespaces selects the namespaces whose machines can have the device. It has to be set.
	// +required
	AllowedNamespaces AllowedNamespaces `json:"allowedNamespaces,omitempty,omitzero"`
}

// HostMount is a folder or file of the host in a machine.
type HostMount struct {
	// source is the folder or file of the host: a path of spec.allowedMounts of the CapstanHost, or a path below one. It must exist
	// and have no symbolic links. File systems that are mounted below it are not part of it.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.matches('^(/[A-Za-z0-9._+@=:-]+)+$') && !self.matches('/[.]{1,2}(/|$)')",message="source must be an absolute path of letters, digits and ._+@=:- without . and .. and without a slash at its end, for example /srv/models"
	Source string `json:"source,omitempty"`

	// path is the place in the machine: below /data, /home, /media, /mnt, /opt or /srv, and not in /opt/capstan or /opt/cni. Pods
	// reach it as a volume of the type hostPath.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.matches('^/(data|home|media|mnt|opt|srv)(/[A-Za-z0-9._+@=:-]+)+$') && !self.matches('/[.]{1,2}(/|$)') && !self.matches('^/opt/(capstan|cni)(/|$)')",message="path must be below /data, /home, /media, /mnt, /opt or /srv, and not in /opt/capstan or /opt/cni, for example /mnt/models"
	Path string `json:"path,omitempty"`

	// readOnly mounts the path read-only. Set it to false for a writable mount, if the host allows that. Default: true.
	// +optional
	ReadOnly *bool `json:"readOnly,omitempty"`
}

// MachineDevice is a device of the host in a machine.
type MachineDevice struct {
	// name is the path of a device node, for example /dev/kvm, or a kind of CDI devices, for example nvidia.com/gpu. The host has to
	// allow it in spec.allowedDevices.
	// +required
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:XValidation:rule="self.startsWith('/') ? self.matches('^/dev(/[A-Za-z0-9._:+-]+)+$') && !self.matches('/[.]{1,2}(/|$)') && !self.matches('^/dev/(fd|mqueue|pts|shm)(/|$)') : self.matches('^[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$')",message="name must be the path of a device node below /dev, for example /dev/kvm, or a CDI kind, for example nvidia.com/gpu"
	Name string `json:"name,omitempty"`

	// count is the number of CDI devices. No other machine has them. Default: 1. A device node has no count, because machines share it.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	Count int32 `json:"count,omitempty"`
}

// IsNode reports whether the device is a device node of the host, and not a kind of CDI devices.
func (d MachineDevice) IsNode() bool { return strings.HasPrefix(d.Name, "/") }

// Number is the number of these devices that a machine has.
func (d MachineDevice) Number() int32 { return max(1, d.Count) }

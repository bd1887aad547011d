package placement

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/selection"
)

// Permissions are the mounts, devices and LANs that a host allows for a namespace.
type Permissions struct {
	Mounts []infrav1.AllowedMount
	// Devices are device nodes and kinds of CDI devices.
	Devices []string
	LANs    []infrav1.LANNetwork
	// Virtual are the networks with the endpoints of clusters in the LAN, which no machine can have.
	Virtual []string
}

// Permitted returns the mounts and devices that a host allows for a namespace. An invalid selector allows nothing.
func Permitted(h *infrav1.CapstanHost, namespace string, namespaceLabels map[string]string) (out Permissions) {
	allows := func(a infrav1.AllowedNamespaces) bool {
		return selection.Namespace(a.Names, a.Selector, namespace, namespaceLabels)
	}
	for _, m := range h.Spec.AllowedMounts {
		if allows(m.AllowedNamespaces) {
			out.Mounts = append(out.Mounts, m)
		}
	}
	for _, d := range h.Spec.AllowedDevices {
		if allows(d.AllowedNamespaces) {
			out.Devices = append(out.Devices, d.Name)
		}
	}
	for _, n := range h.Spec.LANNetworks {
		if allows(n.AllowedNamespaces) {
			out.LANs = append(out.LANs, n)
		}
	}
	return out
}

// Refusal returns the first mount or device of a machine that the host does not allow for its namespace, with the remedy, or "". It
// names no other permission of the host, because these may belong to other tenants.
func (p Permissions) Refusal(namespace string, mounts []infrav1.HostMount, devices []infrav1.MachineDevice) string {
	for _, m := range mounts {
		allowed, writable := p.mount(m.Source)
		switch {
		case !allowed:
			return fmt.Sprintf("does not allow namespace %s to mount %s: its administrator has to allow it in spec.allowedMounts", namespace, m.Source)
		case !writable && !ptr.Deref(m.ReadOnly, true):
			return fmt.Sprintf("allows namespace %s to mount %s read-only, and the machine requests a writable mount: remove readOnly: false of the mount, or set readOnly: false in spec.allowedMounts of the CapstanHost", namespace, m.Source)
		}
	}
	for _, d := range devices {
		if !slices.Contains(p.Devices, d.Name) {
			return fmt.Sprintf("does not allow namespace %s to have the device %s: its administrator has to allow it in spec.allowedDevices", namespace, d.Name)
		}
	}
	return ""
}

// mount returns whether a source can be mounted, and whether it can be writable.
func (p Permissions) mount(source string) (allowed, writable bool) {
	for _, m := range p.Mounts {
		if source == m.Path || strings.HasPrefix(source, m.Path+"/") {
			allowed, writable = true, writable || !ptr.Deref(m.ReadOnly, true)
		}
	}
	return allowed, writable
}

// accessRefusal returns why a host cannot give a machine its mounts and devices, or "".
func accessRefusal(h *Host, req Request) string {
	if len(req.Mounts)+len(req.Devices) == 0 {
		return ""
	}
	if why := h.Permissions.Refusal(req.Namespace, req.Mounts, req.Devices); why != "" {
		return why
	}
	if !h.HostAccess {
		return "cannot give mounts and devices to machines: upgrade its capstand"
	}
	for _, d := range req.Devices {
		if count := d.Number(); !d.IsNode() && h.FreeDevices[d.Name] < count {
			return fmt.Sprintf("has %d free devices %s, %d are needed", max(0, h.FreeDevices[d.Name]), d.Name, count)
		}
	}
	return ""
}

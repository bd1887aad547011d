package machine

import (
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// hostMounts are the mounts of the host in a machine.
func hostMounts(m *infrav1.CapstanMachine) (out []*hostpb.HostMount) {
	for _, h := range m.Spec.HostMounts {
		out = append(out, &hostpb.HostMount{Source: h.Source, Path: h.Path, ReadOnly: ptr.Deref(h.ReadOnly, true)})
	}
	return out
}

// machineDevices are the devices of the host in a machine.
func machineDevices(m *infrav1.CapstanMachine) (out []*hostpb.MachineDevice) {
	for _, d := range m.Spec.Devices {
		out = append(out, &hostpb.MachineDevice{Name: d.Name, Count: d.Number()})
	}
	return out
}

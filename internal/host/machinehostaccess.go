package host

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/devices"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostmount"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/machineapi"
)

// keepDevices reads the CDI specifications that drivers and administrators add, until ctx ends.
func (ms *machines) keepDevices(ctx context.Context) {
	var errs lastErrors
	keepLooking(ctx, func() {
		changed, err := ms.cdi.Scan()
		if errs.news("cdi", err) {
			ms.log.Error("Some CDI specifications cannot be read; the host reports the devices of the others", "error", err)
		}
		if changed {
			ms.announceDevices()
		}
	})
}

// announceDevices publishes the devices.
func (ms *machines) announceDevices() {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	ms.log.Info("The CDI devices of the host have changed", "devices", ms.deviceKinds())
	ms.broadcaster.Publish(events.Host(ms.info()))
}

// deviceKinds describes the CDI devices of the host, by name; mu is held.
func (ms *machines) deviceKinds() (out []*hostpb.DeviceKind) {
	kinds := ms.cdi.Kinds()
	if len(kinds) == 0 {
		return nil
	}
	used, lost := ms.usedDevices()
	for kind, names := range kinds {
		k := &hostpb.DeviceKind{Name: kind, Count: int32(len(names))}
		for _, name := range names {
			if lost[kind] || used[kind+"="+name] {
				k.Allocated++
			}
		}
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b *hostpb.DeviceKind) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// usedDevices returns the qualified names of the CDI devices of all machines, and the kinds of which machines with a damaged record
// have unknown devices; mu is held.
func (ms *machines) usedDevices() (used, lost map[string]bool) {
	used, lost = map[string]bool{}, map[string]bool{}
	for _, m := range ms.byID {
		m.mu.Lock()
		for _, name := range m.state.Devices {
			used[name] = true
		}
		if m.broken != "" {
			for _, d := range m.spec.GetDevices() {
				lost[d.Name] = true
			}
		}
		m.mu.Unlock()
	}
	return used, lost
}

// chooseDevices returns the CDI devices of a new machine; mu is held until they are recorded with it, so that no other machine gets
// them. They never change, so a machine has the same devices after a restart.
func (ms *machines) chooseDevices(spec *hostpb.MachineSpec) (out []string, err error) {
	used, _ := ms.usedDevices()
	for _, d := range spec.Devices {
		if d.IsNode() {
			continue
		}
		names := ms.cdi.Choose(d.Name, int(d.Count), used)
		if names == nil { // They disappeared after the admission.
			return nil, refusal.Errorf(hostpb.Refusal_NOT_PROVIDED, "machine %s/%s requests %d devices %s, this host has fewer", spec.Namespace, spec.Name, d.Count, d.Name)
		}
		out = append(out, names...)
	}
	return out, nil
}

// openHostMounts opens the sources of a machine's mounts, in their order. They stay open until the machine has them.
func openHostMounts(spec *hostpb.MachineSpec, config Config) ([]*os.File, error) {
	var files []*os.File
	for _, m := range spec.HostMounts {
		file, err := hostmount.Open(m.Source, config.Root, config.Backups, config.Images, config.ContainerImages, config.Assets, config.RunDir)
		if err != nil {
			return files, err
		}
		files = append(files, file)
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, file := range files {
		_ = file.Close() // It was opened without access to its content.
	}
}

func (m *machine) stagingDir() string { return m.host.store.path("mounts", m.spec.Id) }

// stageHostMounts mounts the sources of the machine's mounts where runc finds them. They are unstaged after the start, and after a
// crash of capstand by clear. A file system that hangs is an error: the opening of its files would hold the machine, also after its deletion.
func (m *machine) stageHostMounts(ctx context.Context) (out []runc.HostMount, err error) {
	if err := m.host.awaitHostFiles(ctx, m.spec); err != nil {
		return nil, err
	}
	files, err := openHostMounts(m.spec, m.host.config)
	defer func() { closeAll(files) }()
	if err != nil {
		return nil, err
	}
	for i, mount := range m.spec.HostMounts {
		at := filepath.Join(m.stagingDir(), strconv.Itoa(i))
		if err := hostmount.Stage(files[i], at); err != nil {
			return nil, err
		}
		out = append(out, runc.HostMount{Source: at, Path: mount.Path, ReadOnly: mount.ReadOnly})
	}
	return out, nil
}

// unstage removes the mounts of stageHostMounts. The machine keeps its mounts.
func (m *machine) unstage() {
	if err := hostmount.Unstage(m.stagingDir()); err != nil {
		m.log.Error("The mounts for the start of the machine were not removed; the next start or removal tries again", "error", err)
	}
}

// deviceNodes returns the device nodes of a machine, without those that it has anyway.
func deviceNodes(spec *hostpb.MachineSpec, have []oci.LinuxDevice) (out []oci.LinuxDevice, err error) {
	for _, d := range spec.Devices {
		if !d.IsNode() || slices.ContainsFunc(have, func(h oci.LinuxDevice) bool { return h.Path == d.Name }) {
			continue
		}
		node, nodeErr := devices.Node(d.Name)
		if nodeErr != nil {
			err = errors.Join(err, nodeErr)
			continue
		}
		out = append(out, node)
	}
	return out, err
}

// describeDevices writes CDI specifications for the container runtime of the machine, so that pods can have the CDI devices of the
// machine.
func (m *machine) describeDevices(system runc.System) error {
	specs, err := m.host.cdi.MachineSpecs(m.cdiDevices(), system.Root == "/")
	if err != nil || len(specs) == 0 {
		return err
	}
	dir := filepath.Join(m.runDir(), machineapi.CDIFolder)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for name, content := range specs {
		if err := atomicfile.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// cdiDevices returns the qualified names of the CDI devices of the machine.
func (m *machine) cdiDevices() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state.Devices
}

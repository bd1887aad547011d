package devices

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	cdispec "tags.cncf.io/container-device-interface/specs-go"
)

// MachineSpecs returns the CDI specifications with which the container runtime of a machine gives the devices of the machine to its
// containers, by file name. In the machine, device nodes and mounts have the paths of the specification of the host. hooks is
// whether the programs of hooks exist in the machine, as they do if it has the programs of the host. Devices that are not there any
// more are left out: Inject reports them.
func (c *CDI) MachineSpecs(qualified []string, hooks bool) (map[string][]byte, error) {
	if c == nil {
		return nil, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	byFile := map[string]*cdispec.Spec{}
	for _, name := range qualified {
		device := c.cache.GetDevice(name)
		if device == nil {
			continue
		}
		vendor, class, _ := parser.ParseDevice(name)
		file := vendor + "-" + class + ".json"
		if byFile[file] == nil {
			byFile[file] = &cdispec.Spec{Kind: vendor + "/" + class}
		}
		// Each device has the edits of its whole specification: devices of a kind can come from several specifications.
		edits := merged(device.GetSpec().ContainerEdits, device.ContainerEdits)
		byFile[file].Devices = append(byFile[file].Devices, cdispec.Device{Name: device.Name, ContainerEdits: inMachine(edits, hooks)})
	}
	out := map[string][]byte{}
	for file, spec := range byFile {
		version, err := cdi.MinimumRequiredVersion(spec)
		if err != nil {
			return nil, fmt.Errorf("the CDI specification of %s for the machine: %w", spec.Kind, err)
		}
		spec.Version = version
		if out[file], err = json.MarshalIndent(spec, "", "  "); err != nil {
			return nil, fmt.Errorf("the CDI specification of %s for the machine: %w", spec.Kind, err)
		}
	}
	return out, nil
}

// merged has all edits, except for network interfaces, which are in the machine already, and cache classes, which belong to the host.
func merged(a, b cdispec.ContainerEdits) cdispec.ContainerEdits {
	return cdispec.ContainerEdits{
		Env:            slices.Concat(a.Env, b.Env),
		DeviceNodes:    slices.Concat(a.DeviceNodes, b.DeviceNodes),
		Hooks:          slices.Concat(a.Hooks, b.Hooks),
		Mounts:         slices.Concat(a.Mounts, b.Mounts),
		AdditionalGIDs: slices.Concat(a.AdditionalGIDs, b.AdditionalGIDs),
	}
}

// inMachine returns the edits of a container in a machine to which the same edits have been made.
func inMachine(edits cdispec.ContainerEdits, hooks bool) cdispec.ContainerEdits {
	out := edits
	out.DeviceNodes, out.Mounts = nil, nil
	for _, node := range edits.DeviceNodes {
		copied := *node
		copied.HostPath = ""
		out.DeviceNodes = append(out.DeviceNodes, &copied)
	}
	for _, mount := range edits.Mounts {
		copied := *mount
		if strings.HasPrefix(copied.HostPath, "/") { // Another source is that of a file system without a path, for example tmpfs.
			copied.HostPath = copied.ContainerPath
		}
		out.Mounts = append(out.Mounts, &copied)
	}
	if !hooks {
		out.Hooks = nil
	}
	return out
}

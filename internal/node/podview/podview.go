// Package podview shows the size of the machine in /proc of its pods. It adds mounts to the specification of a container
// before runc reads it.
//
// Layer: node. Allowed imports: api, library, contract.
package podview

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"syscall"
)

// Files are the files of /proc over which capstand can bind a view of the machine. runc allows mounts over them.
var Files = []string{"/proc/meminfo", "/proc/cpuinfo"}

// visibleProc is a second mount of proc in privileged containers. The kernel lets a user namespace mount proc only if a mount without
// other mounts on it exists. Container runtimes copy the devices of /dev, except for this folder.
const visibleProc = "/dev/.lxc/proc"

const procMagic = 0x9fa0

// Views returns the files that are views on this machine. Without a view, a file is the kernel's.
func Views() []string {
	return slices.DeleteFunc(slices.Clone(Files), func(path string) bool {
		var stat syscall.Statfs_t
		return syscall.Statfs(path, &stat) != nil || stat.Type == procMagic
	})
}

// kind is the treatment of a container.
type kind int

const (
	// untouched containers keep the /proc of the kernel.
	untouched kind = iota
	// ordinary containers have masks over other files of /proc.
	ordinary
	// privileged containers have no masks.
	privileged
)

type mount struct {
	Destination string   `json:"destination"`
	Type        string   `json:"type"`
	Source      string   `json:"source"`
	Options     []string `json:"options"`
}

// spec has the fields of a specification that decide.
type spec struct {
	Annotations map[string]string `json:"annotations"`
	Mounts      []mount           `json:"mounts"`
	Linux       struct {
		MaskedPaths []string `json:"maskedPaths"`
		Resources   struct {
			Devices []struct {
				Allow  bool   `json:"allow"`
				Type   string `json:"type"`
				Access string `json:"access"`
			} `json:"devices"`
		} `json:"resources"`
	} `json:"linux"`
}

// kind decides about a container. The API promises a /proc "with no modifications" to "procMount: Unmasked". Such a container has no
// masks, and in contrast to a privileged one not all devices.
func (s spec) kind() kind {
	sandbox := s.Annotations["io.kubernetes.cri.container-type"] == "sandbox"
	switch proc := s.mountOn("/proc"); {
	case sandbox, proc == nil, proc.Type != "proc":
		return untouched
	case len(s.Linux.MaskedPaths) > 0:
		return ordinary
	}
	allDevices := false
	for _, rule := range s.Linux.Resources.Devices {
		allDevices = allDevices || rule.Allow && (rule.Type == "" || rule.Type == "a") && rule.Access == "rwm"
	}
	// A folder of the machine at /dev must not get the folder of visibleProc.
	if dev := s.mountOn("/dev"); allDevices && dev != nil && dev.Type == "tmpfs" {
		return privileged
	}
	return untouched
}

// mountOn returns the mount at a path, or nil.
func (s spec) mountOn(path string) *mount {
	if i := s.index(path); i >= 0 {
		return &s.Mounts[i]
	}
	return nil
}

func (s spec) index(path string) int {
	return slices.IndexFunc(s.Mounts, func(m mount) bool { return filepath.Clean(m.Destination) == path })
}

// mounts returns the additional mounts of a container. A mount of the user at the same path stays.
func (s spec) mounts(views []string) []mount {
	kind := s.kind()
	if kind == untouched {
		return nil
	}
	var all []mount
	for _, view := range views {
		if s.mountOn(view) == nil {
			all = append(all, mount{Destination: view, Type: "bind", Source: view, Options: []string{"bind", "private", "ro", "nosuid", "nodev", "noexec"}})
		}
	}
	if kind == privileged && len(all) > 0 {
		all = append(all, mount{Destination: visibleProc, Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}})
	}
	return all
}

// Add returns the specification of a container with the mounts of the views, and keeps all else.
func Add(data []byte, views []string) ([]byte, error) {
	var s spec
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, err
	}
	additional := s.mounts(views)
	if len(additional) == 0 {
		return data, nil
	}
	var whole map[string]json.RawMessage
	if err := json.Unmarshal(data, &whole); err != nil {
		return nil, err
	}
	var all []json.RawMessage
	if err := json.Unmarshal(whole["mounts"], &all); err != nil {
		return nil, err
	}
	// Later mounts of users, for example at a folder above, cover these.
	defaults := 1 + max(s.index("/proc"), s.index("/dev"))
	for i, m := range additional {
		raw, err := json.Marshal(m)
		if err != nil {
			return nil, err
		}
		all = slices.Insert(all, defaults+i, json.RawMessage(raw))
	}
	mounts, err := json.Marshal(all)
	if err != nil {
		return nil, err
	}
	whole["mounts"] = mounts
	return json.Marshal(whole)
}

package conformance

import (
	"context"

	"google.golang.org/grpc/codes"

	"capstan.dev/capstan/internal/host/hostpb"
)

// hostAccessCalls request mounts and devices that no host gives to a machine, and devices that the host does not have.
func hostAccessCalls(version string) (out []call) {
	ensure := func(change func(*hostpb.MachineSpec)) func(context.Context, hostpb.HostServer) error {
		s := machineSpec(version)
		s.Id, s.Name, s.Addresses[0].Address = "a-1", "access", "10.1.0.12"
		change(s)
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.EnsureMachine(ctx, &hostpb.EnsureMachineRequest{Spec: s})
			return err
		}
	}
	for name, m := range map[string][]*hostpb.HostMount{
		"relative source":        {{Source: "srv/a", Path: "/mnt/a"}},
		"source with ..":         {{Source: "/srv/../etc/x", Path: "/mnt/a"}},
		"source with a slash":    {{Source: "/srv/a/", Path: "/mnt/a"}},
		"root":                   {{Source: "/", Path: "/mnt/a"}},
		"/etc":                   {{Source: "/etc", Path: "/mnt/a"}},
		"below /proc":            {{Source: "/proc/1/root", Path: "/mnt/a"}},
		"device folder":          {{Source: "/dev/disk", Path: "/mnt/a"}},
		"socket of containerd":   {{Source: "/run/containerd", Path: "/mnt/a"}},
		"state of capstand":      {{Source: "/var/lib/capstan/host", Path: "/mnt/a"}},
		"folder above the state": {{Source: "/var/lib", Path: "/mnt/a"}},
		"over the system":        {{Source: "/srv/a", Path: "/usr/lib"}},
		"over Capstan":           {{Source: "/srv/a", Path: "/opt/capstan/node"}},
		"over all of /mnt":       {{Source: "/srv/a", Path: "/mnt"}},
		"path with ..":           {{Source: "/srv/a", Path: "/mnt/../etc"}},
		"two at one path":        {{Source: "/srv/a", Path: "/mnt/a"}, {Source: "/srv/b", Path: "/mnt/a"}},
		"one below another":      {{Source: "/srv/a", Path: "/mnt/a/b"}, {Source: "/srv/b", Path: "/mnt/a"}},
		"too many":               make([]*hostpb.HostMount, 17),
	} {
		out = append(out, call{"mount: " + name, ensure(func(s *hostpb.MachineSpec) { s.HostMounts = m }), invalid, codes.InvalidArgument})
	}
	out = append(out, call{"mount over a volume", ensure(func(s *hostpb.MachineSpec) {
		s.HostMounts = []*hostpb.HostMount{{Source: "/srv/a", Path: "/mnt/a/b"}}
		s.Volumes = []*hostpb.VolumeMount{{Id: "v-9", Path: "/mnt/a"}}
	}), invalid, codes.InvalidArgument})
	for name, d := range map[string][]*hostpb.MachineDevice{
		"outside of /dev":    {{Name: "/etc/passwd", Count: 1}},
		"with ..":            {{Name: "/dev/../etc/passwd", Count: 1}},
		"of a terminal":      {{Name: "/dev/pts/0", Count: 1}},
		"two nodes":          {{Name: "/dev/kvm", Count: 2}},
		"no count":           {{Name: "example.com/gpu"}},
		"kind without class": {{Name: "gpu", Count: 1}},
		"one device by name": {{Name: "example.com/gpu=0", Count: 1}},
		"one kind twice":     {{Name: "example.com/gpu", Count: 1}, {Name: "example.com/gpu", Count: 1}},
	} {
		out = append(out, call{"device: " + name, ensure(func(s *hostpb.MachineSpec) { s.Devices = d }), invalid, codes.InvalidArgument})
	}
	return append(out, call{"device that the host does not have", ensure(func(s *hostpb.MachineSpec) {
		s.Devices = []*hostpb.MachineDevice{{Name: "example.com/no-such-gpu", Count: 1}}
	}), hostpb.Refusal_NOT_PROVIDED, codes.FailedPrecondition})
}

package conformance

import (
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
)

// volumeCalls make the volume v-1, give it to the machine m-v, and delete both. The network of the machine m-1 exists.
func volumeCalls(version string) []call {
	return slices.Concat([]call{mountCalls(version)[0]}, newVolumeCalls(), mountCalls(version)[1:], oldVolumeCalls())
}

func ensureVolume(change func(*hostpb.Volume)) func(context.Context, hostpb.HostServer) error {
	v := &hostpb.Volume{Id: "v-1", Namespace: "default", Name: "data", SizeBytes: 16 << 20}
	change(v)
	return func(ctx context.Context, h hostpb.HostServer) error { _, err := h.EnsureVolume(ctx, v); return err }
}

func newVolumeCalls() []call {
	ensure := ensureVolume
	return []call{
		{"volume without an id", ensure(func(v *hostpb.Volume) { v.Id = "" }), invalid, codes.InvalidArgument},
		{"volume whose id is a path", ensure(func(v *hostpb.Volume) { v.Id = "../v" }), invalid, codes.InvalidArgument},
		{"volume without an owner", ensure(func(v *hostpb.Volume) { v.Namespace = "" }), invalid, codes.InvalidArgument},
		{"volume without a size", ensure(func(v *hostpb.Volume) { v.SizeBytes = 0 }), invalid, codes.InvalidArgument},
		{"volume", ensure(func(*hostpb.Volume) {}), success, codes.OK},
		{"volume again", ensure(func(*hostpb.Volume) {}), success, codes.OK},
		{"volume of another namespace", ensure(func(v *hostpb.Volume) { v.Namespace = "thief" }), hostpb.Refusal_ID_IN_USE, codes.AlreadyExists},
		{"volume of another size", ensure(func(v *hostpb.Volume) { v.SizeBytes *= 2 }), hostpb.Refusal_SPEC_CHANGED, codes.InvalidArgument},
		{"volume with the name of another", ensure(func(v *hostpb.Volume) { v.Id = "v-2" }), hostpb.Refusal_NAME_IN_USE, codes.AlreadyExists},
	}
}

func mountCalls(version string) []call {
	mounted := func(change func(*hostpb.MachineSpec)) func(context.Context, hostpb.HostServer) error {
		s := proto.CloneOf(machineSpec(version))
		s.Id, s.Name, s.Addresses[0].Address, s.MemoryBytes = "m-v", "vol", "10.1.0.20", 64<<20
		s.Volumes = []*hostpb.VolumeMount{{Id: "v-1", Path: "/srv/data"}}
		change(s)
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.EnsureMachine(ctx, &hostpb.EnsureMachineRequest{Spec: s})
			return err
		}
	}
	at := func(path string) func(context.Context, hostpb.HostServer) error {
		return mounted(func(s *hostpb.MachineSpec) { s.Volumes[0].Path = path })
	}
	return []call{
		{"machine with a volume that does not exist", mounted(func(*hostpb.MachineSpec) {}), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"mount of a volume of another namespace", mounted(func(s *hostpb.MachineSpec) { s.Namespace = "thief" }), hostpb.Refusal_NOT_OWNER, codes.PermissionDenied},
		{"mount over the kubelet", at("/var/lib/kubelet/pods"), invalid, codes.InvalidArgument},
		{"mount over a parent of what the machine needs", at("/var/lib"), invalid, codes.InvalidArgument},
		{"mount over a system folder", at("/etc"), invalid, codes.InvalidArgument},
		{"mount at a path with ..", at("/srv/../etc"), invalid, codes.InvalidArgument},
		{"mount of a volume twice", mounted(func(s *hostpb.MachineSpec) {
			s.Volumes = append(s.Volumes, &hostpb.VolumeMount{Id: "v-1", Path: "/mnt/again"})
		}), invalid, codes.InvalidArgument},
		{"mount in another volume", mounted(func(s *hostpb.MachineSpec) {
			s.Volumes = append(s.Volumes, &hostpb.VolumeMount{Id: "v-2", Path: "/srv/data/more"})
		}), invalid, codes.InvalidArgument},
		{"machine with a volume", mounted(func(*hostpb.MachineSpec) {}), success, codes.OK},
		{"machine with a volume again", mounted(func(*hostpb.MachineSpec) {}), success, codes.OK},
		{"second machine with the volume", mounted(func(s *hostpb.MachineSpec) {
			s.Id, s.Name, s.Addresses[0].Address = "m-w", "thirsty", "10.1.0.21"
		}), hostpb.Refusal_VOLUME_IN_USE, codes.FailedPrecondition},
	}
}

// oldVolumeCalls are those about a volume that a machine has, or had.
func oldVolumeCalls() []call {
	ensure := ensureVolume
	remove := func(id, namespace string) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.DeleteVolume(ctx, &hostpb.DeleteVolumeRequest{Id: id, Namespace: namespace, Name: "data"})
			return err
		}
	}
	gone := func(ctx context.Context, h hostpb.HostServer) error {
		for done := false; !done; { // Each call waits for the end of the removal, for a while.
			res, err := h.DeleteMachine(ctx, &hostpb.DeleteMachineRequest{Id: "m-v", Namespace: "default", Name: "vol"})
			if err != nil {
				return err
			}
			done = res.Done
		}
		return nil
	}
	return []call{
		{"deletion of a volume in use", remove("v-1", "default"), hostpb.Refusal_VOLUME_IN_USE, codes.FailedPrecondition},
		{"deletion of the machine with the volume", gone, success, codes.OK},
		{"deletion of a volume of another namespace", remove("v-1", "thief"), hostpb.Refusal_NOT_OWNER, codes.PermissionDenied},
		{"deletion of a volume without an owner", remove("v-1", ""), invalid, codes.InvalidArgument},
		{"deletion of an unknown volume", remove("v-9", "default"), success, codes.OK},
		{"volume after its machine", ensure(func(*hostpb.Volume) {}), success, codes.OK},
		{"deletion of a volume", remove("v-1", "default"), success, codes.OK},
		{"deletion of a volume again", remove("v-1", "default"), success, codes.OK},
		{"deleted volume", ensure(func(*hostpb.Volume) {}), hostpb.Refusal_DELETED, codes.FailedPrecondition},
	}
}

package hollow

import (
	"context"
	"maps"
	"os"
	"path/filepath"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
)

// EnsureVolume implements hostpb.HostServer. A hollow volume is only a record.
func (h *Host) EnsureVolume(_ context.Context, v *hostpb.Volume) (*hostpb.Volume, error) {
	if err := admission.CheckVolume(v); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	have := h.volumes[v.GetId()]
	if err := admission.Volume(v, have, h.info(), h.store.buried(volumeTombstone(v.GetId())), maps.Values(h.volumes)); err != nil || have != nil {
		return v, err
	}
	if err := h.store.saveVolume(v); err != nil {
		return nil, status.Errorf(codes.Internal, "recording the volume: %v", err)
	}
	h.volumes[v.GetId()] = proto.CloneOf(v)
	h.broadcaster.Publish(events.Host(h.info()))
	return v, nil
}

// DeleteVolume implements hostpb.HostServer.
func (h *Host) DeleteVolume(_ context.Context, r *hostpb.DeleteVolumeRequest) (*hostpb.DeleteVolumeResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	have := h.volumes[r.GetId()]
	if err := admission.Deletion("volume", r, have); err != nil {
		return nil, err
	}
	if err := admission.UnusedVolume(r.GetId(), h.specs()); err != nil {
		return nil, err
	}
	if have == nil {
		return &hostpb.DeleteVolumeResponse{}, nil
	}
	if err := h.store.buryVolume(r.GetId()); err != nil {
		return nil, status.Errorf(codes.Internal, "removing the volume: %v", err)
	}
	delete(h.volumes, r.GetId())
	h.broadcaster.Publish(events.Host(h.info()))
	return &hostpb.DeleteVolumeResponse{}, nil
}

func (s store) volumeFile(id string) string { return filepath.Join(s.root, "volumes", id+".json") }

// volumeTombstone returns the name of the tombstone of a volume. It is no valid id, so that it does not bury a machine.
func volumeTombstone(id string) string { return "volume." + id }

// buryVolume removes a volume permanently.
func (s store) buryVolume(id string) error {
	if err := write(s.tombstone(volumeTombstone(id)), nil); err != nil {
		return err
	}
	return os.Remove(s.volumeFile(id))
}

func (s store) saveVolume(v *hostpb.Volume) error {
	if err := os.MkdirAll(filepath.Join(s.root, "volumes"), 0o700); err != nil {
		return err
	}
	return record(s.volumeFile(v.GetId()), v)
}

// loadVolumes reads all volumes.
func (s store) loadVolumes() (map[string]*hostpb.Volume, error) {
	volumes := map[string]*hostpb.Volume{}
	files, err := filepath.Glob(s.volumeFile("*"))
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		v := &hostpb.Volume{}
		if err := protojson.Unmarshal(data, v); err != nil {
			return nil, err
		}
		volumes[v.GetId()] = v
	}
	return volumes, err
}

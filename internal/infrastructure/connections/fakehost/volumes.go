package fakehost

import (
	"context"
	"maps"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
)

// EnsureVolume implements hostpb.HostServer.
func (h *Host) EnsureVolume(_ context.Context, v *hostpb.Volume) (*hostpb.Volume, error) {
	if err := admission.CheckVolume(v); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	have := h.volumes[v.GetId()]
	if err := admission.Volume(v, have, h.info, h.deleted[v.GetId()], maps.Values(h.volumes)); err != nil || have != nil {
		return v, err
	}
	h.volumes[v.GetId()] = proto.CloneOf(v)
	h.account()
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
	if have != nil {
		h.deleted[r.GetId()] = true
		delete(h.volumes, r.GetId())
		h.account()
	}
	return &hostpb.DeleteVolumeResponse{}, nil
}

// Volume returns a volume, or nil.
func (h *Host) Volume(id string) *hostpb.Volume {
	h.mu.Lock()
	defer h.mu.Unlock()
	return proto.CloneOf(h.volumes[id])
}

// LoseVolume makes the host lose a volume, as a new disk does.
func (h *Host) LoseVolume(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.volumes, id)
	h.account()
}

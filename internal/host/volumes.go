package host

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machinedisk"
	"capstan.dev/capstan/internal/host/refusal"
)

// volumes is the registry of the volumes of this host: file systems that outlive machines. The folder of a volume appears with its
// complete file system, and disappears by a rename, so a crash leaves the whole volume or nothing. Only DeleteVolume deletes one.
type volumes struct {
	*platform
	machines *machines
	// byID are the recorded volumes; mu guards it.
	byID map[string]*hostpb.Volume
	// damaged explains, by id, why the record of a volume cannot be read; mu guards it.
	damaged map[string]error
	// leaving are the ids of volumes whose deletion has begun; mu guards it.
	leaving map[string]bool
	// changing is held while a volume is made or deleted. It is locked before mu.
	changing sync.Mutex
}

func newVolumes(p *platform, ms *machines) *volumes {
	vs := &volumes{platform: p, machines: ms, byID: map[string]*hostpb.Volume{}, leaving: map[string]bool{}}
	ms.mounts, ms.volumeBytes = vs.mounts, vs.bytes
	return vs
}

// load reads the recorded volumes; mu is held.
func (vs *volumes) load() error {
	all, damaged, err := load(vs.store, volumesDir, func() *hostpb.Volume { return &hostpb.Volume{} }, func(folder string, v *hostpb.Volume) error {
		if folder != v.Id {
			return fmt.Errorf("expected the volume %s, found %q", folder, v.Id)
		}
		return admission.CheckVolume(v)
	})
	for _, v := range all {
		vs.byID[v.Id] = v
	}
	for id, err := range damaged {
		vs.log.Error("The record of a volume cannot be read: repair it and restart capstand, or remove its folder by hand if nobody needs the data", "id", id, "error", err)
	}
	vs.damaged = damaged
	return err
}

// all iterates over the volumes; mu is held.
func (vs *volumes) all() iter.Seq[*hostpb.Volume] { return maps.Values(vs.byID) }

// bytes returns the sizes of all volumes together; mu is held.
func (vs *volumes) bytes() int64 { return admission.VolumeBytes(vs.all()) }

// mounts decides whether a new machine may have its volumes; mu is held.
func (vs *volumes) mounts(spec *hostpb.MachineSpec) error {
	for _, m := range spec.Volumes {
		if err := vs.readable(m.Id); err != nil {
			return err
		}
		if vs.leaving[m.Id] {
			return refusal.Errorf(hostpb.Refusal_DELETED, "volume %s is being deleted", m.Id)
		}
	}
	if err := admission.Mounts(spec, func(id string) *hostpb.Volume { return vs.byID[id] }, vs.machines.specs()); err != nil {
		return err
	}
	for _, m := range spec.Volumes {
		if err := vs.unknownUser(m.Id); err != nil {
			return err
		}
	}
	return nil
}

// readable refuses a volume whose record cannot be read (DAMAGED); mu is held.
func (vs *volumes) readable(id string) error {
	if err := vs.damaged[id]; err != nil {
		return refusal.Errorf(hostpb.Refusal_DAMAGED, "capstand cannot read the record of volume %s: %v; repair it and restart capstand, or remove its folder by hand if nobody needs the data", id, err)
	}
	return nil
}

// unknownUser refuses a volume that is mounted and may belong to a machine whose record cannot be read (VOLUME_IN_USE); mu is held.
func (vs *volumes) unknownUser(id string) error {
	mounted, err := vs.volumeDisk(id).Mounted()
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	for _, m := range vs.machines.byID {
		if mounted && m.broken != "" {
			return refusal.Errorf(hostpb.Refusal_VOLUME_IN_USE, "volume %s is mounted, and the record of machine %s cannot be read: delete that machine first, or repair its record", id, m.spec.Id)
		}
	}
	return nil
}

// EnsureVolume makes a volume, completely or not at all.
func (vs *volumes) EnsureVolume(ctx context.Context, v *hostpb.Volume) (*hostpb.Volume, error) {
	if err := admission.CheckVolume(v); err != nil {
		return nil, err
	}
	vs.changing.Lock()
	defer vs.changing.Unlock()
	exists, err := vs.admitVolume(v)
	if err != nil || exists {
		return v, err
	}
	if err := vs.makeVolume(ctx, v); err != nil {
		return nil, status.Errorf(codes.Internal, "making volume %s/%s: %v", v.Namespace, v.Name, err)
	}
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.byID[v.Id] = proto.CloneOf(v)
	vs.log.Info("Volume made", "volume", v.Namespace+"/"+v.Name, "id", v.Id, "sizeMiB", v.SizeBytes>>20)
	vs.broadcaster.Publish(events.Host(vs.machines.info()))
	return v, nil
}

// admitVolume decides whether the host may have a volume. It returns whether it has it.
func (vs *volumes) admitVolume(v *hostpb.Volume) (exists bool, err error) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	if err := vs.readable(v.Id); err != nil {
		return false, err
	}
	have := vs.byID[v.Id]
	if err := admission.Volume(v, have, vs.machines.info(), vs.store.buried(volumeTombstone(v.Id), time.Now()), vs.all()); err != nil {
		return false, err
	}
	if have != nil {
		if disk := vs.volumeDisk(v.Id); !disk.Exists() {
			return true, admission.NoVolume(v, disk.Image)
		}
		return true, nil
	}
	_, free, err := machinedisk.Space(vs.config.Root)
	if err != nil {
		return false, status.Error(codes.Internal, err.Error())
	}
	if vs.preallocates() {
		free -= vs.machines.promisedSpace()
	}
	return false, admission.VolumeSpace(v, free, vs.config.ReserveDisk)
}

// makeVolume makes the folder of a volume with its file system, whose space is reserved.
func (vs *volumes) makeVolume(ctx context.Context, v *hostpb.Volume) error {
	// The end of the call does not interrupt the work of some milliseconds.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTimeout)
	defer cancel()
	dir, remove, err := vs.store.unfinished(volumesDir, v.Id)
	if err != nil {
		return err
	}
	defer remove() // After a success the folder has another name.
	if err := volumeIn(dir).Create(ctx, v.SizeBytes); err != nil {
		return err
	}
	if err := writeSpec(specFile(dir), v); err != nil {
		return err
	}
	return vs.store.publish(dir, volumesDir, v.Id)
}

// DeleteVolume deletes a volume with its data.
func (vs *volumes) DeleteVolume(ctx context.Context, req *hostpb.DeleteVolumeRequest) (*hostpb.DeleteVolumeResponse, error) {
	vs.changing.Lock()
	defer vs.changing.Unlock()
	found, err := vs.leave(req)
	if err != nil || !found {
		return &hostpb.DeleteVolumeResponse{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, deleteWait)
	defer cancel()
	err = vs.volumeDisk(req.Id).Detach(ctx)
	vs.mu.Lock()
	defer vs.mu.Unlock()
	delete(vs.leaving, req.Id)
	if err == nil {
		err = vs.store.bury(volumeTombstone(req.Id))
	}
	if err == nil {
		err = vs.store.discard(vs.store.path(volumesDir, req.Id))
	}
	if err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", req.Id, err)
	}
	delete(vs.byID, req.Id)
	vs.log.Info("Volume deleted", "volume", req.Namespace+"/"+req.Name, "id", req.Id)
	vs.broadcaster.Publish(events.Host(vs.machines.info()))
	vs.emptyTrash()
	return &hostpb.DeleteVolumeResponse{}, nil
}

// leave decides whether a volume may be deleted. From then on no machine gets it. It returns false if the host does not have it.
func (vs *volumes) leave(req *hostpb.DeleteVolumeRequest) (found bool, err error) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	have := vs.byID[req.Id]
	if err := admission.Deletion("volume", req, have); err != nil {
		return false, err
	}
	if err := vs.readable(req.Id); err != nil || have == nil {
		return false, err
	}
	if err := admission.UnusedVolume(req.Id, vs.machines.specs()); err != nil {
		return false, err
	}
	if err := vs.unknownUser(req.Id); err != nil {
		return false, err
	}
	vs.leaving[req.Id] = true
	return true, nil
}

// volumeDisk is the file system of a volume.
func (p *platform) volumeDisk(id string) machinedisk.Disk {
	return volumeIn(p.store.path(volumesDir, id))
}

// volumeIn is the file system of a volume whose folder is dir.
func volumeIn(dir string) machinedisk.Disk {
	return machinedisk.Disk{Image: filepath.Join(dir, "disk.img"), Dir: filepath.Join(dir, "content"), Preallocate: true}
}

// volumeDisks are the file systems of the machine's volumes.
func (m *machine) volumeDisks() (disks []machinedisk.Disk) {
	for _, v := range m.spec.Volumes {
		disks = append(disks, m.host.volumeDisk(v.Id))
	}
	return disks
}

// volumeMounts are the folders of the machine's volumes by their paths in the machine.
func (m *machine) volumeMounts() map[string]string {
	mounts := map[string]string{}
	for _, v := range m.spec.Volumes {
		mounts[v.Path] = m.host.volumeDisk(v.Id).Dir
	}
	return mounts
}

// attachVolumes mounts the machine's volumes on the host before each start.
func (m *machine) attachVolumes(ctx context.Context) error {
	for _, d := range m.volumeDisks() {
		if !d.Exists() {
			return fmt.Errorf("the data of a volume of the machine is lost: %s does not exist; delete its CapstanVolume and the Machine to start with an empty volume", d.Image)
		}
		if err := m.attach(ctx, d); err != nil {
			return fmt.Errorf("mounting a volume of the machine: %w", err)
		}
	}
	return nil
}

// detachVolumes unmounts the machine's volumes. It tries all of them. Their data stays.
func (m *machine) detachVolumes(ctx context.Context) error {
	var errs []error
	for _, d := range m.volumeDisks() {
		errs = append(errs, d.Detach(ctx))
	}
	return errors.Join(errs...)
}

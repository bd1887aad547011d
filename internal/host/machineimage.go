package host

import (
	"context"
	"fmt"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machineimage"
	"capstan.dev/capstan/internal/host/runc"
)

// keepImages registers the images that an administrator adds, until ctx ends. An error is logged once until it changes.
func (ms *machines) keepImages(ctx context.Context) {
	var errs lastErrors
	keepLooking(ctx, func() {
		changed, err := ms.images.Scan(ctx, ms.usesImage)
		if ctx.Err() == nil && errs.news(ms.images.Dir, err) {
			ms.log.Error("The images of machines cannot be read", "error", err)
		}
		if changed {
			ms.announceImages()
		}
	})
}

// announceImages logs and publishes the images. Machines that wait for one look again.
func (ms *machines) announceImages() {
	for _, i := range ms.images.List() {
		if i.Problem != "" {
			ms.log.Error("Machines cannot have this image", "image", i.Name, "problem", i.Problem)
			continue
		}
		ms.log.Info("Image registered", "image", i.Name, "digest", i.Digest)
	}
	ms.mu.Lock()
	defer ms.mu.Unlock()
	ms.broadcaster.Publish(events.Host(ms.info()))
	for _, m := range ms.byID {
		if m.spec.Image != admission.HostImage {
			m.wake.Send()
		}
	}
}

// usesImage reports whether a machine was made with the image of a digest.
func (ms *machines) usesImage(digest string) bool {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	for _, m := range ms.byID {
		m.mu.Lock()
		uses := m.state.ImageDigest == digest || m.broken != ""
		m.mu.Unlock()
		if uses {
			return true
		}
	}
	return false
}

// imageInfo returns the names of the images that machines can have, and all besides that of the host.
func (ms *machines) imageInfo() (names []string, all []*hostpb.MachineImage) {
	names = []string{admission.HostImage}
	if ms.images == nil {
		return names, nil
	}
	for _, i := range ms.images.List() {
		all = append(all, &hostpb.MachineImage{Name: i.Name, Digest: i.Digest, Problem: i.Problem})
		if i.Problem == "" {
			names = append(names, i.Name)
		}
	}
	return names, all
}

// chooseImage returns the programs of the machine: those of its image, or of the host. It records the image at the first start,
// before anything is made from it. The folder of an image can be in a file system that hangs, so m.mu is not held while it is read: fencing
// and all calls wait for m.mu.
func (m *machine) chooseImage(ctx context.Context) (runc.System, error) {
	if m.spec.Image == admission.HostImage {
		return runc.HostSystem(), nil
	}
	m.mu.Lock()
	image, err := m.host.images.Get(m.spec.Image, m.state.ImageDigest)
	m.mu.Unlock()
	if err != nil {
		return runc.System{}, err
	}
	// The administrator may have changed a folder.
	if err := m.host.imageFolders.await(ctx, image.Dir, func() error { return machineimage.Check(image.Dir) }); err != nil {
		return runc.System{}, err
	}
	return runc.SystemOf(image.Dir), m.recordImage(image.Digest)
}

// recordImage records the digest of the machine's image at the first start. The image may have been replaced since it was checked, and a scan
// may be removing it: only the list shows this.
func (m *machine) recordImage(digest string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state.ImageDigest != "" {
		return nil
	}
	listed, err := m.host.images.Get(m.spec.Image, "")
	if err != nil {
		return err
	}
	if listed.Digest != digest {
		return fmt.Errorf("expected the image %s with digest %s, which was checked for the machine, found %s: the image was replaced meanwhile, and capstand tries again", m.spec.Image, digest, listed.Digest)
	}
	m.state.ImageDigest = digest
	return m.save()
}

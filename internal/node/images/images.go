// Package images imports image archives into the containerd of a machine, with containerd's client, pulls images, and gives the kubelet
// their credentials.
//
// It runs inside the machine. A tenant controls the machine's containerd, so capstand neither connects to it nor contains
// the client. capstand starts `capstan-init images import` in the machine and reads its short answer.
//
// Layer: node. Allowed imports: api, library, contract.
package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	core "github.com/containerd/containerd/v2/core/images"
	ociarchive "github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"capstan.dev/capstan/internal/imagearchive"
)

// Socket of the machine's containerd.
const Socket = "/run/containerd/containerd.sock"

// namespace of containerd where the kubelet finds its images.
const namespace = "k8s.io"

const (
	// leaseTime is the time for which containerd keeps the content of an import whose process was killed.
	leaseTime = 2 * time.Hour
	// cleanupTime is the time for the end of a cancelled import.
	cleanupTime = 8 * time.Second
)

// ErrArchive is the cause of a failed import if the archive is bad, and not containerd.
var ErrArchive = errors.New("the image archive cannot be used")

// Import imports an OCI or Docker archive, unpacks its images, and returns their names. On a second import of the same archive
// it returns the same names. A failed or cancelled import leaves nothing: neither names nor content.
func Import(ctx context.Context, socket string, archive io.Reader) (names []string, err error) {
	_ = log.SetLevel("error") // Errors are returned. Other messages of the client would be part of the error that a person gets.
	c, err := client.New(socket, client.WithDefaultNamespace(namespace))
	if err != nil {
		return nil, fmt.Errorf("connecting to containerd at %s: %w", socket, err)
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	leased, release, err := lease(ctx, c.LeasesService())
	if err != nil {
		return nil, fmt.Errorf("asking containerd for a lease: %w", err)
	}
	defer func() { err = errors.Join(err, release(err != nil)) }()
	checked := inspect(archive)
	index, err := ociarchive.ImportIndex(leased, c.ContentStore(), checked)
	if wrong := checked.finish(); wrong != nil {
		err = wrong
	}
	if err != nil {
		return nil, classify(ctx, fmt.Errorf("importing the archive into containerd: %w", err))
	}
	found, err := imagesOf(leased, c.ContentStore(), index)
	if err != nil {
		return nil, classify(ctx, fmt.Errorf("reading the index of the archive: %w", err))
	}
	for _, image := range found {
		if err := client.NewImage(c, image).Unpack(leased, ""); err != nil {
			return nil, classify(ctx, fmt.Errorf("unpacking image %s: %w", image.Name, err))
		}
	}
	if names, err = namesOf(found); err != nil {
		return nil, err
	}
	return names, record(leased, c.ImageService(), found)
}

// classify adds ErrArchive, except if the import was cancelled or containerd does not answer.
func classify(ctx context.Context, err error) error {
	if ctx.Err() != nil || errdefs.IsUnavailable(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrArchive, err)
}

// lease protects the content of an import from containerd's garbage collector until it is released. The lease of containerd's
// client would survive a cancelled import for a day, with all of its content.
func lease(ctx context.Context, manager leases.Manager) (_ context.Context, release func(failed bool) error, err error) {
	l, err := manager.Create(ctx, leases.WithRandomID(), leases.WithExpiration(leaseTime))
	if err != nil {
		return nil, nil, err
	}
	return leases.WithLease(ctx, l.ID), func(failed bool) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		if failed {
			return manager.Delete(ctx, l, leases.SynchronousDelete) // collects the content
		}
		return manager.Delete(ctx, l)
	}, nil
}

// maxIndex is the largest size of the list of the images of an archive.
const maxIndex = 8 << 20

// imagesOf returns the images of an archive that have names. It connects the parts of each image in containerd, so that the
// garbage collector keeps them together.
func imagesOf(ctx context.Context, store content.Store, index ocispec.Descriptor) ([]core.Image, error) {
	if index.Size > maxIndex {
		return nil, fmt.Errorf("expected at most %d bytes, found %d", maxIndex, index.Size)
	}
	children := core.FilterPlatforms(core.ChildrenHandler(store), platforms.Default())
	if err := core.WalkNotEmpty(ctx, core.SetChildrenLabels(store, children), index); err != nil {
		return nil, err
	}
	data, err := content.ReadBlob(ctx, store, index)
	if err != nil {
		return nil, err
	}
	var list ocispec.Index
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, err
	}
	var found []core.Image
	for _, manifest := range list.Manifests {
		if name := imagearchive.Name(manifest.Annotations); name != "" {
			found = append(found, core.Image{Name: name, Target: manifest})
		}
	}
	return found, nil
}

// record gives images their names. The kubelet's interface to containerd adds records of its own to a named image, so only
// complete images get a name.
func record(ctx context.Context, store core.Store, images []core.Image) error {
	for _, image := range images {
		_, err := store.Update(ctx, image, "target")
		if errdefs.IsNotFound(err) {
			_, err = store.Create(ctx, image)
		}
		if err != nil {
			return fmt.Errorf("recording image %s: %w", image.Name, err)
		}
	}
	return nil
}

// namesOf returns the sorted names of images. An archive without a name is refused, because no pod could use its images.
func namesOf(images []core.Image) ([]string, error) {
	var names []string
	for _, image := range images {
		names = append(names, image.Name)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%w: it names no image for this platform: save the image with its name, for example with `docker save NAME:TAG`", ErrArchive)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

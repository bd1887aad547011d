// Package images imports image archives into the containerd of a machine, with containerd's client.
//
// It runs inside the machine. A tenant controls the machine's containerd, so capstand neither connects to it nor contains
// the client. capstand starts `capstan-init images import` in the machine and reads its short answer.
//
// Layer: node. Allowed imports: api, library, contract.
package images

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/client"
	core "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
)

// Socket of the machine's containerd.
const Socket = "/run/containerd/containerd.sock"

// namespace of containerd where the kubelet finds its images.
const namespace = "k8s.io"

const (
	// leaseTime is how long containerd keeps the content of an import whose process was killed.
	leaseTime = 2 * time.Hour
	// cleanupTime is what remains for the end of a cancelled import.
	cleanupTime = 8 * time.Second
)

// ErrArchive is the cause of a failed import if the archive is bad, and not containerd.
var ErrArchive = errors.New("the image archive cannot be used")

// Import imports an OCI or Docker archive, unpacks its images, and returns their names. On a second import of the same archive
// it returns the same names. A failed or cancelled import leaves nothing: neither names nor content.
func Import(ctx context.Context, socket string, archive io.Reader) (names []string, err error) {
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
	before, err := c.ImageService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing the images of containerd: %w", err)
	}
	checked := inspect(archive)
	imported, err := c.Import(leased, checked)
	if wrong := checked.finish(); wrong != nil {
		err = wrong
	}
	if err != nil {
		return nil, classify(ctx, fmt.Errorf("importing the archive into containerd: %w", err))
	}
	for _, image := range imported {
		if err := client.NewImage(c, image).Unpack(leased, ""); err != nil {
			return nil, errors.Join(classify(ctx, fmt.Errorf("unpacking image %s: %w", image.Name, err)), restore(ctx, c.ImageService(), before, imported))
		}
	}
	return namesOf(imported)
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

// restore gives the names of an import that failed back to the images that had them.
func restore(ctx context.Context, store core.Store, before, imported []core.Image) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	for _, image := range imported {
		former := slices.IndexFunc(before, func(b core.Image) bool { return b.Name == image.Name })
		if former < 0 {
			err = errors.Join(err, store.Delete(ctx, image.Name))
			continue
		}
		_, updateErr := store.Update(ctx, before[former], "target")
		err = errors.Join(err, updateErr)
	}
	return err
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

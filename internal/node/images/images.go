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

	"github.com/containerd/containerd/v2/client"
	core "github.com/containerd/containerd/v2/core/images"
)

// Socket of the machine's containerd.
const Socket = "/run/containerd/containerd.sock"

// namespace of containerd where the kubelet finds its images.
const namespace = "k8s.io"

// Import imports an OCI or Docker archive, unpacks its images, and returns their names. On a second import of the same archive
// it returns the same names.
func Import(ctx context.Context, socket string, archive io.Reader) (names []string, err error) {
	c, err := client.New(socket, client.WithDefaultNamespace(namespace))
	if err != nil {
		return nil, fmt.Errorf("connecting to containerd at %s: %w", socket, err)
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	imported, err := c.Import(ctx, archive)
	if err != nil {
		return nil, fmt.Errorf("importing the archive into containerd: %w", err)
	}
	for _, image := range imported {
		if err := client.NewImage(c, image).Unpack(ctx, ""); err != nil {
			return nil, fmt.Errorf("unpacking image %s: %w", image.Name, err)
		}
	}
	return namesOf(imported)
}

// namesOf returns the sorted names of images. An archive without a name is refused, because no pod could use its images.
func namesOf(images []core.Image) ([]string, error) {
	var names []string
	for _, image := range images {
		names = append(names, image.Name)
	}
	if len(names) == 0 {
		return nil, errors.New("the archive names no image for this platform: save the image with its name, for example with `docker save NAME:TAG`")
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

package images

import (
	"context"
	"errors"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"capstan.dev/capstan/internal/node/containerruntime"
)

// Pull pulls the images that the machine does not have. It uses the interface of the kubelet, so that the registries, mirrors and
// credentials in containerd's configuration apply.
func Pull(ctx context.Context, socket string, names []string) (err error) {
	connection, err := containerruntime.Connect(socket)
	if err != nil {
		return fmt.Errorf("connecting to containerd at %s: %w", socket, err)
	}
	defer func() { err = errors.Join(err, connection.Close()) }()
	service := cri.NewImageServiceClient(connection)
	for _, name := range names {
		image := &cri.ImageSpec{Image: name}
		status, err := service.ImageStatus(ctx, &cri.ImageStatusRequest{Image: image})
		if err != nil {
			return fmt.Errorf("asking containerd for image %s: %w", name, err)
		}
		if status.GetImage() != nil {
			continue
		}
		if _, err := service.PullImage(ctx, &cri.PullImageRequest{Image: image}); err != nil {
			return fmt.Errorf("pulling image %s: %w", name, err)
		}
	}
	return nil
}

package images

import (
	"context"
	"errors"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"capstan.dev/capstan/internal/node/containerruntime"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// Pull pulls the images of a configuration that the machine does not have, with its credentials. It uses the interface of the kubelet,
// so that the registries and mirrors in containerd's configuration apply.
func Pull(ctx context.Context, socket string, config *nodeconfig.NodeConfiguration) (err error) {
	connection, err := containerruntime.Connect(socket)
	if err != nil {
		return fmt.Errorf("connecting to containerd at %s: %w", socket, err)
	}
	defer func() { err = errors.Join(err, connection.Close()) }()
	service := cri.NewImageServiceClient(connection)
	for _, name := range config.Images {
		image := &cri.ImageSpec{Image: name}
		status, err := service.ImageStatus(ctx, &cri.ImageStatusRequest{Image: image})
		if err != nil {
			return fmt.Errorf("asking containerd for image %s: %w", name, err)
		}
		if status.GetImage() != nil {
			continue
		}
		request := &cri.PullImageRequest{Image: image}
		if r, found := config.CredentialsOf(name); found {
			request.Auth = &cri.AuthConfig{Username: r.Username, Password: r.Password}
		}
		if _, err := service.PullImage(ctx, request); err != nil {
			return fmt.Errorf("pulling image %s: %w", name, err)
		}
	}
	return nil
}

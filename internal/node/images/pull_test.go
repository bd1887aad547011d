package images

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"capstan.dev/capstan/internal/node/nodeconfig"
)

// runtime is a container runtime with one image, whose registry has some others.
type runtime struct {
	cri.UnimplementedImageServiceServer
	pulled []string
}

func (r *runtime) ImageStatus(_ context.Context, in *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error) {
	if in.Image.Image == "a.test/present:v1" {
		return &cri.ImageStatusResponse{Image: &cri.Image{Id: "1"}}, nil
	}
	return &cri.ImageStatusResponse{}, nil
}

func (r *runtime) PullImage(_ context.Context, in *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	if strings.Contains(in.Image.Image, "missing") {
		return nil, errors.New("not found")
	}
	r.pulled = append(r.pulled, in.Image.Image+" "+in.GetAuth().GetUsername()+" "+in.GetAuth().GetPassword())
	return &cri.PullImageResponse{}, nil
}

// TestPull: an image that the machine has is not pulled again, each image has the credentials of its registry, and an error names the image.
func TestPull(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	fake, server := &runtime{}, grpc.NewServer()
	cri.RegisterImageServiceServer(server, fake)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	pull := func(images ...string) error {
		return Pull(t.Context(), socket, &nodeconfig.NodeConfiguration{Images: images, Registries: []nodeconfig.Registry{{Host: "a.test", Username: "ann", Password: "pw"}}})
	}
	if err := pull("a.test/present:v1", "a.test/new:v1", "b.test/new:v1"); err != nil {
		t.Fatal(err)
	}
	err = pull("a.test/missing:v1", "a.test/other:v1")
	if err == nil || !strings.Contains(err.Error(), "pulling image a.test/missing:v1") || !strings.Contains(err.Error(), "not found") {
		t.Errorf("got %v", err)
	}
	if want := []string{"a.test/new:v1 ann pw", "b.test/new:v1  "}; !slices.Equal(fake.pulled, want) {
		t.Errorf("pulled %v, want %v", fake.pulled, want)
	}
}

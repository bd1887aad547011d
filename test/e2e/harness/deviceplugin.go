//go:build e2e

package harness

import (
	"context"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// devicePlugin gives out one device by its CDI name, as the plugins of vendors do.
type devicePlugin struct {
	plugin.UnimplementedDevicePluginServer
	cdiName string
}

func (*devicePlugin) GetDevicePluginOptions(context.Context, *plugin.Empty) (*plugin.DevicePluginOptions, error) {
	return &plugin.DevicePluginOptions{}, nil
}

func (*devicePlugin) ListAndWatch(_ *plugin.Empty, stream grpc.ServerStreamingServer[plugin.ListAndWatchResponse]) error {
	if err := stream.Send(&plugin.ListAndWatchResponse{Devices: []*plugin.Device{{ID: "0", Health: plugin.Healthy}}}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *devicePlugin) Allocate(_ context.Context, req *plugin.AllocateRequest) (*plugin.AllocateResponse, error) {
	out := &plugin.AllocateResponse{}
	for range req.ContainerRequests {
		out.ContainerResponses = append(out.ContainerResponses, &plugin.ContainerAllocateResponse{CdiDevices: []*plugin.CDIDevice{{Name: p.cdiName}}})
	}
	return out, nil
}

// ServeDevicePlugin runs a device plugin for the kubelet of the machine with a root file system. The resource consists of one device
// with a CDI name.
func ServeDevicePlugin(t *testing.T, root, resource, cdiName string) {
	t.Helper()
	folder, err := os.Open(root + plugin.DevicePluginPath)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = folder.Close() })
	// The path of a socket has 108 bytes at most.
	dir := fmt.Sprintf("/proc/self/fd/%d/", folder.Fd())
	listener, err := net.Listen("unix", dir+"sample.sock")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	plugin.RegisterDevicePluginServer(server, &devicePlugin{cdiName: cdiName})
	ended := make(chan struct{})
	go func() { defer close(ended); _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Stop(); <-ended })
	conn, err := grpc.NewClient("unix://"+dir+"kubelet.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	Eventually(t, "the registration of "+resource, time.Minute, func(ctx context.Context) error {
		_, err := plugin.NewRegistrationClient(conn).Register(ctx, &plugin.RegisterRequest{Version: plugin.Version, Endpoint: "sample.sock", ResourceName: resource})
		return err
	})
}

package host

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// ctr imports an archive from its standard input into the machine's containerd, where the kubelet
// sees it.
var ctr = []string{
	"/opt/capstan/node/bin/ctr", "--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io",
	"images", "import", "-",
}

// LoadImage imports an OCI archive into machines. It is kept on disk meanwhile, for it may be large
// and is read once per machine.
func (ms *machines) LoadImage(stream hostpb.Host_LoadImageServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	var machines []*machine
	for _, id := range first.Machines {
		m, err := ms.get(id)
		if err != nil {
			return err
		}
		if phase := m.snapshot().Status.Phase; phase != hostpb.MachineStatus_RUNNING {
			return refusal.Errorf(hostpb.Refusal_NOT_RUNNING, "machine %s/%s is %s: images can be loaded into running machines only", m.spec.Namespace, m.spec.Name, phase)
		}
		machines = append(machines, m)
	}
	if len(machines) == 0 {
		return refusal.Errorf(hostpb.Refusal_INVALID, "the first message names no machine")
	}
	archive, err := ms.receive(first.Chunk, stream)
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(archive) }()
	images, err := ms.importAll(stream.Context(), machines, archive)
	if err != nil {
		return err
	}
	return stream.SendAndClose(&hostpb.LoadImageResponse{Images: images})
}

// receive writes the archive to a file.
func (ms *machines) receive(first []byte, stream hostpb.Host_LoadImageServer) (path string, err error) {
	file, err := os.CreateTemp(ms.store.path(newDir), "image-*")
	if err != nil {
		return "", err
	}
	defer func() {
		if err = errors.Join(err, file.Close()); err != nil {
			_ = os.Remove(file.Name())
		}
	}()
	for chunk := first; ; {
		if _, err := file.Write(chunk); err != nil {
			return "", err
		}
		next, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return file.Name(), nil
		}
		if err != nil {
			return "", err
		}
		chunk = next.Chunk
	}
}

// importAll imports into every machine, two at a time, and returns the names that ctr printed.
func (ms *machines) importAll(ctx context.Context, machines []*machine, archive string) ([]string, error) {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(2)
	outputs := make([]string, len(machines))
	for i, m := range machines {
		group.Go(func() error {
			file, err := os.Open(archive)
			if err != nil {
				return err
			}
			defer func() { _ = file.Close() }()
			out, err := ms.runc.Exec(ctx, m.spec.Id, file, ctr...)
			if err != nil {
				return status.Errorf(codes.Internal, "machine %s/%s: %v", m.spec.Namespace, m.spec.Name, err)
			}
			outputs[i] = string(out)
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return imageNames(outputs[0]), nil
}

// imageNames reads what ctr prints, a line of name and progress per image.
func imageNames(output string) []string {
	var names []string
	for line := range strings.Lines(output) {
		if fields := strings.Fields(line); len(fields) > 1 && strings.Contains(fields[0], "/") {
			names = append(names, fields[0])
		}
	}
	return names
}

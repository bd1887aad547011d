package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/machineapi"
)

const (
	// importTimeout bounds the import in one machine, because a machine can stop to read the archive.
	importTimeout = 15 * time.Minute
	// maxImportedNames and maxImageName bound the answer of a machine.
	maxImportedNames = 256
	maxImageName     = 512
)

// importCommand reads an archive from its standard input and imports it into the machine's containerd, where the kubelet finds
// the images. The client of containerd runs in the machine: the machine's users control containerd, so capstand does not
// connect to it, and does not contain the client and its dependencies.
var importCommand = []string{runc.Init, "images", "import"}

// LoadImage imports an OCI archive into machines. The archive is kept in a file until then, because it can be large and is read
// once per machine.
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
		return admission.NoMachines()
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

// importAll imports the archive into every machine, two at a time. It returns the names that the first machine reports.
func (ms *machines) importAll(ctx context.Context, machines []*machine, archive string) ([]string, error) {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(2)
	names := make([][]string, len(machines))
	for i, m := range machines {
		group.Go(func() (err error) {
			if names[i], err = ms.importInto(ctx, m, archive); err != nil {
				return status.Errorf(codes.Internal, "machine %s/%s: importing the image archive: %v", m.spec.Namespace, m.spec.Name, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return names[0], nil
}

func (ms *machines) importInto(ctx context.Context, m *machine, archive string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, importTimeout)
	defer cancel()
	file, err := os.Open(archive)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	answer, err := ms.runc.Exec(ctx, m.spec.Id, file, importCommand...)
	if err != nil {
		return nil, err
	}
	return importedNames(answer)
}

// imageName matches the characters of image references. Others could control the terminal of the person who loads the image.
var imageName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$`)

// importedNames reads the output of importCommand.
func importedNames(output []byte) ([]string, error) {
	var imported machineapi.ImportedImages
	if err := json.Unmarshal(output, &imported); err != nil {
		return nil, fmt.Errorf("expected a JSON object with the names of the images, found %.100q: %w", output, err)
	}
	if n := len(imported.Names); n == 0 || n > maxImportedNames {
		return nil, fmt.Errorf("the machine reported %d images, expected 1 to %d", n, maxImportedNames)
	}
	for _, name := range imported.Names {
		if len(name) > maxImageName || !imageName.MatchString(name) {
			return nil, fmt.Errorf("the machine reported %.100q, which is not the name of an image", name)
		}
	}
	return imported.Names, nil
}

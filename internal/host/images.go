package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/machineapi"
)

const (
	// importTimeout bounds the import in a machine, because the machine can stop to read the archive, and a client to send it.
	importTimeout = time.Hour
	// maxImportedNames and maxImageName bound the answer of a machine.
	maxImportedNames = 256
	maxImageName     = 512
)

// importCommand reads an archive from its standard input and imports it into the machine's containerd, where the kubelet finds
// the images. The client of containerd runs in the machine: the machine's users control containerd, so capstand does not
// connect to it, and does not contain the client and its dependencies.
var importCommand = []string{machineapi.InitPath, "images", "import"}

// LoadImage imports an image archive into a machine. The archive goes to the machine as it arrives: nothing of it is kept on the
// host, and a slow machine slows the client down.
func (ms *machines) LoadImage(stream hostpb.Host_LoadImageServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	m, err := ms.get(first.GetMachine())
	if err != nil {
		return err
	}
	if phase := m.snapshot().Status.Phase; phase != hostpb.MachineStatus_RUNNING {
		return refusal.Errorf(hostpb.Refusal_NOT_RUNNING, "machine %s/%s is %s: images can be loaded into running machines only", m.spec.Namespace, m.spec.Name, phase)
	}
	ctx, cancel := context.WithTimeout(stream.Context(), importTimeout)
	defer cancel()
	answer, err := ms.runc.Exec(ctx, m.spec.Id, &archiveReader{stream: stream, rest: first.GetChunk(), broken: cancel}, importCommand...)
	if err != nil {
		return importError(m.spec, err)
	}
	images, err := importedNames(answer)
	if err != nil {
		return importError(m.spec, err)
	}
	m.log.Info("Images loaded", "images", len(images))
	return stream.SendAndClose(&hostpb.LoadImageResponse{Images: images})
}

// importError distinguishes a bad archive from a bad machine.
func importError(spec *hostpb.MachineSpec, err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() == machineapi.ExitBadArchive {
		return refusal.Errorf(hostpb.Refusal_INVALID, "machine %s/%s refused the image archive: %v", spec.GetNamespace(), spec.GetName(), err)
	}
	return status.Errorf(codes.Internal, "machine %s/%s: importing the image archive: %v", spec.GetNamespace(), spec.GetName(), err)
}

// archiveReader reads the archive from the messages of a client.
type archiveReader struct {
	stream hostpb.Host_LoadImageServer
	rest   []byte
	// broken ends the import before the machine can take the end of a broken stream for the end of the archive.
	broken func()
}

// Read implements io.Reader.
func (r *archiveReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		next, err := r.stream.Recv()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				r.broken()
			}
			return 0, err
		}
		r.rest = next.GetChunk()
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// imageName matches the characters of image references. Others could control the terminal of the user who loads the image.
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

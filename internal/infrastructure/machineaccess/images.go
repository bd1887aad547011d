package machineaccess

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	ctrl "sigs.k8s.io/controller-runtime"

	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/host/hostpb"
)

const (
	// DefaultMaxImageBytes is the largest archive if the administrator has not chosen another size.
	DefaultMaxImageBytes = 8 << 30
	// imagesTimeout bounds an upload and its import.
	imagesTimeout = time.Hour
	// readTimeout is the longest time in which a client must send a part of an archive.
	readTimeout = 30 * time.Second
	// partBytes is the size of a part: the memory of an upload in the manager, beside the buffers of connections.
	partBytes = 64 << 10
)

// images passes an image archive on to the host of a machine, which imports it.
func (s *Server) images(ctx context.Context, w http.ResponseWriter, r *http.Request, caller user.Info, q request) error {
	if len(r.URL.Query()) > 0 {
		return apierrors.NewBadRequest("expected no parameters")
	}
	if r.ContentLength > s.MaxImageBytes {
		return tooLarge(s.MaxImageBytes)
	}
	t, err := s.find(ctx, q)
	if err != nil {
		return err
	}
	defer t.Close()
	ctrl.LoggerFrom(ctx).Info("Loads images into a machine", "namespace", q.namespace, "machine", q.name, "user", caller.GetName())
	s.Recorder.Eventf(t.machine, nil, corev1.EventTypeNormal, "ImageLoadStarted", "LoadImage", "User %.200s loads images into the machine", caller.GetName())
	ctx, cancel := context.WithTimeout(ctx, imagesTimeout)
	defer cancel()
	body := &archive{r.Body, http.NewResponseController(w), ctx}
	defer context.AfterFunc(ctx, body.interrupt)()
	images, err := load(ctx, t, body, s.MaxImageBytes)
	ctrl.LoggerFrom(ctx).Info("The load of images has ended", "namespace", q.namespace, "machine", q.name, "user", caller.GetName(), "images", len(images), "failure", err)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, accessapi.LoadedImages{Images: images})
}

// load sends an archive to the host of a machine and returns the names of its images. The caller ends ctx: the host does not take
// the end of a call that was cancelled for the end of the archive.
func load(ctx context.Context, t *target, archive io.Reader, most int64) ([]string, error) {
	stream, err := t.LoadImage(ctx)
	if err != nil {
		return nil, hostError(t.machine, err)
	}
	if stream.Send(&hostpb.LoadImageRequest{Machine: t.machine.Spec.ID}) == nil {
		if err := sendArchive(archive, most, stream.Send); err != nil {
			return nil, err
		}
	}
	// When the host refuses the archive, the response contains the cause. The error of Send does not.
	loaded, err := stream.CloseAndRecv()
	if err != nil {
		return nil, hostError(t.machine, err)
	}
	return loaded.GetImages(), nil
}

// sendArchive sends an archive in parts. It returns an error only if the archive is not complete, or too large. If the host stops
// to receive, its response has the cause.
func sendArchive(archive io.Reader, most int64, send func(*hostpb.LoadImageRequest) error) error {
	for total := int64(0); ; {
		part := make([]byte, partBytes) // gRPC can use a message after it was sent
		n, err := archive.Read(part)
		if total += int64(n); total > most {
			return tooLarge(most)
		}
		if n > 0 && send(&hostpb.LoadImageRequest{Chunk: part[:n]}) != nil || errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return apierrors.NewBadRequest(fmt.Sprintf("expected the rest of the archive within %s, found a broken or silent connection after %d bytes: repeat the command", readTimeout, total))
		}
	}
}

func tooLarge(most int64) error {
	return apierrors.NewRequestEntityTooLargeError(fmt.Sprintf(
		"expected an image archive of at most %d bytes; an administrator can change this with --max-image-bytes of the infrastructure provider", most))
}

// archive is the body of a request whose client must send something within readTimeout. The end of ctx ends a read.
type archive struct {
	body       io.Reader
	connection *http.ResponseController
	ctx        context.Context
}

func (a *archive) interrupt() { _ = a.connection.SetReadDeadline(time.Unix(1, 0)) }

// Read implements io.Reader.
func (a *archive) Read(p []byte) (int, error) {
	if err := a.connection.SetReadDeadline(time.Now().Add(readTimeout)); err != nil {
		return 0, err
	}
	if err := a.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := a.body.Read(p)
	if err != nil { // The server reads on while the host imports, to notice that the client has left.
		err = errors.Join(err, a.connection.SetReadDeadline(time.Time{}))
	}
	return n, err
}

package machineaccess

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	ctrl "sigs.k8s.io/controller-runtime"

	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/host/hostpb"
)

const (
	// maxLogBytes is the largest part of a log that one request gets.
	maxLogBytes = 1 << 30
	// writeTimeout is the longest time in which a client must accept a part of a stream.
	writeTimeout = 30 * time.Second
)

// log streams the log of a service.
func (s *Server) log(ctx context.Context, w http.ResponseWriter, r *http.Request, caller user.Info, q request) error {
	o, err := accessapi.ParseLogOptions(r.URL.Query())
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	t, err := s.find(ctx, q)
	if err != nil {
		return err
	}
	defer t.Close()
	ctrl.LoggerFrom(ctx).V(1).Info("Log of a machine", "namespace", q.namespace, "machine", q.name, "service", o.Service, "user", caller.GetName())
	stream, err := t.Logs(ctx, &hostpb.LogsRequest{Machine: t.machine.Spec.ID, Service: o.Service, Follow: o.Follow, TailLines: o.TailLines})
	if err != nil {
		return hostError(t.machine, err)
	}
	first, err := stream.Recv()
	if err != nil && !errors.Is(err, io.EOF) {
		return hostError(t.machine, err)
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if errors.Is(err, io.EOF) {
		return nil // the log is empty
	}
	copyLog(w, first, stream.Recv)
	return nil
}

// copyLog copies a log to the client. The client of an incomplete log gets a broken connection, because the status was sent.
func copyLog(w http.ResponseWriter, chunk *hostpb.LogChunk, next func() (*hostpb.LogChunk, error)) {
	controller := http.NewResponseController(w)
	defer func() { _ = controller.SetWriteDeadline(time.Time{}) }() // other requests use the connection after this one
	left, err := maxLogBytes, error(nil)
	for ; err == nil; chunk, err = next() {
		if left -= len(chunk.GetData()); left < 0 {
			panic(http.ErrAbortHandler)
		}
		_ = controller.SetWriteDeadline(time.Now().Add(writeTimeout))
		if _, err := w.Write(chunk.GetData()); err != nil {
			return // the client is gone
		}
		_ = controller.Flush()
	}
	if !errors.Is(err, io.EOF) {
		panic(http.ErrAbortHandler)
	}
}

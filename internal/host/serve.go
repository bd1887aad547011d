package host

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/tracing"
)

// Socket is the path where capstand listens. Any client that can connect has root access to the host, because capstand
// creates privileged machines.
type Socket struct {
	Path string
	// UID and GID own the socket; mode 0600, and 0660 when a group is given. -1 leaves root's.
	UID, GID int
}

// Listen listens on the socket. It replaces the file that a killed capstand left behind.
func (s Socket) Listen() (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(s.Path), 0o755); err != nil {
		return nil, err
	}
	if err := atomicfile.Remove(s.Path); err != nil {
		return nil, err
	}
	listener, err := listenPrivately(s.Path)
	if err != nil {
		return nil, err
	}
	mode := os.FileMode(0o600)
	if s.GID >= 0 {
		mode = 0o660
	}
	if err := errors.Join(os.Chown(s.Path, s.UID, s.GID), os.Chmod(s.Path, mode)); err != nil {
		_ = listener.Close()
		return nil, err
	}
	return listener, nil
}

// listenPrivately listens on a socket to which only root can connect. The kernel gives the file the mode that the socket has before. The umask
// would apply to all threads, which write the files of machines meanwhile.
func listenPrivately(path string) (net.Listener, error) {
	config := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) (err error) {
		if e := conn.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); e != nil {
			return e
		}
		return err
	}}
	return config.Listen(context.Background(), "unix", path)
}

// Serve answers on listener until ctx is done. Options contain the credentials of a TCP listener. A unix socket needs none,
// because the kernel checks which users can connect.
func (h *Host) Serve(ctx context.Context, listener net.Listener, options ...grpc.ServerOption) error {
	options = append(append(options, hostpb.DefaultKeepalive.Server()...), grpc.UnaryInterceptor(logCalls(h.log)), tracing.ServerOption())
	server := grpc.NewServer(options...)
	hostpb.RegisterHostServer(server, h)
	if h.config.Credentials != nil {
		hostpb.RegisterCredentialsServer(server, h.config.Credentials)
	}
	stop := context.AfterFunc(ctx, func() {
		// Streams of logs and changes can last forever, so they are cut.
		force := time.AfterFunc(2*time.Second, server.Stop)
		server.GracefulStop()
		force.Stop()
	})
	defer stop()
	return server.Serve(listener)
}

// logCalls logs failed calls, and all calls at level 4: the method and the error, but never the request, which can contain secrets.
func logCalls(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		res, err := handler(ctx, req)
		if err != nil {
			log.Warn("Call failed", "method", info.FullMethod, "error", err)
		} else {
			log.Debug("Call served", "method", info.FullMethod)
		}
		return res, err
	}
}

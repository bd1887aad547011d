package machineaccess

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/apiserver/pkg/authentication/user"
	remotecommandclient "k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	ctrl "sigs.k8s.io/controller-runtime"

	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
)

// idleTimeout is the longest time in which a command neither reads nor writes.
const idleTimeout = time.Hour

// exec runs a command in a machine. Its streams are channels of a WebSocket, as those of `kubectl exec`.
func (s *Server) exec(ctx context.Context, w http.ResponseWriter, r *http.Request, caller user.Info, q request) error {
	o, err := accessapi.ParseExecOptions(r.URL.Query())
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	if !wsstream.IsWebSocketRequestWithStreamCloseProtocol(r) {
		return apierrors.NewBadRequest("expected a WebSocket with the protocol " + remotecommand.StreamProtocolV5Name)
	}
	t, err := s.find(ctx, q)
	if err != nil {
		return err
	}
	defer t.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	command, err := start(ctx, t, o)
	if err != nil {
		return err
	}
	s.record(ctx, t, o, caller)
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{remotecommand.StreamProtocolV5Name: {Binary: true, Channels: channels(o)}})
	conn.SetIdleTimeout(idleTimeout)
	_, streams, err := conn.Open(w, r)
	if err != nil {
		return nil //nolint:nilerr // The WebSocket has answered.
	}
	defer func() { _ = conn.Close() }()
	// Clients send nothing on this channel, so its end is the end of the connection.
	go func() {
		_, _ = io.Copy(io.Discard, streams[remotecommand.StreamErr])
		cancel()
	}()
	go command.sendStdin(streams[remotecommand.StreamStdIn])
	go command.sendSizes(streams[remotecommand.StreamResize])
	result := command.receive(streams[remotecommand.StreamStdOut], streams[remotecommand.StreamStdErr])
	if err := json.NewEncoder(streams[remotecommand.StreamErr]).Encode(result); err != nil {
		ctrl.LoggerFrom(ctx).V(1).Info("The client left before the result of its command", "reason", err.Error())
	}
	return nil
}

// record names the user who runs something in a machine. The command itself can contain secrets.
func (s *Server) record(ctx context.Context, t *target, o accessapi.ExecOptions, caller user.Info) {
	what := "a command"
	if len(o.Command) == 0 {
		what = "a shell"
	}
	ctrl.LoggerFrom(ctx).Info("Started "+what+" in a machine", "namespace", t.machine.Namespace, "machine", t.machine.Name, "user", caller.GetName())
	s.Recorder.Eventf(t.machine, nil, corev1.EventTypeNormal, "CommandStarted", "Exec", "User %.200s started %s in the machine", caller.GetName(), what)
}

// channels of the WebSocket, in the order of package remotecommand. Data of a channel that nobody reads would block the others.
func channels(o accessapi.ExecOptions) []wsstream.ChannelType {
	out := []wsstream.ChannelType{wsstream.IgnoreChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.ReadWriteChannel, wsstream.IgnoreChannel}
	if o.Stdin {
		out[remotecommand.StreamStdIn] = wsstream.ReadChannel
	}
	if o.TTY {
		out[remotecommand.StreamResize] = wsstream.ReadChannel
	}
	return out
}

// command is a command that runs in a machine.
type command struct {
	stream hostpb.Host_ExecClient
	mu     sync.Mutex // A gRPC stream has one sender at a time.
}

// start starts the command, or returns why the host refuses it.
func start(ctx context.Context, t *target, o accessapi.ExecOptions) (*command, error) {
	stream, err := t.Exec(ctx)
	if err != nil {
		return nil, hostError(t.machine, err)
	}
	c := &command{stream: stream}
	c.send(&hostpb.ExecRequest{Content: &hostpb.ExecRequest_Start{Start: &hostpb.ExecStart{
		Machine: t.machine.Spec.ID, Command: o.Command, Stdin: o.Stdin, Tty: o.TTY, Term: o.Term,
	}}})
	// The response contains the cause of a failure. The error of Send does not.
	first, err := stream.Recv()
	if err != nil {
		return nil, hostError(t.machine, err)
	}
	if !first.GetStarted() {
		return nil, apierrors.NewInternalError(errors.New("capstand has not confirmed the start of the command"))
	}
	return c, nil
}

func (c *command) send(r *hostpb.ExecRequest) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stream.Send(r) == nil
}

func (c *command) sendStdin(from io.Reader) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 && !c.send(&hostpb.ExecRequest{Content: &hostpb.ExecRequest_Stdin{Stdin: append([]byte{}, buffer[:n]...)}}) {
			return
		}
		if err != nil {
			c.send(&hostpb.ExecRequest{Content: &hostpb.ExecRequest_StdinClosed{StdinClosed: true}})
			return
		}
	}
}

func (c *command) sendSizes(from io.Reader) {
	for decoder := json.NewDecoder(from); ; {
		var size remotecommandclient.TerminalSize
		if decoder.Decode(&size) != nil ||
			!c.send(&hostpb.ExecRequest{Content: &hostpb.ExecRequest_Size{Size: &hostpb.TerminalSize{Columns: uint32(size.Width), Rows: uint32(size.Height)}}}) {
			return
		}
	}
}

// receive copies the output of the command and returns its result, in the form that `kubectl exec` expects.
func (c *command) receive(stdout, stderr io.Writer) *metav1.Status {
	for {
		response, err := c.stream.Recv()
		switch {
		case err != nil:
			return &apierrors.NewInternalError(errors.New(connections.Message(err))).ErrStatus
		case response.GetContent() == nil:
			continue // of a newer capstand
		}
		switch content := response.GetContent().(type) {
		case *hostpb.ExecResponse_Stdout:
			_, err = stdout.Write(content.Stdout)
		case *hostpb.ExecResponse_Stderr:
			_, err = stderr.Write(content.Stderr)
		case *hostpb.ExecResponse_ExitCode:
			return exitStatus(content.ExitCode)
		}
		if err != nil {
			return &apierrors.NewInternalError(err).ErrStatus
		}
	}
}

func exitStatus(code int32) *metav1.Status {
	if code == 0 {
		return &metav1.Status{Status: metav1.StatusSuccess}
	}
	return &metav1.Status{
		Status: metav1.StatusFailure, Reason: remotecommand.NonZeroExitCodeReason,
		Message: fmt.Sprintf("the command ended with exit code %d", code),
		Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: remotecommand.ExitCodeCauseType, Message: fmt.Sprint(code)}}},
	}
}

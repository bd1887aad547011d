package host

import (
	"context"
	"io"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/host/runc"
)

// Exec runs a command in a machine for a person.
func (ms *machines) Exec(stream hostpb.Host_ExecServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if err := admission.CheckExec(start); err != nil {
		return err
	}
	m, err := ms.get(start.GetMachine())
	if err != nil {
		return err
	}
	now := m.snapshot()
	if phase := now.Status.Phase; phase != hostpb.MachineStatus_RUNNING {
		return refusal.Errorf(hostpb.Refusal_NOT_RUNNING, "machine %s/%s is %s: commands run in running machines only", m.spec.Namespace, m.spec.Name, phase)
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	session, err := ms.runc.Session(ctx, m.spec.Id, runc.Command{
		Args: start.GetCommand(), Term: start.GetTerm(), TTY: start.GetTty(), KubernetesVersion: now.GetSpec().GetKubernetesVersion(),
	})
	if err != nil {
		return status.Errorf(codes.Internal, "starting the command: %v", err)
	}
	m.log.Info("Command started", "tty", start.GetTty())
	code, err := attach(stream, session, start.GetStdin() || start.GetTty(), cancel)
	if err != nil {
		return status.Errorf(codes.Aborted, "the command was killed: %v", err)
	}
	return stream.Send(&hostpb.ExecResponse{Content: &hostpb.ExecResponse_ExitCode{ExitCode: int32(code)}})
}

// attach connects the streams of a command with a client until the command ends.
func attach(stream hostpb.Host_ExecServer, s *runc.Session, stdin bool, kill func()) (int, error) {
	sender := &execSender{stream: stream}
	err := sender.send(&hostpb.ExecResponse{Content: &hostpb.ExecResponse_Started{Started: true}})
	if !stdin {
		_ = s.CloseStdin()
	}
	if err != nil {
		kill()
	}
	go feed(stream, s, stdin)
	var outputs sync.WaitGroup
	outputs.Go(func() {
		sender.copy(s.Stdout, kill, func(b []byte) *hostpb.ExecResponse {
			return &hostpb.ExecResponse{Content: &hostpb.ExecResponse_Stdout{Stdout: b}}
		})
	})
	if s.Stderr != nil {
		outputs.Go(func() {
			sender.copy(s.Stderr, kill, func(b []byte) *hostpb.ExecResponse {
				return &hostpb.ExecResponse{Content: &hostpb.ExecResponse_Stderr{Stderr: b}}
			})
		})
	}
	outputs.Wait()
	return s.Wait()
}

// feed passes the input of the client on until the call ends.
func feed(stream hostpb.Host_ExecServer, s *runc.Session, stdin bool) {
	for {
		request, err := stream.Recv()
		if err != nil {
			return // The end of the call kills the command.
		}
		switch content := request.GetContent().(type) {
		case *hostpb.ExecRequest_Stdin:
			if stdin {
				_, _ = s.Stdin.Write(content.Stdin) // A command may end before it has read everything.
			}
		case *hostpb.ExecRequest_StdinClosed:
			_ = s.CloseStdin()
		case *hostpb.ExecRequest_Size:
			_ = s.Resize(uint16(min(content.Size.GetColumns(), 1<<15)), uint16(min(content.Size.GetRows(), 1<<15)))
		}
	}
}

// execSender sends from several goroutines: a gRPC stream has one sender at a time.
type execSender struct {
	stream hostpb.Host_ExecServer
	mu     sync.Mutex
}

func (e *execSender) send(r *hostpb.ExecResponse) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.stream.Send(r)
}

// copy sends the data that it reads. It reads to the end after a failure too, so that the command does not wait.
func (e *execSender) copy(from io.Reader, failed func(), response func([]byte) *hostpb.ExecResponse) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 && e.send(response(append([]byte{}, buffer[:n]...))) != nil {
			failed()
		}
		if err != nil { // A terminal ends with EIO.
			return
		}
	}
}

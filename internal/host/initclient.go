package host

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/machineapi"
)

const (
	// maxCertificates and maxCertificateName bound the report of a machine, because its users may have replaced PID 1.
	maxCertificates    = 64
	maxCertificateName = 128
)

// certificateStatuses converts the certificates that a machine reports. It omits names that are too long for a label.
func certificateStatuses(s machineapi.Status) []*hostpb.CertificateStatus {
	var all []*hostpb.CertificateStatus
	for _, c := range s.Certificates[:min(len(s.Certificates), maxCertificates)] {
		if c.Name == "" || len(c.Name) > maxCertificateName || !utf8.ValidString(c.Name) {
			continue
		}
		all = append(all, &hostpb.CertificateStatus{Name: c.Name, NotBefore: timestamppb.New(c.NotBefore), NotAfter: timestamppb.New(c.NotAfter)})
	}
	return all
}

// bootstrapStates maps the progress that a machine reports.
var bootstrapStates = map[machineapi.Bootstrap]hostpb.MachineStatus_Bootstrap{
	machineapi.Waiting:   hostpb.MachineStatus_WAITING,
	machineapi.Started:   hostpb.MachineStatus_STARTED,
	machineapi.Succeeded: hostpb.MachineStatus_SUCCEEDED,
	machineapi.Failed:    hostpb.MachineStatus_BOOTSTRAP_FAILED,
}

// serviceStatuses converts the services that a machine reports.
func serviceStatuses(s machineapi.Status) []*hostpb.ServiceStatus {
	var all []*hostpb.ServiceStatus
	for _, service := range s.Services {
		all = append(all, &hostpb.ServiceStatus{
			Name: service.Name, State: string(service.State), Restarts: service.Restarts,
			Message: service.Message, Pid: service.PID,
		})
	}
	return all
}

// Pauses between two attempts to connect to a machine's init.
const (
	firstInitPause   = 25 * time.Millisecond
	longestInitPause = time.Second
)

// watchInit calls f with each status of the machine's init until ctx is done. The socket appears soon after PID 1 starts,
// and a broken connection is opened again. watchInit retries in a loop, because inotify reports when the socket's file
// appears, but not when a process listens on it.
func watchInit(ctx context.Context, runDir string, f func(machineapi.Status)) {
	pauses := backoff.Doubling(firstInitPause, longestInitPause)
	for ctx.Err() == nil {
		_ = streamInit(ctx, runDir, func(s machineapi.Status) {
			pauses = backoff.Doubling(firstInitPause, longestInitPause)
			f(s)
		})
		select {
		case <-ctx.Done():
		case <-time.After(pauses.Step()):
		}
	}
}

// streamInit reads one connection to its end.
func streamInit(ctx context.Context, runDir string, f func(machineapi.Status)) error {
	dir, err := os.Open(runDir)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dialInit(ctx, dir) },
	}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://init/v1/status?watch=true", nil)
	if err != nil {
		return err
	}
	res, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var s machineapi.Status
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			return fmt.Errorf("reading the status of capstan-init: %w", err)
		}
		f(s)
	}
	return lines.Err()
}

// dialInit connects to init's socket. It opens the socket's file first, and connects through the descriptor: the path of a
// socket is limited to 107 characters, and the machine may have replaced the file by a link to a socket of the host.
func dialInit(ctx context.Context, dir *os.File) (net.Conn, error) {
	fd, err := unix.Openat(int(dir.Fd()), "init.sock", unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the socket of capstan-init: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	var d net.Dialer
	return d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d", fd))
}

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

	"golang.org/x/time/rate"
	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/unixsocket"
	"capstan.dev/capstan/internal/machineapi"
)

const (
	// The bounds of the report of a machine, because its users may have replaced PID 1. Lengths are in bytes.
	maxCertificates = 64
	maxServices     = 64
	maxName         = 128
	maxMessage      = 4096
)

// reportBurst is how many reports capstand reads without a delay. A start causes fewer.
const reportBurst = 100

// newReportLimit bounds how often capstand reads the state of a machine or of a balancer, for the same reason.
func newReportLimit() *rate.Limiter { return rate.NewLimiter(10, reportBurst) }

// usable reports whether a name of a report can be a label.
func usable(name string) bool { return name != "" && len(name) <= maxName && utf8.ValidString(name) }

// certificateStatuses converts the certificates that a machine reports. It omits names that are too long for a label.
func certificateStatuses(s machineapi.Status) []*hostpb.CertificateStatus {
	var all []*hostpb.CertificateStatus
	for _, c := range s.Certificates[:min(len(s.Certificates), maxCertificates)] {
		if !usable(c.Name) {
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

// serviceStatuses converts the services that a machine reports. It omits names that are too long for a label.
func serviceStatuses(s machineapi.Status) []*hostpb.ServiceStatus {
	var all []*hostpb.ServiceStatus
	for _, service := range s.Services[:min(len(s.Services), maxServices)] {
		if !usable(service.Name) {
			continue
		}
		all = append(all, &hostpb.ServiceStatus{
			Name: service.Name, State: oneLine(string(service.State), maxName), Restarts: service.Restarts,
			Message: oneLine(service.Message, maxMessage), Pid: service.PID,
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
	watchInitAfter(ctx, runDir, f, func(pause time.Duration) { rest(ctx, nil, pause) })
}

// watchInitAfter is watchInit with a function that waits before the next attempt.
func watchInitAfter(ctx context.Context, runDir string, f func(machineapi.Status), wait func(time.Duration)) {
	pauses, reports := backoff.Doubling(firstInitPause, longestInitPause), newReportLimit()
	for ctx.Err() == nil {
		_ = streamInit(ctx, runDir, func(s machineapi.Status) {
			pauses = backoff.Doubling(firstInitPause, longestInitPause)
			if reports.Wait(ctx) == nil {
				f(s)
			}
		})
		wait(pauses.Step())
	}
}

// streamInit reads one connection to its end.
func streamInit(ctx context.Context, runDir string, f func(machineapi.Status)) error {
	client, end, err := initClient(runDir)
	if err != nil {
		return err
	}
	defer end()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://init/v1/status?watch=true", nil)
	if err != nil {
		return err
	}
	res, err := client.Do(req)
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

// initClient returns a client of the socket of a machine's PID 1, and a function that ends it.
func initClient(runDir string) (client *http.Client, end func(), err error) {
	dir, err := os.Open(runDir)
	if err != nil {
		return nil, nil, err
	}
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return unixsocket.Dial(ctx, dir, machineapi.InitSocket)
		},
	}
	return &http.Client{Transport: transport}, func() { transport.CloseIdleConnections(); _ = dir.Close() }, nil
}

package embedded

import (
	"bufio"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// Status is the status of a running plane.
type Status struct {
	PID int `json:"pid"`
	// Unit of systemd that runs the plane; empty when `capstan up` started it.
	Unit string `json:"unit,omitempty"`
	// Ready: all components have been ready at the same time.
	Ready bool `json:"ready"`
	// Error is the reason why the last start failed, and whether another attempt waits or is in progress; empty after a start without an error.
	Error   string `json:"error,omitempty"`
	Root    string `json:"root"`
	Assets  string `json:"assets"`
	Build   string `json:"build"`
	Version string `json:"version"`
	// Settings are those that the plane was started with.
	Settings
	Server     string          `json:"server"`
	Installed  bool            `json:"installed"`
	Components []ProcessStatus `json:"components"`
	// EtcdAlarms are the active alarms of etcd, for example NOSPACE; empty without alarms.
	EtcdAlarms string `json:"etcdAlarms,omitempty"`
	// CertificatesExpiring lists the files of leaf certificates that are due for renewal, with their expiry.
	CertificatesExpiring []string `json:"certificatesExpiring,omitempty"`
	// AuthoritiesExpiring lists the files of authorities after two thirds of their validity, with their expiry. The plane does not renew
	// them.
	AuthoritiesExpiring []string `json:"authoritiesExpiring,omitempty"`
	// BackupStatus is the status of the scheduled backups.
	BackupStatus BackupStatus `json:"backupStatus,omitzero"`
}

// Problem returns the reasons why the plane did not start, and why components do not run; "" without a problem. Another attempt to start
// can wait for a component that has nothing to do with the failure of the last one.
func (s Status) Problem() string {
	var problems []string
	if s.Error != "" {
		problems = append(problems, s.Error)
	}
	for _, c := range s.Components {
		if c.State == ProcessBackoff {
			problems = append(problems, c.Name+": "+c.Message)
		}
	}
	return strings.Join(problems, "; ")
}

// Log names the log of the daemon: the journal if systemd runs it. The components have their own logs in any case.
func (s Status) Log() string {
	if s.Unit != "" {
		return "`journalctl -u " + s.Unit + "`"
	}
	return Layout{Root: s.Root}.Log("plane")
}

// board stores the status and notifies watchers of each change.
type board struct {
	mu      sync.Mutex
	status  Status
	changed chan struct{} // closed at the next change
}

func newBoard(s Status) *board { return &board{status: s, changed: make(chan struct{})} }

func (b *board) update(change func(*Status)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change(&b.status)
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *board) component(p ProcessStatus) {
	b.update(func(s *Status) {
		i := slices.IndexFunc(s.Components, func(c ProcessStatus) bool { return c.Name == p.Name })
		if i < 0 {
			s.Components = append(s.Components, p)
			return
		}
		s.Components[i] = p
	})
}

// get returns the status, and a channel that is closed at the next change.
func (b *board) get() (Status, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.status
	s.Components = slices.Clone(s.Components)
	return s, b.changed
}

// await returns true when the status meets the condition, and false when ctx ends first.
func (b *board) await(ctx context.Context, is func(Status) bool) bool {
	for {
		status, changed := b.get()
		if is(status) {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// serve answers GET /v1/status. With ?watch=true it sends a line at once and at each change.
func (b *board) serve(path string) (*http.Server, error) {
	if err := os.RemoveAll(path); err != nil { // left by a killed plane; this process has the lock
		return nil, err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, r *http.Request) {
		encoder := json.NewEncoder(w)
		for {
			status, changed := b.get()
			if encoder.Encode(status) != nil || r.URL.Query().Get("watch") == "" {
				return
			}
			w.(http.Flusher).Flush()
			select {
			case <-changed:
			case <-r.Context().Done():
				return
			}
		}
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = server.Serve(listener) }()
	return server, nil
}

// watchStatus calls the function with the status of the running plane, at once and at each change, until the function returns
// false. The end of the plane is an error.
func watchStatus(ctx context.Context, l Layout, next func(Status) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", l.StatusSocket())
	}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://plane/v1/status?watch=true", nil)
	if err != nil {
		return err
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	decoder := json.NewDecoder(bufio.NewReader(response.Body))
	for {
		var s Status
		if err := decoder.Decode(&s); err != nil {
			return err
		}
		if !next(s) {
			return nil
		}
	}
}

// GetStatus returns the status of the running plane.
func GetStatus(ctx context.Context, l Layout) (Status, error) {
	var status Status
	err := watchStatus(ctx, l, func(s Status) bool { status = s; return false })
	return status, err
}

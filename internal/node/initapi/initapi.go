// Package initapi is the interface of PID 1 on its unix socket: what capstand, `capstan-init node up`
// and `capstan-init service` see of it.
//
// Layer: contract.
package initapi

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// Socket is where PID 1 listens, a folder that the machine shares with capstand.
const Socket = "/run/capstan/init.sock"

// Bootstrap is how far the bootstrap data has been applied.
type Bootstrap string

const (
	// Waiting: no bootstrap data was given yet.
	Waiting Bootstrap = "Waiting"
	// Started: the bootstrap data is being applied.
	Started Bootstrap = "Started"
	// Succeeded: it was applied and wrote the sentinel file.
	Succeeded Bootstrap = "Succeeded"
	// Failed: a step failed; BootstrapMessage names it.
	Failed Bootstrap = "Failed"
)

// State of a service.
type State string

const (
	// StateWaiting for the services that it comes after.
	StateWaiting State = "waiting"
	// StateStarting: the process runs and was not ready yet.
	StateStarting State = "starting"
	// StateRunning: the process runs, was ready and does not answer its probe now.
	StateRunning State = "running"
	// StateReady: the process runs and answers its probe, if it has one.
	StateReady State = "ready"
	// StateBackoff: the process ended and is started again in a moment.
	StateBackoff State = "backoff"
	// StateStopped on request.
	StateStopped State = "stopped"
)

// Service is the state of one service.
type Service struct {
	Name     string `json:"name"`
	State    State  `json:"state"`
	Restarts int    `json:"restarts"`
	Message  string `json:"message"`
	PID      int    `json:"pid"`
}

// Status is what PID 1 says of its machine. One JSON document a line in the stream.
type Status struct {
	Bootstrap        Bootstrap `json:"bootstrap"`
	BootstrapMessage string    `json:"bootstrapMessage"`
	Services         []Service `json:"services"`
	// Certificates in use, sorted by name.
	Certificates []Certificate `json:"certificates,omitempty"`
}

// Certificate is a leaf certificate of the machine.
type Certificate struct {
	// Name of the file without its suffix, below its folder: apiserver, etcd/peer, clients/kube-proxy, kubelet-client.
	Name      string    `json:"name"`
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
}

// Client talks to PID 1.
type Client struct{ http *http.Client }

// NewClient returns a client of the socket.
func NewClient(socket string) *Client {
	return &Client{&http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}}
}

// Watch calls see with the status at once and at each change, until see returns false or ctx ends.
// A connection that breaks is an error.
func (c *Client) Watch(ctx context.Context, see func(Status) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	body, err := c.do(ctx, http.MethodGet, "/v1/status?watch=true")
	if err != nil {
		return err
	}
	defer body.Close()
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var status Status
		if err := json.Unmarshal(lines.Bytes(), &status); err != nil {
			return fmt.Errorf("status of init: %w", err)
		}
		if !see(status) {
			return nil
		}
	}
	return errors.Join(ctx.Err(), lines.Err(), errors.New("the connection to init was closed"))
}

// Status returns the status of now.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var status Status
	body, err := c.do(ctx, http.MethodGet, "/v1/status")
	if err != nil {
		return status, err
	}
	defer body.Close()
	err = json.NewDecoder(body).Decode(&status)
	return status, err
}

// Reload makes PID 1 read the service files again: new services are started, changed ones restarted,
// those that are gone stopped.
func (c *Client) Reload(ctx context.Context) error { return c.post(ctx, "/v1/reload") }

// Service starts, stops or restarts a service, or sends it SIGHUP (reload).
func (c *Client) Service(ctx context.Context, name, action string) error {
	return c.post(ctx, "/v1/services/"+name+"/"+action)
}

// WaitReady waits until all the named services are ready.
func (c *Client) WaitReady(ctx context.Context, timeout time.Duration, names ...string) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var missing []string
	err := c.Watch(ctx, func(s Status) bool {
		missing = s.NotReady(names)
		return len(missing) > 0
	})
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("services are not ready after %s: %s; see /var/log/capstan", timeout, strings.Join(missing, "; "))
	}
	return err
}

// NotReady describes those of the named services that are not ready.
func (s Status) NotReady(names []string) []string {
	states := map[string]Service{}
	for _, service := range s.Services {
		states[service.Name] = service
	}
	var missing []string
	for _, name := range names {
		if service := states[name]; service.State != StateReady {
			missing = append(missing, strings.TrimSpace(fmt.Sprintf("%s: %s %s", name, service.State, service.Message)))
		}
	}
	return missing
}

func (c *Client) post(ctx context.Context, path string) error {
	body, err := c.do(ctx, http.MethodPost, path)
	if err != nil {
		return err
	}
	return body.Close()
}

func (c *Client) do(ctx context.Context, method, path string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://init"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("capstan-init (PID 1) does not answer: %w", err)
	}
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return nil, fmt.Errorf("%s %s: %s", method, path, strings.TrimSpace(string(text)))
	}
	return resp.Body, nil
}

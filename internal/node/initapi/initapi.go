// Package initapi is the client of PID 1's unix socket for `capstan-init node up` and `capstan-init service`. Package
// machineapi defines the documents.
//
// Layer: contract. Allowed imports: api, library.
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
	"net/url"
	"strings"

	"capstan.dev/capstan/internal/machineapi"
)

// Socket is the socket of PID 1, in a folder that the machine shares with capstand.
const Socket = machineapi.SharedFolder + "/" + machineapi.InitSocket

// The state of a machine is defined in package machineapi, because capstand reads it too.
type (
	// Bootstrap is the progress of the bootstrap data.
	Bootstrap = machineapi.Bootstrap
	// State of a service.
	State = machineapi.State
	// Service is the state of one service.
	Service = machineapi.Service
	// Status is the state of a machine.
	Status = machineapi.Status
	// Certificate is a leaf certificate of the machine.
	Certificate = machineapi.Certificate
)

// Values of Bootstrap and State.
const (
	Waiting       = machineapi.Waiting
	Started       = machineapi.Started
	Succeeded     = machineapi.Succeeded
	Failed        = machineapi.Failed
	StateWaiting  = machineapi.StateWaiting
	StateStarting = machineapi.StateStarting
	StateRunning  = machineapi.StateRunning
	StateReady    = machineapi.StateReady
	StateBackoff  = machineapi.StateBackoff
	StateStopped  = machineapi.StateStopped
)

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
	body, err := c.do(ctx, http.MethodGet, "/v1/status?watch=true", nil)
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

// Status returns the current status.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var status Status
	body, err := c.do(ctx, http.MethodGet, "/v1/status", nil)
	if err != nil {
		return status, err
	}
	defer body.Close()
	err = json.NewDecoder(body).Decode(&status)
	return status, err
}

// Reload makes PID 1 read the service files again. It starts new services, restarts changed ones, and stops services without a
// file.
func (c *Client) Reload(ctx context.Context) error { return c.post(ctx, "/v1/reload") }

// Service starts, stops or restarts a service, or sends it SIGHUP (reload).
func (c *Client) Service(ctx context.Context, name, action string) error {
	return c.post(ctx, "/v1/services/"+name+"/"+action)
}

// Stalled reports why the bootstrap makes no progress; an empty reason means that it does again.
func (c *Client) Stalled(ctx context.Context, reason string) error {
	body, err := c.do(ctx, http.MethodPost, machineapi.StalledPath, strings.NewReader(reason))
	if err != nil {
		return err
	}
	return body.Close()
}

// LimitVolume limits the folder of a local volume to size bytes.
func (c *Client) LimitVolume(ctx context.Context, name string, size int64) error {
	return c.post(ctx, fmt.Sprintf("/v1/volumes/%s/limit?bytes=%d", name, size))
}

// UnlimitVolume removes the limits of the folder of a local volume that goes.
func (c *Client) UnlimitVolume(ctx context.Context, name string) error {
	return c.post(ctx, "/v1/volumes/"+name+"/unlimit")
}

// ProvideDevice makes a block volume of size bytes and its device.
func (c *Client) ProvideDevice(ctx context.Context, name string, size int64) error {
	return c.post(ctx, fmt.Sprintf("/v1/block-volumes/%s/provide?bytes=%d", name, size))
}

// WithdrawDevice releases the device of a block volume that goes.
func (c *Client) WithdrawDevice(ctx context.Context, name string) error {
	return c.post(ctx, "/v1/block-volumes/"+name+"/withdraw")
}

// HoldDevice keeps the block device at a path open in the kernel with a loop device.
func (c *Client) HoldDevice(ctx context.Context, path string) error {
	return c.post(ctx, "/v1/held-devices/hold?path="+url.QueryEscape(path))
}

// ReleaseDevice ends the hold that has a loop device.
func (c *Client) ReleaseDevice(ctx context.Context, loop string) error {
	return c.post(ctx, "/v1/held-devices/release?path="+url.QueryEscape(loop))
}

// WaitReady waits until all the named services are ready, or until ctx ends.
func (c *Client) WaitReady(ctx context.Context, names ...string) error {
	var missing []string
	err := c.Watch(ctx, func(s Status) bool {
		missing = s.NotReady(names)
		return len(missing) > 0
	})
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("services are not ready: %s; see /var/log/capstan: %w", strings.Join(missing, "; "), context.Cause(ctx))
	}
	return err
}

func (c *Client) post(ctx context.Context, path string) error {
	body, err := c.do(ctx, http.MethodPost, path, nil)
	if err != nil {
		return err
	}
	return body.Close()
}

func (c *Client) do(ctx context.Context, method, path string, content io.Reader) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://init"+path, content)
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

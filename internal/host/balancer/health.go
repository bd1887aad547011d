package balancer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"golang.org/x/sys/unix"
)

// watchHealth checks a backend until it is removed. There is no event for an API server's readiness,
// hence the clock.
func (b *Balancer) watchHealth(backend *backend) {
	client := &http.Client{
		Timeout: b.timing.CheckTimeout,
		Transport: &http.Transport{
			// A backend that is not there yet answers nothing at all: ask again soon, rather than wait for
			// the kernel to ask again, later and later.
			DialContext: (&net.Dialer{Timeout: 2 * b.timing.FirstChecks}).DialContext,
			// Health is no secret and nothing is sent: the certificate matters to the clients, whose
			// connections pass through untouched.
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // as said
			DisableKeepAlives: true,                                  // a new connection tells whether new connections work
		},
	}
	interval, failed := b.timing.FirstChecks, 0
	for backend.removed.Err() == nil {
		err := check(backend.removed, client, backend.Address)
		if err == nil {
			interval, failed = b.timing.Checks, 0
		} else {
			failed++
		}
		if err == nil || failed >= failures || errors.Is(err, unix.ECONNREFUSED) {
			if b.pool.setHealth(backend, err == nil) {
				b.log.Info("backend", "name", backend.Name, "address", backend.Address, "healthy", err == nil, "error", err)
				b.report()
			}
		}
		select {
		case <-backend.removed.Done():
		case <-time.After(interval):
		}
	}
}

// check asks an API server whether it is ready. One that wants to know who asks (anonymous access
// can be turned off) answers with 401 or 403: it serves, and more cannot be known.
func check(ctx context.Context, client *http.Client, address string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+"/readyz", nil)
	if err != nil {
		return err
	}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 64<<10))
	switch res.StatusCode {
	case http.StatusOK, http.StatusUnauthorized, http.StatusForbidden:
		return nil
	}
	return fmt.Errorf("readyz answered %s", res.Status)
}

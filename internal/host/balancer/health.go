package balancer

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"time"

	"golang.org/x/sys/unix"
)

// watchHealth checks a backend until it is removed. It polls, because an API server sends no event when it becomes ready.
func (b *Balancer) watchHealth(backend *backend) {
	client := healthClient(b.timing)
	healthy, failed := false, 0 // whether it was healthy before
	answered := 0               // how often it answered that it is not ready
	var unreached time.Time     // since when no attempt to connect was answered
	for backend.removed.Err() == nil {
		began := time.Now()
		err := check(backend.removed, client, backend.Address)
		switch {
		case !unreachable(err):
			unreached = time.Time{}
		case unreached.IsZero():
			unreached = began
		case time.Since(unreached) < b.timing.CutOff:
		case answers(backend.removed, backend.Address, b.timing.CutOff/3):
			unreached = time.Time{}
		default:
			b.pool.cut(backend)
		}
		if err == nil {
			healthy, failed = true, 0
		} else {
			failed++
		}
		if isNotReady(err) {
			answered++
		}
		if err == nil || failed >= failures || errors.Is(err, unix.ECONNREFUSED) {
			if b.pool.setHealth(backend, err == nil) {
				b.log.Info("The health of a backend changed", "name", backend.Name, "address", backend.Address, "healthy", err == nil, "error", err)
				b.report()
			}
		}
		select {
		case <-backend.removed.Done():
		case <-time.After(b.timing.pause(healthy, err, answered)):
		}
	}
}

// mostAnswered bounds the frequent checks of a backend that never becomes ready, for example of an API server without etcd: each check is a
// TLS handshake.
const mostAnswered = 600

// pause is the time until the next check of a backend that was healthy before, or never, and whose last check had an error. answered is how
// often it has answered that it is not ready.
func (t Timing) pause(healthy bool, err error, answered int) time.Duration {
	switch {
	case healthy:
		return t.Checks
	case isNotReady(err) && answered <= mostAnswered:
		return t.AnsweredChecks
	}
	return t.FirstChecks
}

// answers reports whether a backend accepts a connection. The time of a check is too short for a packet that is sent again, or for a slow
// path between hosts. So the balancer asks with more patience before it ends connections that may work.
func answers(ctx context.Context, address string, within time.Duration) bool {
	conn, err := (&net.Dialer{Timeout: within}).DialContext(ctx, "tcp", address)
	if err != nil {
		return !unreachable(err)
	}
	return conn.Close() == nil
}

// unreachable reports whether the kernel of a backend did not answer a check in time.
func unreachable(err error) bool {
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "dial" {
		return false
	}
	return op.Timeout() || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETUNREACH)
}

func healthClient(timing Timing) *http.Client {
	return &http.Client{
		Timeout: timing.CheckTimeout,
		// A machine must not make the balancer send requests to other addresses, for example to the loopback device of the host.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			// The address of a machine that does not exist yet gives no answer at all. A short timeout and a new attempt
			// find it sooner than the kernel's retransmissions, whose pauses grow.
			DialContext: (&net.Dialer{Timeout: 2 * timing.FirstChecks}).DialContext,
			// The check sends no data and its answer is not secret, so it does not verify the certificate. Clients do,
			// because their connections pass through unchanged.
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // as said
			DisableKeepAlives: true,                                  // a new connection shows that new connections work
		},
	}
}

// check asks an API server for its readiness. If anonymous access is off, the API server answers 401 or 403: it serves, and
// the check cannot find out more.
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
	return &notReadyError{res.Status}
}

// notReadyError is the answer of an API server that is not ready.
type notReadyError struct{ status string }

func isNotReady(err error) bool {
	notReady := (*notReadyError)(nil)
	return errors.As(err, &notReady)
}

func (e *notReadyError) Error() string { return "readyz answered " + e.status }

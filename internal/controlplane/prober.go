package controlplane

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/kubeconfig"
)

const (
	// probeTimeout limits one attempt. It is long, because load balancers of ours hold a connection
	// until the first API server is healthy: the answer then comes at once.
	probeTimeout = 10 * time.Second
	// After an attempt that failed at once the next follows after a pause that doubles.
	firstProbePause   = 250 * time.Millisecond
	longestProbePause = 2 * time.Second
	// An API server that answers but is not ready is checked again soon, because it becomes ready within a second.
	probePauseReady = 100 * time.Millisecond
	// frequentProbes is the number of attempts with these pauses. All others up to steadyProbes have longestProbePause, and then rareProbePause:
	// each attempt is a TLS handshake, and the owner of the kubeconfig chooses the size of its key and the answers.
	frequentProbes, steadyProbes = 600, 1200
	rareProbePause               = 10 * time.Second
)

// prober detects when a new API server answers through its endpoint (CP-09). Nothing that Cluster API watches changes
// at that moment, and the workload cluster cannot send events before. A goroutine for each control plane that is not
// initialized therefore sends requests, and reports the first answer as an event.
type prober struct {
	events chan event.GenericEvent

	ctx    context.Context // of all probes: they outlive the reconciliation that starts them
	cancel context.CancelFunc

	mu     sync.Mutex
	probes map[client.ObjectKey]*probe
}

type probe struct {
	connection connection
	cancel     context.CancelFunc
	answered   bool
}

// connection has all fields on which the answer to a probe depends. A user can correct each of them.
type connection struct{ server, serverName, authority, certificate, key, token string }

func connectionOf(c *rest.Config) connection {
	return connection{c.Host, c.ServerName, string(c.CAData), string(c.CertData), string(c.KeyData), c.BearerToken}
}

func newProber() *prober {
	ctx, cancel := context.WithCancel(context.Background())
	return &prober{ctx: ctx, cancel: cancel, events: make(chan event.GenericEvent), probes: map[client.ObjectKey]*probe{}}
}

// Start ends the probes with the manager.
func (p *prober) Start(ctx context.Context) error {
	<-ctx.Done()
	p.cancel()
	return nil
}

// answeredOrAsk reports whether the API server of a control plane has answered. Otherwise it starts a probe, unless one
// with the same connection is running. An event follows.
func (p *prober) answeredOrAsk(controlPlane *controlplanev1.CapstanControlPlane, config *rest.Config) (bool, error) {
	http, err := kubeconfig.HTTPClient(config, probeTimeout)
	if err != nil {
		return false, err
	}
	key, wanted := client.ObjectKeyFromObject(controlPlane), connectionOf(config)

	p.mu.Lock()
	defer p.mu.Unlock()
	if running := p.probes[key]; running != nil {
		if running.connection == wanted {
			return running.answered, nil
		}
		running.cancel()
	}
	ctx, cancel := context.WithCancel(p.ctx)
	started := &probe{connection: wanted, cancel: cancel}
	p.probes[key] = started
	go p.ask(ctx, started, http, controlPlane.DeepCopy())
	return false, nil
}

// forget ends the probe of an initialized or deleted control plane.
func (p *prober) forget(key client.ObjectKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if running := p.probes[key]; running != nil {
		running.cancel()
		delete(p.probes, key)
	}
}

func (p *prober) ask(ctx context.Context, probe *probe, c *http.Client, controlPlane *controlplanev1.CapstanControlPlane) {
	pauses, server := backoff.Doubling(firstProbePause, longestProbePause), probe.connection.server
	for attempt := 1; ; attempt++ {
		ready, _, err := readyz(ctx, c, server)
		if ready {
			break
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(probePause(attempt, err, pauses)):
		}
	}
	p.mu.Lock()
	probe.answered = true
	p.mu.Unlock()
	select {
	case p.events <- event.GenericEvent{Object: controlPlane}:
	case <-ctx.Done():
	}
}

// probePause returns the pause after a number of attempts without success. The last one had an error if the API server did not answer.
func probePause(attempts int, err error, pauses *wait.Backoff) time.Duration {
	switch {
	case attempts > steadyProbes:
		return rareProbePause
	case attempts > frequentProbes:
		return longestProbePause
	case err == nil:
		*pauses = *backoff.Doubling(firstProbePause, longestProbePause)
		return probePauseReady
	}
	return pauses.Step()
}

// readyz checks whether an API server can serve. If it answers but is not ready, failed contains the names of the
// failed checks. An error means that it did not answer.
func readyz(ctx context.Context, c *http.Client, server string) (ready bool, failed []string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(server, "/")+"/readyz?verbose", nil)
	if err != nil {
		return false, nil, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return false, nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return false, nil, err
	}
	if resp.StatusCode == http.StatusOK {
		return true, nil, nil
	}
	return false, failedChecks(string(body), resp.StatusCode), nil
}

// failedChecks reads the lines `[-]name failed: …` of a verbose answer.
func failedChecks(body string, code int) []string {
	var out []string
	for line := range strings.Lines(body) {
		if name, ok := strings.CutPrefix(line, "[-]"); ok {
			name, _, _ = strings.Cut(name, " ")
			out = append(out, name)
		}
	}
	if len(out) == 0 {
		out = []string{fmt.Sprintf("HTTP status %d", code)}
	}
	return out
}

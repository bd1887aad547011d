package provision

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/supervisor"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

const (
	// renewRetry is the pause after a failed renewal. A third of the validity remains for attempts.
	renewRetry = time.Minute
	// renewMax bounds the pause before a renewal, because clocks can jump and machines can sleep.
	renewMax = time.Hour
)

// RenewCertificates renews the leaf certificates of this machine when two thirds of their validity are over, until ctx
// ends. It restarts no service, because all components read certificate files again. The kubelet renews its own
// certificates. On control plane machines, RenewCertificates sends the time when the first certificate expires to
// report, whenever that time may have changed.
func RenewCertificates(ctx context.Context, config *nodeconfig.NodeConfiguration, nodeName string, report func(time.Time), log *slog.Logger) error {
	for {
		next, err := renew(ctx, config, nodeName, report, log)
		wait := min(time.Until(next), renewMax)
		if err != nil {
			log.Error("Cannot renew certificates", "error", err, "retryIn", renewRetry)
			wait = renewRetry
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(max(wait, time.Second)):
		}
	}
}

// renew renews the certificates that are due and returns the time of the next renewal.
func renew(ctx context.Context, config *nodeconfig.NodeConfiguration, nodeName string, report func(time.Time), log *slog.Logger) (time.Time, error) {
	if config.Role == nodeconfig.RoleWorker {
		return renewClients(ctx, config, nodeName, log)
	}
	hostname, err := os.Hostname()
	if err != nil {
		return time.Time{}, err
	}
	metadata, err := machine.Load(machine.MetadataPath)
	if err != nil {
		return time.Time{}, err
	}
	n, err := newNode(config, metadata, hostname)
	if err != nil {
		return time.Time{}, err
	}
	next, err := ensureLeaves(nodeconfig.PKIDir, n.leaves(), n.validity(), time.Now())
	if err != nil {
		return time.Time{}, err
	}
	// root creates a lost key again.
	services, _, err := supervisor.Load(supervisor.Dir)
	for _, service := range services {
		err = errors.Join(err, service.HandOver())
	}
	if err != nil {
		return time.Time{}, err
	}
	expires, err := firstExpiry(nodeconfig.PKIDir, n.leaves())
	if err != nil {
		return time.Time{}, err
	}
	report(expires)
	return next, nil
}

// firstExpiry returns the time when the first of the leaves expires.
func firstExpiry(dir string, leaves []certfiles.Leaf) (time.Time, error) {
	var first time.Time
	for _, leaf := range leaves {
		c, err := pki.ReadCert(filepath.Join(dir, leaf.Name+".crt"))
		if err != nil {
			return time.Time{}, err
		}
		if first.IsZero() || c.NotAfter.Before(first) {
			first = c.NotAfter
		}
	}
	return first, nil
}

func ensureLeaves(dir string, leaves []certfiles.Leaf, validity time.Duration, now time.Time) (time.Time, error) {
	next := now.Add(validity)
	for _, leaf := range leaves {
		at, err := leaf.Ensure(dir, validity, now)
		if err != nil {
			return time.Time{}, fmt.Errorf("certificate %s: %w", leaf.Name, err)
		}
		next = earlier(next, at)
	}
	return next, nil
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// renewClients renews a worker's client certificates.
func renewClients(ctx context.Context, config *nodeconfig.NodeConfiguration, nodeName string, log *slog.Logger) (time.Time, error) {
	var renewals []func() (time.Time, error)
	for _, request := range clientRequests(config, nodeName) {
		renewals = append(renewals, func() (time.Time, error) { return request.renewIfDue(ctx, log) })
	}
	return renewAll(renewals)
}

// renewAll runs the renewals at the same time, because a request that nobody approves must not delay the others. It returns the
// earliest time of a next attempt.
func renewAll(renewals []func() (time.Time, error)) (time.Time, error) {
	times, errs := make([]time.Time, len(renewals)), make([]error, len(renewals))
	var running sync.WaitGroup
	for i, renewal := range renewals {
		running.Go(func() { times[i], errs[i] = renewal() })
	}
	running.Wait()
	next := time.Now().Add(renewMax)
	for _, at := range times {
		next = earlier(next, at)
	}
	return next, errors.Join(errs...)
}

// renewIfDue renews a certificate that is due, and returns the time of the next attempt.
func (r ClientRequest) renewIfDue(ctx context.Context, log *slog.Logger) (time.Time, error) {
	c, err := pki.ReadCert(r.CertFile)
	if err != nil {
		return time.Now().Add(renewRetry), nil // `node up` still has to request the first one.
	}
	if at := pki.RenewAt(c); time.Now().Before(at) {
		return at, nil
	}
	if err := r.renew(ctx); err != nil {
		return time.Time{}, err
	}
	log.Info("Certificate renewed", "user", r.CommonName)
	return time.Now(), nil
}

// renew requests a new certificate with the kubelet's credential, and waits for the approval, at most until the other certificates have
// to be looked at again. The kubelet's credential names this machine, so the approval depends on its Machine. The kubelet renews it
// without the management cluster.
func (r ClientRequest) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, renewMax)
	defer cancel()
	client, err := kube.NewClient(nodeconfig.KubeletKubeconfig)
	if err != nil {
		return err
	}
	return kube.EnsureCertificate(ctx, client, r.Request, r.CertFile)
}

package provision

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/supervisor"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

const (
	// renewRetry after a renewal that failed: there is a third of a validity left to try.
	renewRetry = time.Minute
	// renewMax: clocks jump and machines sleep, so a renewal that is far off is looked at now and then.
	renewMax = time.Hour
)

// RenewCertificates renews the leaf certificates of this machine when two thirds of their validity
// are over, until ctx ends. Nothing is restarted: all components read certificate files anew. The
// kubelet looks after its own. On control plane machines tell is called with the time at which the first
// of the certificates expires, whenever that may have changed.
func RenewCertificates(ctx context.Context, config *nodeconfig.NodeConfiguration, nodeName string, tell func(time.Time), log *slog.Logger) error {
	for {
		next, err := renew(ctx, config, nodeName, tell, log)
		wait := min(time.Until(next), renewMax)
		if err != nil {
			log.Error("renewing certificates", "error", err, "again in", renewRetry)
			wait = renewRetry
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(max(wait, time.Second)):
		}
	}
}

// renew renews what is due and returns when the next one is.
func renew(ctx context.Context, config *nodeconfig.NodeConfiguration, nodeName string, tell func(time.Time), log *slog.Logger) (time.Time, error) {
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
	// A key that was lost is made anew, by root.
	services, err := supervisor.Load(supervisor.Dir)
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
	tell(expires)
	return next, nil
}

// firstExpiry is when the first of the leaves expires.
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
		if at.Before(next) {
			next = at
		}
	}
	return next, nil
}

// renewClients has a worker's client certificates renewed.
func renewClients(ctx context.Context, config *nodeconfig.NodeConfiguration, nodeName string, log *slog.Logger) (time.Time, error) {
	next := time.Now().Add(renewMax)
	for _, request := range ClientRequests(config, nodeName) {
		c, err := pki.ReadCert(request.CertFile)
		if err != nil {
			// `node up` is still about to get the first one.
			next = time.Now().Add(renewRetry)
			continue
		}
		at := pki.RenewAt(c)
		if time.Now().Before(at) {
			if at.Before(next) {
				next = at
			}
			continue
		}
		if err := request.renew(ctx); err != nil {
			return time.Time{}, err
		}
		log.Info("certificate renewed", "user", request.CommonName)
		next = time.Now()
	}
	return next, nil
}

// renew has the certificate signed again. It waits for the approval, with the certificate itself until that expires and
// with the kubelet's from then on: nobody may have been there to approve the request, or the Cluster was paused.
func (r ClientRequest) renew(ctx context.Context) error {
	kubeconfig, until := r.credential(time.Now())
	if !until.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, until)
		defer cancel()
	}
	client, err := kube.NewClient(kubeconfig)
	if err != nil {
		return err
	}
	return kube.EnsureCertificate(ctx, client, r.Request, r.CertFile)
}

// credential is the kubeconfig with which the certificate is requested, and until when that is of use; zero: as long as
// the kubelet renews its own.
func (r ClientRequest) credential(now time.Time) (kubeconfig string, until time.Time) {
	if c, err := pki.ReadCert(r.CertFile); err == nil && pki.ValidAt(c, now) {
		return r.Kubeconfig, c.NotAfter
	}
	return nodeconfig.KubeletKubeconfig, time.Time{}
}

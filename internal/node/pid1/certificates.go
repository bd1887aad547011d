package pid1

import (
	"context"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
)

// certificatesInterval is the pause between two checks of the certificates. Their files change once in months, by several
// programs and in several ways (files, links), so there is no single event to wait for.
const certificatesInterval = time.Minute

// kubeletCurrent lists the kubelet's links to its current certificates.
const (
	kubeletCurrent = "/var/lib/kubelet/pki/*" + currentSuffix
	currentSuffix  = "-current.pem"
)

// followCertificates updates the certificates in the status until ctx ends.
func (m *manager) followCertificates(ctx context.Context) {
	for {
		m.setCertificates(certificatesBelow("/"))
		select {
		case <-ctx.Done():
			return
		case <-time.After(pki.CheckEvery(certificatesInterval)):
		}
	}
}

func (m *manager) setCertificates(found []initapi.Certificate) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if reflect.DeepEqual(m.bootstrap.Certificates, found) {
		return
	}
	m.bootstrap.Certificates = found
	close(m.changed)
	m.changed = make(chan struct{})
}

// certificatesBelow returns the leaf certificates that a machine with this root folder uses. It omits unreadable files,
// because the machine may not have its first certificates yet.
func certificatesBelow(root string) []initapi.Certificate {
	var out []initapi.Certificate
	dir := filepath.Join(root, nodeconfig.PKIDir)
	for _, pattern := range []string{filepath.Join(dir, "*.crt"), filepath.Join(dir, "*", "*.crt"), filepath.Join(root, kubeletCurrent)} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			continue // The pattern is a constant.
		}
		for _, path := range paths {
			c, err := pki.ReadCert(path)
			if err != nil || c.IsCA {
				continue
			}
			out = append(out, initapi.Certificate{Name: certificateName(dir, path), NotBefore: c.NotBefore, NotAfter: c.NotAfter})
		}
	}
	slices.SortFunc(out, func(a, b initapi.Certificate) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func certificateName(dir, path string) string {
	if base, ok := strings.CutSuffix(filepath.Base(path), currentSuffix); ok {
		return base
	}
	name, err := filepath.Rel(dir, path)
	if err != nil {
		return path // Both are absolute.
	}
	return strings.TrimSuffix(name, ".crt")
}

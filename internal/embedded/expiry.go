package embedded

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"capstan.dev/capstan/internal/pki"
)

// expiring returns the certificates of the plane with less than a third of their validity left, each with its file and its
// expiry. The plane renews its leaf certificates earlier. Authorities are valid for ten years and are not renewed.
func expiring(dir string, now time.Time) ([]string, error) {
	var out []string
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".crt") {
			return err
		}
		c, err := pki.ReadCert(path)
		if err != nil {
			return err
		}
		// The plane checks its leaf certificates once per renewalInterval.
		if now.After(pki.RenewAt(c).Add(2 * pki.CheckEvery(renewalInterval))) {
			name, err := filepath.Rel(dir, path)
			if err != nil {
				return err
			}
			out = append(out, fmt.Sprintf("%s expires on %s", name, c.NotAfter.UTC().Format(time.RFC3339)))
		}
		return nil
	})
	return out, err
}

// CertificatesExpiring returns the certificates of an installation that are due for renewal, each with its file and its
// expiry. It returns none if there is no installation, or if the caller has no permission to read it.
func CertificatesExpiring(l Layout, now time.Time) ([]string, error) {
	found, err := expiring(l.PKI(), now)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	return found, err
}

// showExpiring copies the expiring certificates to the status.
func (p *plane) showExpiring(now time.Time) error {
	found, err := expiring(p.layout.PKI(), now)
	p.board.update(func(s *Status) { s.CertificatesExpiring = found })
	return err
}

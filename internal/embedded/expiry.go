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

// expiring are the certificates of the plane that have less than a third of their life before them, each with its file below the
// folder and its end. The plane renews its leaves before that; the authorities last ten years and are not renewed.
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
		// The plane looks at its leaves once per renewalInterval.
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

// CertificatesExpiring returns the certificates of an installation that should have been renewed, each with its file and its end.
// It returns none if there is no installation, or the caller may not read it.
func CertificatesExpiring(l Layout, now time.Time) ([]string, error) {
	found, err := expiring(l.PKI(), now)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	return found, err
}

// showExpiring puts the certificates that expire into the status.
func (p *plane) showExpiring(now time.Time) error {
	found, err := expiring(p.layout.PKI(), now)
	p.board.update(func(s *Status) { s.CertificatesExpiring = found })
	return err
}

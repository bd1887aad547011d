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
// expiry. The plane renews its leaf certificates earlier. Authorities are valid for ten years and are not renewed; their copies in the
// folders of components are not listed.
func expiring(dir string, now time.Time) (dueLeaves, dueAuthorities []string, err error) {
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".crt") {
			return err
		}
		c, err := pki.ReadCert(path)
		if err != nil {
			return err
		}
		// The plane checks its leaf certificates once per renewalInterval.
		if !now.After(pki.RenewAt(c).Add(2 * pki.CheckEvery(renewalInterval))) {
			return nil
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		switch found := fmt.Sprintf("%s expires on %s", name, c.NotAfter.UTC().Format(time.RFC3339)); {
		case !c.IsCA:
			dueLeaves = append(dueLeaves, found)
		case name == filepath.Base(name):
			dueAuthorities = append(dueAuthorities, found)
		}
		return nil
	})
	return dueLeaves, dueAuthorities, err
}

// CertificatesExpiring returns the leaf certificates and the authorities of an installation that are due for renewal, each with its file
// and its expiry. It returns none if there is no installation, or if the caller has no permission to read it.
func CertificatesExpiring(l Layout, now time.Time) (dueLeaves, dueAuthorities []string, err error) {
	dueLeaves, dueAuthorities, err = expiring(l.PKI(), now)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, nil, nil
	}
	return dueLeaves, dueAuthorities, err
}

// showExpiring copies the expiring certificates to the status.
func (p *plane) showExpiring(now time.Time) error {
	dueLeaves, dueAuthorities, err := expiring(p.layout.PKI(), now)
	p.board.update(func(s *Status) { s.CertificatesExpiring, s.AuthoritiesExpiring = dueLeaves, dueAuthorities })
	return err
}

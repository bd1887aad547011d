package credentials

import (
	"bytes"
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv/expect"
)

// joinedHost has the files of a host that joined, and the credentials of its managers.
func joinedHost(t *testing.T, validity time.Duration, now time.Time) (Server, Managed) {
	t.Helper()
	dir := t.TempDir()
	m, err := NewAuthority(validity, now)
	expect.NoError(t, err)
	key, err := certfiles.EnsureKey(filepath.Join(dir, "server.key"))
	expect.NoError(t, err)
	made, err := m.Authority.Sign(pki.Leaf{CommonName: "capstand", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Usages: pki.Server}, key.Public(), validity, now)
	expect.NoError(t, err)
	expect.NoError(t, certfiles.WriteFile(filepath.Join(dir, "ca.crt"), m.CA))
	expect.NoError(t, certfiles.WriteFile(filepath.Join(dir, "server.crt"), pki.EncodeCert(made)))
	return In(dir), m
}

// trust fails unless a manager and the host admit each other.
func trust(t *testing.T, what string, s Server, m Managed, now time.Time) {
	t.Helper()
	server, err := pki.ReadCert(s.Cert)
	expect.NoError(t, err)
	clients, err := os.ReadFile(s.ClientCA)
	expect.NoError(t, err)
	if err := trusted(m.CA, server, x509.ExtKeyUsageServerAuth, now); err != nil {
		t.Errorf("%s: the manager refuses the host: %v", what, err)
	}
	if err := trusted(clients, m.Certificate(), x509.ExtKeyUsageClientAuth, now); err != nil {
		t.Errorf("%s: the host refuses the manager: %v", what, err)
	}
}

// install does what Managed.Install and the host do.
func install(t *testing.T, s Server, m Managed, now time.Time) error {
	t.Helper()
	der, _, err := s.Request()
	expect.NoError(t, err)
	request, err := pki.ParseRequest(der)
	expect.NoError(t, err)
	made, err := m.Authority.Sign(pki.Leaf{CommonName: "capstand", IPs: request.IPAddresses, Usages: pki.Server}, request.PublicKey, time.Hour, now)
	expect.NoError(t, err)
	return s.Install(made, m.Certificate(), m.CA, now)
}

// The renewal and the rotation take their steps in order. Host and manager trust each other after each half of a step, so a crash
// between two of them ends no connection.
func TestNext(t *testing.T) {
	for name, after := range map[string]time.Duration{"certificates that are due": 50 * time.Minute, "certificates that are not due": time.Minute} {
		t.Run(name, func(t *testing.T) { rotation(t, after) })
	}
}

// rotation requests another authority after some time of the certificates' hour.
func rotation(t *testing.T, after time.Duration) {
	t.Helper()
	now := time.Now()
	s, m := joinedHost(t, time.Hour, now)
	served := func() *x509.Certificate { c, err := pki.ReadCert(s.Cert); expect.NoError(t, err); return c }
	first := m.Authority.Cert
	if step := m.Next(served(), false, now); step != StepNone {
		t.Fatalf("new certificates: step %d", step)
	}
	if step := m.Next(nil, false, now.Add(time.Hour)); step != StepNone {
		t.Errorf("a host that is not connected: step %d", step)
	}
	later := now.Add(after)
	var steps []Step
	for rotate := true; len(steps) < 10; {
		step := m.Next(served(), rotate, later)
		if step == StepNone {
			break
		}
		steps = append(steps, step)
		var err error
		switch step {
		case StepAuthority:
			m, err = m.WithAuthority(later)
			rotate = false
		case StepServer:
			err = install(t, s, m, later)
		case StepClient:
			m, err = m.WithClient(later)
		case StepForget:
			expect.NoError(t, install(t, s, m.Alone(), later))
			trust(t, "forgotten by the host only", s, m, later)
			m = m.Alone()
		}
		expect.NoError(t, err)
		trust(t, "after a step", s, m, later)
		if next, err := AuthorityFromSecret(m.Data()); err != nil || !bytes.Equal(next.CA, m.CA) {
			t.Fatalf("the Secret: %v", err)
		}
	}
	if want := []Step{StepAuthority, StepServer, StepClient, StepForget}; len(steps) != len(want) || steps[0] != want[0] || steps[1] != want[1] || steps[2] != want[2] || steps[3] != want[3] {
		t.Errorf("steps %v, want %v", steps, want)
	}
	if err := served().CheckSignatureFrom(first); err == nil || m.several() {
		t.Error("the first authority is still in use")
	}
	if !m.Usable(later) {
		t.Error("the credentials are not usable")
	}
}

// Without a rotation, due certificates are renewed, first that of the host.
func TestNextRenewal(t *testing.T) {
	now := time.Now()
	s, m := joinedHost(t, time.Hour, now)
	later := now.Add(50 * time.Minute)
	served, err := pki.ReadCert(s.Cert)
	expect.NoError(t, err)
	if step := m.Next(served, false, later); step != StepServer {
		t.Errorf("step %d", step)
	}
	expect.NoError(t, install(t, s, m, later))
	served, err = pki.ReadCert(s.Cert)
	expect.NoError(t, err)
	if step := m.Next(served, false, later); step != StepClient {
		t.Errorf("step %d", step)
	}
	if m, err = m.WithClient(later); err != nil || m.Next(served, false, later) != StepNone {
		t.Errorf("something is due: %v", err)
	}
	if step := m.Next(served, false, now.Add(8*365*24*time.Hour)); step != StepAuthority {
		t.Errorf("an old authority: step %d", step)
	}
}

// A host does not install what would lock out its managers, or what belongs to another host.
func TestInstallIsRefused(t *testing.T) {
	now := time.Now()
	s, m := joinedHost(t, time.Hour, now)
	_, other := joinedHost(t, time.Hour, now)
	before, err := os.ReadFile(s.Cert)
	expect.NoError(t, err)
	served, err := pki.ReadCert(s.Cert)
	expect.NoError(t, err)
	foreign, _, err := m.Authority.Issue(pki.Leaf{CommonName: "capstand", Usages: pki.Server}, time.Hour, now)
	expect.NoError(t, err)
	for name, err := range map[string]error{
		"another key":                      s.Install(foreign, m.Certificate(), m.CA, now),
		"another authority":                s.Install(served, m.Certificate(), other.CA, now),
		"authorities without the caller's": install(t, s, Managed{Client: Client{CA: other.CA, Cert: m.Cert, Key: m.Key}, Authority: other.Authority}, now),
		"no authority":                     s.Install(served, m.Certificate(), nil, now),
	} {
		if _, invalid := err.(errInvalid); !invalid { //nolint:errorlint // it is not wrapped.
			t.Errorf("%s: %v", name, err)
		}
	}
	if after, err := os.ReadFile(s.Cert); err != nil || !bytes.Equal(before, after) {
		t.Error("the certificate changed")
	}
	trust(t, "after refusals", s, m, now)

	dir := t.TempDir()
	_, err = Make(dir, []string{"127.0.0.1"}, time.Hour, now)
	expect.NoError(t, err)
	if _, _, err := In(dir).Request(); err == nil {
		t.Error("a host with an authority of its own lets managers sign")
	}
}

// The certificates of a host that joined stay: only its management cluster can sign others.
func TestMakeKeepsAJoin(t *testing.T) {
	files, _ := joinedHost(t, time.Hour, time.Now())
	before, err := os.ReadFile(files.Cert)
	expect.NoError(t, err)
	if _, err := Make(filepath.Dir(files.Cert), []string{"10.0.0.5"}, time.Hour, time.Now()); err == nil || !strings.Contains(err.Error(), "capstan host leave") || !strings.Contains(err.Error(), "join again") {
		t.Errorf("the error is %v", err)
	}
	if after, err := os.ReadFile(files.Cert); err != nil || !bytes.Equal(after, before) {
		t.Errorf("the certificate has changed: %v", err)
	}
}

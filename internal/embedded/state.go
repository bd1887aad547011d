package embedded

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/version"
)

// State contains the persistent decisions of an installation. It is written before a component starts.
type State struct {
	// ID identifies the installation.
	ID string `json:"id"`
	// Capstan is the newest version of Capstan that has had this state.
	Capstan string `json:"capstan,omitempty"`
	// Assets is the folder with the binaries.
	Assets string `json:"assets"`
	// Settings are what the options set.
	Settings
	// PortBase is the first port of the installation on loopback; 0 before its first start.
	PortBase int `json:"portBase,omitempty"`
	// StoppedUnit of systemd runs the plane, and `capstan up` stops the plane to start this unit with other settings. Empty after each
	// start of the plane.
	StoppedUnit string `json:"stoppedUnit,omitempty"`
}

// LoadState reads the state. Without an installation in the root folder, the error is fs.ErrNotExist.
func LoadState(l Layout) (State, error) {
	data, err := os.ReadFile(l.State())
	if err != nil {
		return State{}, err
	}
	var s State
	if err := json.Unmarshal(data, &s); err != nil {
		return State{}, fmt.Errorf("expected the state of an installation in %s, found a damaged file: %w; restore the file, or remove %s with `capstan down`", l.State(), err, l.Root)
	}
	return s, nil
}

// apiBindAddress is the address on which the API server listens. The components of the plane use loopback in any case.
func (s State) apiBindAddress() string {
	if s.APIAddress == "" {
		return "127.0.0.1"
	}
	return "0.0.0.0"
}

// apiHost is the host in APIAddress, or empty.
func (s State) apiHost() string {
	host, _, _ := net.SplitHostPort(s.APIAddress)
	return host
}

// InvalidOptions is the error of options that cannot be used as they are written.
type InvalidOptions struct{ error }

// Unwrap returns the error without its type.
func (e InvalidOptions) Unwrap() error { return e.error }

func invalid(format string, args ...any) error { return InvalidOptions{fmt.Errorf(format, args...)} }

// checkListenCertificates returns an error if the host has no certificates for remote managers. The address is valid.
func checkListenCertificates(l Layout, s State) error {
	if s.Listen == "" {
		return nil
	}
	dir := filepath.Join(l.HostRoot(s.Hosts[0]), "tls")
	if _, err := os.Stat(filepath.Join(dir, "server.crt")); err != nil {
		return fmt.Errorf("expected the certificates for --listen %s: %w; create them with `capstan host credentials %s --address HOST:PORT --dir %s`, and apply its output in the remote management cluster", s.Listen, err, s.Hosts[0], dir)
	}
	return nil
}

// decideState combines the stored state with the options. A new installation has one host without a request for another number.
func decideState(l Layout, assets string, o Options) (State, error) {
	s, err := LoadState(l)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return State{}, err
	}
	if s.ID == "" {
		s.ID = strings.ToLower(rand.Text()[:8])
		o.Hosts = cmp.Or(o.Hosts, 1)
	}
	if err := s.checkWriter(l); err != nil {
		return State{}, err
	}
	s.Assets, s.Capstan = assets, version.Newest(s.Capstan)
	if s.Settings, err = s.with(o, l, Assets{assets}); err != nil {
		return State{}, err
	}
	return s, checkListenCertificates(l, s)
}

// checkWriter refuses the state of a newer minor release: this build would replace its CRDs by older ones, and the API server would remove the
// fields that they do not have from each object that is written.
func (s State) checkWriter(l Layout) error {
	err := version.CheckWriter(s.Capstan, "the management plane in "+l.Root)
	if err != nil {
		err = fmt.Errorf("%w. To go back, remove the plane and its machines with `capstan down` of that release, and restore a backup of the former one", err)
	}
	return err
}

// save writes the state atomically: after a crash the file has the old or the new content.
func (s State) save(l Layout) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.WriteFile(l.State(), append(data, '\n'), 0o600)
}

// notReplaced restores the state of a plane whose stop has not ended: the settings that should follow it never ran, and a newer version
// of Kubernetes among them would refuse the present one as a downgrade. The plane can still stop, so the unit stays in the state.
func (s State) notReplaced(l Layout, unit string) error {
	s.StoppedUnit = unit
	return s.save(l)
}

// begun records the version of Capstan that runs the plane, and removes the unit that the next `capstan up` would start.
func (s *State) begun(l Layout) error {
	newest := version.Newest(s.Capstan)
	if s.StoppedUnit == "" && s.Capstan == newest {
		return nil
	}
	s.StoppedUnit, s.Capstan = "", newest
	return s.save(l)
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

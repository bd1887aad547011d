package embedded

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
)

// State is what an installation decides once and keeps: it is written before anything is started.
type State struct {
	// ID tells installations of one box apart.
	ID string `json:"id"`
	// Assets is the folder with the binaries.
	Assets string `json:"assets"`
	// KubernetesVersion of the management plane, with the leading v.
	KubernetesVersion string `json:"kubernetesVersion"`
	// Hosts are the names of the CapstanHosts of this box; each has a capstand of its own.
	Hosts []string `json:"hosts"`
	// Listen is the address, host:port, on which the only host of this box serves managers elsewhere; none when empty.
	Listen string `json:"listen,omitempty"`
	// Backup is the schedule of backups; nil when there is none.
	Backup *BackupSchedule `json:"backup,omitempty"`
	// CoreFeatureGates are the feature gates of Cluster API that differ from Capstan's defaults.
	CoreFeatureGates map[string]bool `json:"coreFeatureGates,omitempty"`
	// PortBase is the first of the ports on loopback that the installation has; 0 before its first
	// start.
	PortBase int `json:"portBase,omitempty"`
}

// LoadState reads the state. The error is fs.ErrNotExist when nothing was installed below the root.
func LoadState(l Layout) (State, error) {
	data, err := os.ReadFile(l.State())
	if err != nil {
		return State{}, err
	}
	var s State
	if err := json.Unmarshal(data, &s); err != nil {
		return State{}, fmt.Errorf("wanted the state of an installation in %s, found something that is not: %w; restore the file, or remove %s with `capstan down`", l.State(), err, l.Root)
	}
	return s, nil
}

// listenNowhere takes back what --listen has said before.
const listenNowhere = "none"

// listenOf is the address that a host has after it was asked to have another one; nothing asked changes nothing.
func listenOf(have, asked string) string {
	switch asked {
	case "":
		return have
	case listenNowhere:
		return ""
	}
	return asked
}

// checkListen says what is missing for managers elsewhere.
func checkListen(l Layout, s State) error {
	if s.Listen == "" {
		return nil
	}
	if len(s.Hosts) != 1 {
		return fmt.Errorf("wanted one host on this box for --listen %s, found %d: run a capstand of its own for each instead, see docs/hosts.md", s.Listen, len(s.Hosts))
	}
	if _, _, err := net.SplitHostPort(s.Listen); err != nil {
		return fmt.Errorf("wanted --listen host:port, or none, found %q: %w", s.Listen, err)
	}
	dir := filepath.Join(l.HostRoot(s.Hosts[0]), "tls")
	if _, err := os.Stat(filepath.Join(dir, "server.crt")); err != nil {
		return fmt.Errorf("wanted the certificates for --listen %s: %w; make them with `capstan host credentials %s --address HOST:PORT --dir %s`, and keep what it prints for the other management plane", s.Listen, err, s.Hosts[0], dir)
	}
	return nil
}

// decideState completes what is on disk with what was asked for. Hosts are only ever added: machines
// may be on those that are there.
func decideState(l Layout, assets string, o Options) (State, error) {
	hosts := o.Hosts
	s, err := LoadState(l)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return State{}, err
	}
	if s.ID == "" {
		if hosts == 0 {
			hosts = 1
		}
		s.ID = strings.ToLower(rand.Text()[:8])
	}
	s.Assets = assets
	// The version stays: a newer one in the assets is taken by an upgrade, not by chance.
	if s.KubernetesVersion == "" || !isDir(filepath.Join(Assets{assets}.Kubernetes(), s.KubernetesVersion)) {
		if s.KubernetesVersion, err = newestKubernetes(Assets{assets}); err != nil {
			return State{}, err
		}
	}
	for i := len(s.Hosts); i < hosts; i++ {
		s.Hosts = append(s.Hosts, hostName(i))
	}
	s.Listen = listenOf(s.Listen, o.Listen)
	if s.CoreFeatureGates, err = gatesOf(s.CoreFeatureGates, o.CoreFeatureGates); err != nil {
		return State{}, err
	}
	if s.Backup, err = scheduleOf(s.Backup, o.Backup, l); err != nil {
		return State{}, err
	}
	return s, checkListen(l, s)
}

// hostName of the i-th host of a box.
func hostName(i int) string {
	if i == 0 {
		return "local"
	}
	return fmt.Sprintf("local-%d", i+1)
}

// save writes the state in one step: a crash leaves the old one or the new one.
func (s State) save(l Layout) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(l.State(), append(data, '\n'), 0o600)
}

func newestKubernetes(a Assets) (string, error) {
	versions, err := KubernetesVersions(a)
	if err != nil {
		return "", err
	}
	if len(versions) == 0 {
		return "", fmt.Errorf("wanted a Kubernetes version below %s, found none: run `make build`, or point --assets at the folder that it filled", a.Kubernetes())
	}
	return versions[len(versions)-1], nil
}

// KubernetesVersions lists the versions whose binaries are in the assets, oldest first.
func KubernetesVersions(a Assets) ([]string, error) {
	entries, err := os.ReadDir(a.Kubernetes())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var versions []string
	for _, e := range entries {
		if semver.IsValid(e.Name()) {
			if _, err := os.Stat(filepath.Join(a.Kubernetes(), e.Name(), "kube-apiserver")); err == nil {
				versions = append(versions, e.Name())
			}
		}
	}
	slices.SortFunc(versions, semver.Compare)
	return versions, nil
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// writeFile replaces a file in one step. The new one exists with its final mode from the start.
func writeFile(path string, data []byte, mode os.FileMode) error {
	return writeFileAs(path, data, mode, os.Getuid(), os.Getgid())
}

func writeFileAs(path string, data []byte, mode os.FileMode, uid, gid int) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone after the rename
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Chown(uid, gid), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

package embedded

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/mod/semver"

	"capstan.dev/capstan/internal/host/versions"
	"capstan.dev/capstan/internal/tracing/collector"
	"capstan.dev/capstan/internal/version"
)

// Settings are what the options of `capstan up` set. They are stored in the state, and a running plane shows those that it was started with.
type Settings struct {
	// KubernetesVersion of the management plane, with the leading v.
	KubernetesVersion string `json:"kubernetesVersion"`
	// Hosts are the names of the CapstanHosts of this box. Each has its own capstand.
	Hosts []string `json:"hosts"`
	// Listen is the address, host:port, on which the only host of this box serves remote managers; empty for none.
	Listen string `json:"listen,omitempty"`
	// APIAddress is the address, host:port, at which other boxes reach the management API; empty for none.
	APIAddress string `json:"apiAddress,omitempty"`
	// HostListenAddress is the address, host:port, on which the manager accepts hosts that dial it; empty for none.
	HostListenAddress string `json:"hostListenAddress,omitempty"`
	// Backup is the schedule of backups. Nil means that no backups are scheduled.
	Backup *BackupSchedule `json:"backup,omitempty"`
	// CoreFeatureGates are the feature gates of Cluster API that differ from Capstan's defaults.
	CoreFeatureGates map[string]bool `json:"coreFeatureGates,omitempty"`
	// Tracing names the collector of the spans of the manager and the hosts; nil for none.
	Tracing *collector.Flags `json:"tracing,omitempty"`
}

// with returns the settings after a request: options that are not given change nothing. It writes nothing.
func (s Settings) with(o Options, l Layout, a Assets) (_ Settings, err error) {
	if s.Hosts, err = hostsOf(s.Hosts, o.Hosts); err != nil {
		return Settings{}, err
	}
	if s.KubernetesVersion, err = kubernetesOf(a, s.KubernetesVersion, o.KubernetesVersion); err != nil {
		return Settings{}, err
	}
	s.Listen = listenOf(s.Listen, o.Listen)
	s.APIAddress = listenOf(s.APIAddress, o.APIAddress)
	s.HostListenAddress = listenOf(s.HostListenAddress, o.HostListenAddress)
	s.Tracing = tracingOf(s.Tracing, o.Tracing)
	if s.CoreFeatureGates, err = gatesOf(s.CoreFeatureGates, o.CoreFeatureGates); err != nil {
		return Settings{}, err
	}
	if s.Backup, err = scheduleOf(s.Backup, o.Backup, l); err != nil {
		return Settings{}, err
	}
	if err := s.Tracing.Check(); err != nil {
		return Settings{}, InvalidOptions{err}
	}
	if err := errors.Join(checkListen(s), checkAPIAddress(s), checkHostListenAddress(s), checkDistinct(s)); err != nil {
		return Settings{}, err
	}
	return s, nil
}

// maxHosts bounds the hosts of a box. Each is a process, and none can be removed.
const maxHosts = 100

// hostsOf returns the hosts after a request for a number of them; see Options. None is removed, because a host can have machines.
func hostsOf(have []string, asked int) ([]string, error) {
	if asked > maxHosts {
		return nil, invalid("expected at most %d for --hosts, found %d", maxHosts, asked)
	}
	if asked != 0 && max(asked, 0) < len(have) {
		return nil, invalid("expected --hosts of at least %[1]d, the number of hosts that this installation has, found %[2]d: hosts can have machines, so they are not removed. Drain those without a use, see docs/host-maintenance.md, or remove the installation with `capstan down`", len(have), max(asked, 0))
	}
	hosts := slices.Clone(have)
	for i := len(hosts); i < asked; i++ {
		hosts = append(hosts, hostName(i))
	}
	return hosts, nil
}

// hostName returns the name of the i-th host of a box.
func hostName(i int) string {
	if i == 0 {
		return "local"
	}
	return fmt.Sprintf("local-%d", i+1)
}

// kubernetesOf returns the Kubernetes version after a request. Without one, it stays when the assets contain a newer one: an upgrade is an
// explicit step. If the assets do not contain it any more, the newest one that can follow takes its place.
func kubernetesOf(a Assets, have, asked string) (string, error) {
	if have == "" && asked == "" {
		return newestKubernetes(a)
	}
	installed, err := KubernetesVersions(a)
	if err != nil {
		return "", err
	}
	if asked != "" {
		if err := checkAsked(a, installed, have, asked); err != nil {
			return "", err
		}
		return asked, nil
	}
	if slices.Contains(installed, have) {
		return have, nil
	}
	later := slices.DeleteFunc(slices.Clone(installed), func(v string) bool { return !follows(have, v) })
	if len(later) == 0 {
		return "", invalid("expected Kubernetes %s, the version of the management plane, or a newer one of at most the next minor version in %s, found %s: add it with `capstan host versions add`, or set --assets to the build that has it",
			have, a.Kubernetes(), cmp.Or(strings.Join(installed, ", "), "none"))
	}
	return later[len(later)-1], nil
}

// checkAsked returns why a plane cannot change to a version that was asked for.
func checkAsked(a Assets, installed []string, have, asked string) error {
	switch {
	case !slices.Contains(installed, asked):
		return invalid("expected an installed Kubernetes version with etcd for --kubernetes-version, found %s, and %s has %s: add it with `capstan host versions add`, or install its package", asked, a.Kubernetes(), cmp.Or(strings.Join(installed, ", "), "none"))
	case have == "" || follows(have, asked):
		return nil
	case semver.Compare(asked, have) < 0:
		return invalid("expected --kubernetes-version %s, the version of the management plane, or a newer one, found %s: an older API server cannot read the objects. To return to an older version, restore a backup of it", have, asked)
	}
	return invalid("expected --kubernetes-version at most one minor version above %s, the version of the management plane, found %s: upgrade by one minor version at a time", have, asked)
}

// follows reports whether the API server of a version can read the objects of another one: it is not older, and at most one minor version
// newer.
func follows(from, to string) bool {
	var major, minor, toMajor, toMinor int
	_, err1 := fmt.Sscanf(from, "v%d.%d", &major, &minor)
	_, err2 := fmt.Sscanf(to, "v%d.%d", &toMajor, &toMinor)
	return err1 == nil && err2 == nil && toMajor == major && toMinor <= minor+1 && semver.Compare(to, from) >= 0
}

func newestKubernetes(a Assets) (string, error) {
	names, err := KubernetesVersions(a)
	if err != nil {
		return "", err
	}
	if len(names) == 0 {
		return "", fmt.Errorf("expected a Kubernetes version below %s, found none: %s", a.Kubernetes(), version.InstallPrograms)
	}
	return names[len(names)-1], nil
}

// KubernetesVersions lists the versions in the assets folder that can run a management plane, the oldest first. A folder with upstream's
// programs may have no etcd.
func KubernetesVersions(a Assets) ([]string, error) {
	return versions.Names(a.Kubernetes(), apiServer, controllerManager, etcd)
}

// listenNowhere as --listen ends the service for remote managers.
const listenNowhere = "none"

// listenOf returns the address after a request. An empty request changes nothing.
func listenOf(have, asked string) string {
	switch asked {
	case "":
		return have
	case listenNowhere:
		return ""
	}
	return asked
}

// tracingOf returns the collector after a command with flags. Without an endpoint it is unchanged, and the endpoint none ends traces.
func tracingOf(have *collector.Flags, given collector.Flags) *collector.Flags {
	switch given.Endpoint {
	case "":
		return have
	case "none":
		return nil
	}
	return &given
}

// checkCollector returns an error if the manager, which is an unprivileged process, cannot use the files for the collector: it would end at
// each start.
func checkCollector(f *collector.Flags) error {
	if f == nil || f.CAFile+f.CertFile+f.KeyFile == "" {
		return nil
	}
	owner, err := ensureUser()
	if err != nil {
		return err
	}
	if err := owner.do(func() error { _, err := f.TLS(); return err }); err != nil {
		return fmt.Errorf("expected files for the collector that the system user %s can read: %w; correct the files, or end traces with `capstan up --tracing-endpoint none`", SystemUser, err)
	}
	return nil
}

// checkListen returns an error if the address for remote managers is invalid.
func checkListen(s Settings) error {
	if s.Listen == "" {
		return nil
	}
	if len(s.Hosts) != 1 {
		return invalid("expected one host on this box for --listen %s, found %d: run a separate capstand for each host instead, see docs/joining.md", s.Listen, len(s.Hosts))
	}
	if _, _, err := splitAddress(s.Listen); err != nil {
		return invalid("expected --listen host:port, or none, found %q: %w", s.Listen, err)
	}
	return nil
}

// checkAPIAddress returns an error if other boxes cannot reach the management API at the address.
func checkAPIAddress(s Settings) error {
	if s.APIAddress == "" {
		return nil
	}
	host, port, err := splitAddress(s.APIAddress)
	if err != nil || host == "" {
		return invalid("expected --api-address host:port, or none, found %q: %w", s.APIAddress, cmp.Or(err, errors.New("the host is empty")))
	}
	if port < 1024 {
		return invalid("expected a port from 1024 for --api-address, found %d: the API server is an unprivileged process", port)
	}
	if ip := net.ParseIP(host); ip != nil && ip.To4() == nil {
		return invalid("expected an IPv4 address or a DNS name of this box for --api-address, found %s: the API server listens on IPv4", host)
	} else if ip != nil && !ip.IsGlobalUnicast() {
		return invalid("expected an address of this box that other boxes reach for --api-address, found %s", host)
	}
	return nil
}

// checkHostListenAddress returns an error if the manager cannot listen on the address.
func checkHostListenAddress(s Settings) error {
	if s.HostListenAddress == "" {
		return nil
	}
	_, port, err := splitAddress(s.HostListenAddress)
	if err != nil {
		return invalid("expected --host-listen-address host:port, or none, found %q: %w", s.HostListenAddress, err)
	}
	if port < 1024 {
		return invalid("expected a port from 1024 for --host-listen-address, found %d: the manager is an unprivileged process", port)
	}
	return nil
}

// checkDistinct returns an error if two parts of the plane would listen on the same port.
func checkDistinct(s Settings) error {
	all := s.listeners()
	for i, l := range all {
		if at := slices.IndexFunc(all[:i], l.overlaps); at >= 0 {
			return invalid("expected different ports for %s and %s, found %d for both: choose another port for one of them", all[at].flag, l.flag, l.port)
		}
	}
	return nil
}

// listener is an address of the options on which a part of the plane listens.
type listener struct {
	flag, host string
	port       int
}

const apiAddressFlag = "--api-address"

// listeners returns the addresses of the options on which a part of the plane listens. It leaves out invalid ones.
func (s Settings) listeners() (all []listener) {
	for _, o := range []struct{ flag, address string }{{apiAddressFlag, s.APIAddress}, {"--listen", s.Listen}, {"--host-listen-address", s.HostListenAddress}} {
		host, port, err := splitAddress(o.address)
		if err != nil {
			continue
		}
		if o.flag == apiAddressFlag {
			host = "" // The API server listens on all addresses of the box.
		}
		if ip := net.ParseIP(host); ip != nil {
			host = ip.String() // An IPv6 address has several spellings.
		}
		all = append(all, listener{o.flag, host, port})
	}
	return all
}

func (l listener) address() string { return net.JoinHostPort(l.host, strconv.Itoa(l.port)) }

// overlaps reports whether only one of two parts of the plane can listen.
func (l listener) overlaps(other listener) bool {
	return l.port == other.port && (l.host == other.host || l.everywhere() || other.everywhere())
}

// mayOverlap is overlaps, but a name may stand for each address.
func (l listener) mayOverlap(other listener) bool {
	named := net.ParseIP(l.host) == nil || net.ParseIP(other.host) == nil
	return l.overlaps(other) || named && l.port == other.port
}

// everywhere reports whether the part listens on all addresses of the box.
func (l listener) everywhere() bool {
	return l.host == "" || net.ParseIP(l.host).IsUnspecified()
}

// splitAddress returns the parts of an address host:port. The host can be empty.
func splitAddress(address string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, err
	}
	number, err := strconv.ParseUint(text, 10, 16)
	if err != nil || number == 0 {
		return "", 0, errors.New("the port is not a number from 1 to 65535")
	}
	return host, int(number), nil
}

// Package machine knows what capstand tells a machine about itself.
//
// Layer: node.
package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
)

// Paths in the folder that the machine shares with capstand.
const (
	MetadataPath      = "/run/capstan/metadata.json"
	BootstrapDataPath = "/run/capstan/bootstrap-data"
	// ResolvConfPath is the host's resolver configuration, if capstand provides one.
	ResolvConfPath = "/run/capstan/resolv.conf"
	// SentinelPath is written by the bootstrap data when it succeeded (BC-05).
	SentinelPath = "/run/cluster-api/bootstrap-success.complete"
	// LogDir holds one log per service, and bootstrap.log.
	LogDir = "/var/log/capstan"
	// AssetsDir is the read-only folder with all programs.
	AssetsDir = "/opt/capstan"
)

// Metadata is what metadata.json says.
type Metadata struct {
	ID                string    `json:"id"`
	Name              string    `json:"name"`
	Hostname          string    `json:"hostname"`
	Cluster           string    `json:"cluster"`
	ProviderID        string    `json:"providerID"`
	Addresses         []Address `json:"addresses"`
	FailureDomain     string    `json:"failureDomain"`
	KubernetesVersion string    `json:"kubernetesVersion"`
	CPUs              int       `json:"cpus"`
	MemoryBytes       int64     `json:"memoryBytes"`
	PidsLimit         int64     `json:"pidsLimit"`
	// DiskBytes is the size of the machine's disk, 0 if the machine shares the disk of its host.
	DiskBytes    int64 `json:"diskBytes"`
	ControlPlane bool  `json:"controlPlane"`
}

// Address of the machine.
type Address struct {
	Address string `json:"address"`
	Prefix  int    `json:"prefix"`
	Gateway string `json:"gateway"`
}

// Load reads the metadata. A file that is not there gives fs.ErrNotExist.
func Load(path string) (Metadata, error) {
	var m Metadata
	data, err := os.ReadFile(path)
	if err != nil {
		return m, fmt.Errorf("the machine's metadata, which capstand writes: %w", err)
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, fmt.Errorf("the machine's metadata %s: %w", path, err)
	}
	return m, nil
}

// LoadOptional is Load, but a missing file is empty metadata.
func LoadOptional(path string) (Metadata, error) {
	m, err := Load(path)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	return m, err
}

// IPs are the machine's addresses in the order in which capstand gave them.
func (m Metadata) IPs() ([]netip.Addr, error) {
	var ips []netip.Addr
	for _, a := range m.Addresses {
		ip, err := netip.ParseAddr(a.Address)
		if err != nil {
			return nil, fmt.Errorf("the machine's metadata: address %q: %w", a.Address, err)
		}
		ips = append(ips, ip)
	}
	if len(ips) == 0 {
		return nil, errors.New("the machine's metadata has no address")
	}
	return ips, nil
}

// TemplateVariables are what `{{ ds.meta_data.* }}` in bootstrap data can name.
func (m Metadata) TemplateVariables() map[string]string {
	vars := map[string]string{
		"instance_id":    m.ID,
		"local_hostname": m.Hostname,
		"hostname":       m.Hostname,
		"provider_id":    m.ProviderID,
		"cluster":        m.Cluster,
		"failure_domain": m.FailureDomain,
	}
	if len(m.Addresses) > 0 {
		vars["local_ipv4"] = m.Addresses[0].Address
	}
	return vars
}

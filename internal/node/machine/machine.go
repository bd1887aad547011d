// Package machine reads the metadata that capstand writes for a machine, and names the paths that both use.
//
// Layer: node. Allowed imports: api, library, contract.
package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"capstan.dev/capstan/internal/machineapi"
)

// Paths in the folder that the machine shares with capstand.
const (
	MetadataPath      = machineapi.SharedFolder + "/" + machineapi.MetadataFile
	BootstrapDataPath = machineapi.SharedFolder + "/" + machineapi.BootstrapDataFile
	// UpdateRequestPath names the update that capstand wants, and UpdateDataPath contains its cloud-config.
	UpdateRequestPath = machineapi.SharedFolder + "/" + machineapi.UpdateRequestFile
	UpdateDataPath    = machineapi.SharedFolder + "/" + machineapi.UpdateDataFile
	// ResolvConfPath is the host's resolver configuration, if capstand provides one.
	ResolvConfPath = machineapi.SharedFolder + "/" + machineapi.ResolvConfFile
	// CDIDir contains the CDI specifications of the machine's devices, if it has any.
	CDIDir = machineapi.SharedFolder + "/" + machineapi.CDIFolder
	// ContainerImagesDir contains archives of container images, which the administrator of the host has put there.
	ContainerImagesDir = machineapi.SharedFolder + "/" + machineapi.ContainerImagesFolder
	// LogDir holds one log per service, and bootstrap.log.
	LogDir = "/var/log/capstan"
)

// Metadata is the machine's metadata, which capstand writes.
type Metadata = machineapi.Metadata

// Address of the machine.
type Address = machineapi.Address

// Load reads the metadata. For a missing file it returns fs.ErrNotExist.
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

// EvictionSpace is the free space of the machine's disk, in bytes, below which the kubelet evicts pods: a tenth, and 1 GiB at most. It
// remains for etcd and the logs of services. A machine on the disk of its host (0) evicts at 1 GiB.
func EvictionSpace(diskBytes int64) int64 {
	const mebi, most = 1 << 20, 1 << 30
	if space := diskBytes / 10; space > 0 && space < most {
		return space / mebi * mebi
	}
	return most
}

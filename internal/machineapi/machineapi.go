// Package machineapi defines the documents that capstand and capstan-init exchange, and the names of the files in the folder that they
// share: the metadata, which capstand writes; the status, which capstan-init serves on a socket; the files of the election of the endpoint's
// host; and the output of `capstan-init images import`. It also defines the paths of Capstan's programs in a machine. A machine is not
// trusted: capstand checks the values that it uses. The package imports the standard library only.
//
// Layer: contract. Allowed imports: api, library.
package machineapi

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// BlockVolumesFolder is the folder with the files of a machine's block volumes. Programs of the host ignore loop devices with them.
const BlockVolumesFolder = "/var/lib/capstan/block-volumes"

const (
	// AssetsFolder is the read-only folder of a machine with all programs of Capstan.
	AssetsFolder = "/opt/capstan"
	// InitPath is the program of PID 1.
	InitPath = AssetsFolder + "/capstan-init"
	// SearchPath is the search path for programs: those of Capstan first.
	SearchPath = AssetsFolder + "/node/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// SharedFolder is the place in a machine of the folder that capstand and the machine share.
const SharedFolder = "/run/capstan"

// Files and folders in the folder that capstand and the machine share.
const (
	MetadataFile      = "metadata.json"
	BootstrapDataFile = "bootstrap-data"
	// UpdateRequestFile names the update that capstand wants, and UpdateDataFile contains its cloud-config.
	UpdateRequestFile = "update.json"
	UpdateDataFile    = "update-data"
	// ResolvConfFile is the host's resolver configuration, if capstand provides one.
	ResolvConfFile = "resolv.conf"
	// InitSocket is the socket of the machine's PID 1.
	InitSocket = "init.sock"
	// CDIFolder is the folder with CDI specifications of the machine's devices.
	CDIFolder = "cdi"
	// ContainerImagesFolder is the folder with archives of container images of the host.
	ContainerImagesFolder = "images"
)

// Metadata is the content of the file with the metadata of a machine.
type Metadata struct {
	ID                string    `json:"id"`
	Name              string    `json:"name"`
	Hostname          string    `json:"hostname"`
	Cluster           string    `json:"cluster"`
	ProviderID        string    `json:"providerID"`
	Addresses         []Address `json:"addresses"`
	FailureDomain     string    `json:"failureDomain"`
	KubernetesVersion string    `json:"kubernetesVersion"`
	CPUs              int32     `json:"cpus"`
	MemoryBytes       int64     `json:"memoryBytes"`
	PidsLimit         int64     `json:"pidsLimit"`
	// DiskBytes is the size of the machine's own disk, 0 if it shares the disk of its host.
	DiskBytes    int64 `json:"diskBytes"`
	ControlPlane bool  `json:"controlPlane"`
	// Logging contains the flags of the logs of capstan-init; none for the defaults.
	Logging []string `json:"logging,omitempty"`
}

// MachineID returns the content of /etc/machine-id of the machine with an id. It is the same at each start, and differs between machines.
// capstand writes it to a new disk, and capstan-init writes it again if it is lost.
func MachineID(id string) string {
	sum := sha256.Sum256([]byte("capstan machine " + id))
	return hex.EncodeToString(sum[:16]) + "\n"
}

// Address of the machine.
type Address struct {
	Address string `json:"address"`
	Prefix  int32  `json:"prefix"`
	Gateway string `json:"gateway"`
}

// IPs returns the machine's addresses in the order of the metadata.
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

// TemplateVariables returns the variables that `{{ ds.meta_data.* }}` in bootstrap data can name.
func (m Metadata) TemplateVariables() map[string]string {
	vars := map[string]string{
		"instance_id":    m.ID,
		"local_hostname": m.Hostname,
		"hostname":       m.Hostname,
		"provider_id":    m.ProviderID,
		"cluster":        m.Cluster,
		"failure_domain": m.FailureDomain,
	}
	for _, a := range m.Addresses {
		switch addr, err := netip.ParseAddr(a.Address); {
		case err != nil:
		case addr.Is4():
			vars["local_ipv4"] = a.Address
		default:
			vars["local_ipv6"] = a.Address
		}
	}
	return vars
}

// Bootstrap is the progress of the bootstrap data.
type Bootstrap string

// Phases of the bootstrap data, in their order. Succeeded and Failed are final.
const (
	// Waiting: the machine has no bootstrap data yet.
	Waiting Bootstrap = "Waiting"
	// Started: the bootstrap data is being applied. A BootstrapMessage is the reason why this makes no progress.
	Started Bootstrap = "Started"
	// Succeeded: the bootstrap data was applied, and the sentinel file of the bootstrap contract exists.
	Succeeded Bootstrap = "Succeeded"
	// Failed: a step of the bootstrap data failed. BootstrapMessage names it.
	Failed Bootstrap = "Failed"
)

// State of a service.
type State string

// States of a service.
const (
	// StateWaiting: the service starts after other services, and they are not ready yet.
	StateWaiting State = "waiting"
	// StateStarting: the process runs and has never been ready.
	StateStarting State = "starting"
	// StateRunning: the process runs and was ready, and its last probe failed.
	StateRunning State = "running"
	// StateReady: the process runs, and its last probe succeeded. A service without a probe is ready when it runs.
	StateReady State = "ready"
	// StateBackoff: the process ended and will be started again after a delay.
	StateBackoff State = "backoff"
	// StateStopped: the supervisor has stopped the service, and does not start it again on its own.
	StateStopped State = "stopped"
)

// Service is the state of one service.
type Service struct {
	Name     string `json:"name"`
	State    State  `json:"state"`
	Restarts int32  `json:"restarts"`
	Message  string `json:"message"`
	PID      int32  `json:"pid"`
}

// Status is the state of a machine, which PID 1 serves: one JSON document per line of the stream.
type Status struct {
	Bootstrap        Bootstrap `json:"bootstrap"`
	BootstrapMessage string    `json:"bootstrapMessage"`
	Services         []Service `json:"services"`
	// Certificates in use, sorted by name.
	Certificates []Certificate `json:"certificates,omitempty"`
	// Update is the last update in place; nil if there was none.
	Update *Update `json:"update,omitempty"`
	// Times of the bootstrap, for traces.
	Times Times `json:"times,omitzero"`
	// Updates is true if this capstan-init carries out updates in place. Older versions do not report it.
	Updates bool `json:"updates,omitempty"`
}

// Times are the steps of the first start of a machine.
type Times struct {
	// Started is the start of PID 1.
	Started time.Time `json:"started,omitzero"`
	// Applied and Ended are the start and the end of the bootstrap data.
	Applied time.Time `json:"applied,omitzero"`
	Ended   time.Time `json:"ended,omitzero"`
}

// UpdateStalled is the time without progress after which capstand gives up an update. Each step of capstan-init and of its rollback that has
// a limit takes less.
const UpdateStalled = 30 * time.Minute

// UpdateRequest is the content of update.json, which capstand writes into the folder after metadata.json and update-data. It
// makes PID 1 carry out the update.
type UpdateRequest struct {
	ID string `json:"id"`
	// Previous is the size of the machine before the update. After a failure, capstand restores it as soon as PID 1 reports
	// Update.RollingBack, and capstan-init waits for it before it restarts the kubelet, which reads the size at its start.
	Previous Size `json:"previous"`
}

// Size is the part of the metadata that the kubelet reports as the capacity of its Node.
type Size struct {
	CPUs        int32 `json:"cpus"`
	MemoryBytes int64 `json:"memoryBytes"`
}

// Size returns the size of the machine.
func (m Metadata) Size() Size { return Size{CPUs: m.CPUs, MemoryBytes: m.MemoryBytes} }

// UpdatePhase is the phase of an update in place.
type UpdatePhase string

// Phases of an update. All except UpdateRunning are final.
const (
	// UpdateRunning: a step is being carried out, or undone.
	UpdateRunning UpdatePhase = "Running"
	// UpdateSucceeded: the machine is healthy with the new version and configuration.
	UpdateSucceeded UpdatePhase = "Succeeded"
	// UpdateRolledBack: the machine is healthy with the previous version and configuration.
	UpdateRolledBack UpdatePhase = "RolledBack"
	// UpdateFailed: the machine could not be made healthy with either.
	UpdateFailed UpdatePhase = "Failed"
)

// Update is the progress of an update in place.
type Update struct {
	ID    string      `json:"id"`
	Phase UpdatePhase `json:"phase"`
	// Step that is being carried out, or that failed.
	Step    string `json:"step,omitempty"`
	Message string `json:"message,omitempty"`
	// RollingBack is true while a failed update is undone.
	RollingBack bool `json:"rollingBack,omitempty"`
}

// Certificate is a leaf certificate of the machine.
type Certificate struct {
	// Name of the file without its suffix, below its folder: apiserver, etcd/peer, clients/kube-proxy, kubelet-client.
	Name      string    `json:"name"`
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
}

// StopPodsPath is the path of a request to PID 1: it stops the pods of the machine, because the machine ends, and answers when
// none runs any more. The parameter StopPodsWithin is the limit as a duration. A repeated request waits for the first one.
const (
	StopPodsPath   = "/v1/pods/stop"
	StopPodsWithin = "within"
)

// StalledPath is the path of a request to PID 1: its body is the reason why the bootstrap makes no progress, and an empty body
// means that it does again. While the bootstrap data is being applied, the reason is the BootstrapMessage.
const StalledPath = "/v1/bootstrap/stalled"

// Bounds of the time that pods have to stop. PID 1 uses the default when it gets a signal.
const (
	DefaultStopPods = 30 * time.Second
	MaxStopPods     = time.Hour
)

// EndpointLease is the duration of the Lease by which the control plane machines elect the host of the cluster's virtual
// address. Each second of it delays the failover, and a holder needs two or three attempts to renew it.
const EndpointLease = 3 * time.Second

// Files of the election, in the folder that a machine shares with capstand.
const (
	// EndpointOfferFile is written by capstand: until when its host could have the virtual address. The machine takes part in
	// the election only until then.
	EndpointOfferFile = "endpoint-offer.json"
	// EndpointLeaseFile is written by the machine: until when it holds the Lease. Its host has the address only until then.
	EndpointLeaseFile = "endpoint-lease.json"
)

// EndpointTerm is the content of these files.
type EndpointTerm struct {
	// Until is a time of the clock CLOCK_BOOTTIME in nanoseconds, which the host and its machines share.
	Until time.Duration `json:"until"`
}

// ExitBadArchive is the exit code of `capstan-init images import` for an archive that contains no usable image.
const ExitBadArchive = 65

// ImportedImages is the output of `capstan-init images import`.
type ImportedImages struct {
	// Names of the images in the archive, sorted.
	Names []string `json:"names"`
}

// NotReady describes those of the named services that are not ready.
func (s Status) NotReady(names []string) []string {
	states := map[string]Service{}
	for _, service := range s.Services {
		states[service.Name] = service
	}
	var missing []string
	for _, name := range names {
		if service := states[name]; service.State != StateReady {
			missing = append(missing, strings.TrimSpace(fmt.Sprintf("%s: %s %s", name, service.State, service.Message)))
		}
	}
	return missing
}

package placement

import "strings"

// Reason is the kind of requirement because of which a host refuses a machine. It is a label of metrics.
type Reason string

// Reasons why a host refuses a machine.
const (
	// NotAdmitted: no host admits the namespace of the machine and matches the host selectors.
	NotAdmitted Reason = "NotAdmitted"
	// Domain: the host is in another failure domain.
	Domain Reason = "FailureDomain"
	// Network: the host does not reach the network of the cluster.
	Network Reason = "Network"
	// LANAccess: the host does not offer the LAN.
	LANAccess Reason = "LAN"
	// Unavailable: the host is being deleted, is unschedulable or is not connected.
	Unavailable Reason = "Unavailable"
	// Taint: the machine does not tolerate a taint of the host.
	Taint Reason = "Taint"
	// Version: the host cannot run the Kubernetes version.
	Version Reason = "Version"
	// Image: the host does not have the image.
	Image Reason = "Image"
	// ControlPlane: the host accepts no control plane machines.
	ControlPlane Reason = "ControlPlane"
	// HostAccess: the host does not allow or does not have the mounts or devices.
	HostAccess Reason = "HostAccess"
	// CPUs: the host has too few processors.
	CPUs Reason = "CPUs"
	// Memory: the host has too little free memory.
	Memory Reason = "Memory"
	// Disk: the disk of the host is too small.
	Disk Reason = "Disk"
	// Volume: another host has the volume of the machine, or the host cannot have volumes.
	Volume Reason = "Volume"
)

// Reasons are all of them.
var Reasons = []Reason{
	NotAdmitted, Domain, Network, LANAccess, Unavailable, Taint, Version, Image, ControlPlane, HostAccess, CPUs, Memory, Disk, Volume,
}

// Refused is the error if no host can run a machine.
type Refused struct {
	// Reasons of the hosts, one for each.
	Reasons []Reason
	// hosts are the texts for users, each with the name of its host.
	hosts []string
}

// Error implements error.
func (r *Refused) Error() string {
	if len(r.hosts) == 0 {
		return "no CapstanHost admits this namespace and matches the host selectors: create one, or see spec.allowedNamespaces of those that exist"
	}
	return "no host accepts the machine: " + strings.Join(r.hosts, "; ")
}

// Package placement chooses the host of a machine, with pure functions.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/overlay"
	"capstan.dev/capstan/internal/selection"
)

// Host is a host that the machine's namespace may use.
type Host struct {
	Name          string
	FailureDomain string
	// Box of the host; empty if it reports none.
	Box string
	// Tunnel is its tunnel address; empty if it has none.
	Tunnel string
	// Encrypted is true if it encrypts its overlays.
	Encrypted bool
	// Members is the number of the cluster's machines on it that count for the spread. Outdated is that of control plane machines that
	// count only among equals, because they are replaced soon.
	Members, Outdated int
	// Versions of Kubernetes that it can run.
	Versions []string
	// Images that it has.
	Images []string
	// BadImages are those that machines cannot have.
	BadImages []string
	// ControlPlane is true if control plane machines may be placed on it.
	ControlPlane bool
	// Taints of the host.
	Taints []infrav1.HostTaint
	// Unavailable is the reason why nothing can be placed on it now; empty when it can.
	Unavailable string
	// CPUs of the host.
	CPUs int32
	// FreeCPUs are those without a machine. Machines share them, so the number can be negative.
	FreeCPUs int32
	// FreeMemory in bytes.
	FreeMemory int64
	// Disk is the size of the file system for the disks of machines, in bytes; 0 when the host does not report it.
	Disk int64
	// Volumes is true if it can have volumes that outlive machines.
	Volumes bool
	// FreeVolumes is the part of Disk that no volume has, in bytes.
	FreeVolumes int64
	// Permissions of the machine's namespace on the host, for a request with mounts, devices or a LAN.
	Permissions Permissions
	// HostAccess is true if its capstand can give mounts and devices to machines.
	HostAccess bool
	// LANs is true if its capstand can attach machines to a LAN, VLANs if to a VLAN of one, and IPv6LANs if with IPv6 addresses.
	LANs, VLANs, IPv6LANs bool
	// FreeDevices are the free CDI devices by kind.
	FreeDevices map[string]int32
	// FreeDisk is Disk less the sizes of all disks of machines. It can be negative.
	FreeDisk int64
}

// Request contains the requirements of a machine.
type Request struct {
	// FailureDomain that the machine must be in; any when empty (IM-02).
	FailureDomain string
	// Box that the machine must be on, which the network of its cluster does not leave; any when empty.
	Box string
	// Overlay is true if the network of its cluster spans boxes. The machine must then be on a host whose tunnel address has
	// the IP family of Tunnel, the tunnel address of the load balancer's host, and which encrypts its overlays if that host does. Tunnel is
	// empty if this host does not exist or has no tunnel address.
	Overlay   bool
	Tunnel    string
	Encrypted bool
	// Version of Kubernetes; any when empty.
	Version string
	// Image; empty for the host's own /usr, which every host has.
	Image        string
	ControlPlane bool
	// Tolerations of the machine.
	Tolerations []infrav1.HostToleration
	// AnyTaint is true for a load balancer, because taints keep off machines only.
	AnyTaint bool
	// CPUs of the machine; 0 for all of the host's.
	CPUs int32
	// Memory in bytes.
	Memory int64
	// Disk is the size of the machine's disk in bytes.
	Disk int64
	// Host is the only host that can run the machine, because it has its volume Volume; any host when empty.
	Host, Volume string
	// NewVolumes is true if the host must make volumes for the machine, of VolumeBytes together.
	NewVolumes  bool
	VolumeBytes int64
	// Namespace of the machine, for messages.
	Namespace string
	// Mounts and Devices of the host in the machine.
	Mounts  []infrav1.HostMount
	Devices []infrav1.MachineDevice
	// LAN that the machine is attached to.
	LAN LAN
}

// Choose returns the name of a host that can run the machine: one in the failure domain with the fewest members, and of those the
// host with the fewest. A control plane machine shares a host only if no other host can run it. Workers rather avoid hosts with an
// untolerated taint, and control plane machines avoid them only among equals, because two of them on one host fail together. Then the
// host with the most free processors, memory and disk is chosen, in this order, then the first by name. The error is a *Refused with
// the reason of each host that cannot.
func Choose(hosts []Host, req Request) (string, error) {
	var best *Host
	var refused Refused
	domains := map[string]crowd{}
	for i := range hosts {
		domains[hosts[i].FailureDomain] = domains[hosts[i].FailureDomain].plus(hosts[i])
	}
	for i := range hosts {
		h := &hosts[i]
		if reason, why := refusal(h, req); why != "" {
			refused.Reasons, refused.hosts = append(refused.Reasons, reason), append(refused.hosts, h.Name+" "+why)
			continue
		}
		if best == nil || better(h, best, req, domains) {
			best = h
		}
	}
	if best != nil {
		return best.Name, nil
	}
	if len(hosts) == 0 {
		refused.Reasons = []Reason{NotAdmitted}
	}
	slices.Sort(refused.hosts)
	return "", &refused
}

// crowd counts the machines of hosts: see Host.
type crowd struct{ members, outdated int }

func (c crowd) plus(h Host) crowd { return crowd{c.members + h.Members, c.outdated + h.Outdated} }

func (c crowd) compare(to crowd) int {
	return cmp.Or(cmp.Compare(c.members, to.members), cmp.Compare(c.outdated, to.outdated))
}

// better reports whether a host comes before another one: see Choose. domains are the machines by failure domain.
func better(a, b *Host, req Request, domains map[string]crowd) bool {
	spread := cmp.Or(domains[a.FailureDomain].compare(domains[b.FailureDomain]), crowd{}.plus(*a).compare(crowd{}.plus(*b)))
	avoided := cmp.Compare(avoidance(a, req), avoidance(b, req))
	order := cmp.Or(avoided, spread)
	if req.ControlPlane {
		order = cmp.Or(cmp.Compare(min(a.Members, 1), min(b.Members, 1)), spread, avoided)
	}
	return cmp.Or(order, cmp.Compare(b.FreeCPUs, a.FreeCPUs), cmp.Compare(b.FreeMemory, a.FreeMemory), cmp.Compare(b.FreeDisk, a.FreeDisk),
		cmp.Compare(a.Name, b.Name)) < 0
}

// avoidance is the number of taints because of which the machine is placed on other hosts, if possible.
func avoidance(h *Host, req Request) (n int) {
	for _, taint := range h.Taints {
		if taint.Effect == infrav1.HostTaintPreferNoSchedule && !tolerated(taint, req) {
			n++
		}
	}
	return n
}

// repelling returns a taint that keeps the machine off the host, or nil.
func repelling(h *Host, req Request) *infrav1.HostTaint {
	for i := range h.Taints {
		if taint := &h.Taints[i]; taint.Effect == infrav1.HostTaintNoSchedule && !tolerated(*taint, req) {
			return taint
		}
	}
	return nil
}

func tolerated(taint infrav1.HostTaint, req Request) bool {
	return req.AnyTaint || slices.ContainsFunc(req.Tolerations, func(t infrav1.HostToleration) bool {
		return (t.Key == "" || t.Key == taint.Key) && (t.Effect == "" || t.Effect == taint.Effect) &&
			(t.Operator == infrav1.HostTolerationExists || t.Value == taint.Value)
	})
}

// refusal returns the reason why a host does not take a machine, and its text, in the order in which an operator would look.
func refusal(h *Host, req Request) (Reason, string) {
	switch {
	case req.Host != "" && h.Name != req.Host:
		return Volume, fmt.Sprintf("does not have the machine's volume %s: host %s has it", req.Volume, req.Host)
	case req.FailureDomain != "" && h.FailureDomain != req.FailureDomain:
		return Domain, fmt.Sprintf("is in failure domain %s, not %s", h.FailureDomain, req.FailureDomain)
	case !Reaches(h, req) && !req.Overlay:
		return Network, "is on another box than the cluster's load balancer, and a cluster's network does not leave its box"
	case !Reaches(h, req) && req.Tunnel == "":
		return Network, "does not reach the cluster's network: the CapstanHost of spec.loadBalancer.hostName in the CapstanCluster does not exist or has no spec.tunnelAddress: name a host that has one"
	case !Reaches(h, req) && h.Encrypted != req.Encrypted && overlay.SameFamily(h.Tunnel, req.Tunnel):
		return Network, "does not reach the cluster's network: " + overlay.Disagreement(h.Encrypted)
	case !Reaches(h, req):
		return Network, fmt.Sprintf("does not reach the cluster's network: its spec.tunnelAddress is %q, and that of the load balancer's host %q; both must be set and of one IP family", h.Tunnel, req.Tunnel)
	case h.Permissions.LANRefusal(req.Namespace, req.LAN) != "":
		return LANAccess, h.Permissions.LANRefusal(req.Namespace, req.LAN)
	case h.Unavailable != "":
		return Unavailable, h.Unavailable
	case req.LAN.Name != "" && !h.LANs:
		return LANAccess, "cannot attach machines to a LAN: upgrade its capstand"
	case req.LAN.VLAN != 0 && !h.VLANs:
		return LANAccess, OldForVLANs
	case req.LAN.hasIPv6() && !h.IPv6LANs:
		return LANAccess, oldForIPv6
	case repelling(h, req) != nil:
		return Taint, fmt.Sprintf("has the taint %s, which spec.hostTolerations does not tolerate", text(repelling(h, req)))
	case req.Version != "" && !slices.Contains(h.Versions, req.Version):
		return Version, fmt.Sprintf("cannot run Kubernetes %s (it has %s)", req.Version, cmp.Or(strings.Join(h.Versions, ", "), "none"))
	case slices.Contains(h.BadImages, req.Image):
		return Image, fmt.Sprintf("cannot use its image %s: see status.images of the CapstanHost", req.Image)
	case req.Image != "" && !slices.Contains(h.Images, req.Image):
		return Image, fmt.Sprintf("has no image %s (it has %s)", req.Image, cmp.Or(strings.Join(h.Images, ", "), "none"))
	case req.ControlPlane && !h.ControlPlane:
		return ControlPlane, "does not accept control plane machines"
	}
	if why := accessRefusal(h, req); why != "" {
		return HostAccess, why
	}
	return sizeRefusal(h, req)
}

// sizeRefusal returns why a host is too small for a machine, or empty strings.
func sizeRefusal(h *Host, req Request) (Reason, string) {
	switch {
	case h.CPUs < req.CPUs:
		return CPUs, fmt.Sprintf("has %d processors, %d are needed", h.CPUs, req.CPUs)
	case h.FreeMemory < req.Memory:
		return Memory, fmt.Sprintf("has %s of memory left, %s are needed", quantity(h.FreeMemory), quantity(req.Memory))
	// Disks occupy only their written blocks, so their sum may exceed the host's disk. A single disk must not be larger
	// than it.
	case h.Disk > 0 && h.Disk < req.Disk:
		return Disk, fmt.Sprintf("has a disk of %s, %s are needed", quantity(h.Disk), quantity(req.Disk))
	case req.NewVolumes && !h.Volumes:
		return Volume, "cannot have volumes: upgrade its capstand, or see status.diskBackend of the CapstanHost"
	case req.NewVolumes && h.Disk > 0 && h.FreeVolumes < req.VolumeBytes:
		return Disk, fmt.Sprintf("has %s of disk left for volumes, %s are needed", quantity(h.FreeVolumes), quantity(req.VolumeBytes))
	}
	return "", ""
}

// Reaches reports whether a host can have machines of the cluster. Without an overlay, a host that reports no box can.
func Reaches(h *Host, req Request) bool {
	if req.Overlay {
		return overlay.SameFamily(h.Tunnel, req.Tunnel) && h.Encrypted == req.Encrypted
	}
	return h.Box == "" || req.Box == "" || h.Box == req.Box
}

// text returns a taint as kubectl writes it.
func text(t *infrav1.HostTaint) string {
	if t.Value == "" {
		return fmt.Sprintf("%s:%s", t.Key, t.Effect)
	}
	return fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect)
}

func quantity(bytes int64) string {
	return resource.NewQuantity(max(bytes, 0), resource.BinarySI).String()
}

// FailureDomain of a host: its own name when it has none.
func FailureDomain(h *infrav1.CapstanHost) string {
	if h.Spec.FailureDomain != "" {
		return h.Spec.FailureDomain
	}
	return h.Name
}

// Admits reports whether clusters of a namespace may use a host (ALL-18). An invalid selector admits nothing.
func Admits(h *infrav1.CapstanHost, namespace string, namespaceLabels map[string]string) bool {
	allowed := h.Spec.AllowedNamespaces
	return allowed == nil || selection.Namespace(allowed.Names, allowed.Selector, namespace, namespaceLabels)
}

// Schedulable reports whether new machines may be placed on a host.
func Schedulable(h *infrav1.CapstanHost) bool {
	return !ptr.Deref(h.Spec.Unschedulable, false) && !ptr.Deref(h.Spec.Drain, false) && !h.RebootPending()
}

// Repels reports whether a host has a taint that keeps off machines with these tolerations.
func Repels(h *infrav1.CapstanHost, tolerations ...infrav1.HostToleration) bool {
	return repelling(&Host{Taints: h.Spec.Taints}, Request{Tolerations: tolerations}) != nil
}

// AllowsControlPlane reports whether control plane machines may be placed on a host; the default is true.
func AllowsControlPlane(h *infrav1.CapstanHost) bool { return ptr.Deref(h.Spec.ControlPlane, true) }

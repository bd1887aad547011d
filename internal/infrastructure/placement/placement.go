// Package placement decides on which host a machine goes. All of it is pure.
//
// Layer: reconciler.
package placement

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/selection"
)

// Host is a host that the machine's namespace may use.
type Host struct {
	Name          string
	FailureDomain string
	// Box that it stands on; empty when it does not tell.
	Box string
	// Versions of Kubernetes that it can run.
	Versions []string
	// Images that it has.
	Images []string
	// ControlPlane is true if control plane machines may be placed on it.
	ControlPlane bool
	// Unavailable is the reason why nothing can be placed on it now; empty when it can.
	Unavailable string
	// CPUs of the host.
	CPUs int32
	// FreeMemory in bytes.
	FreeMemory int64
	// Disk is the size of the file system for the disks of machines, in bytes; 0 when the host does not report it.
	Disk int64
}

// Request is what a machine needs.
type Request struct {
	// FailureDomain that the machine must be in; any when empty (IM-02).
	FailureDomain string
	// Box that the machine must be on, which the network of its cluster does not leave; any when empty.
	Box string
	// Version of Kubernetes; any when empty.
	Version string
	// Image; empty for the host's own /usr, which every host has.
	Image        string
	ControlPlane bool
	// CPUs of the machine; 0 for all of the host's.
	CPUs int32
	// Memory in bytes.
	Memory int64
	// Disk is the size of the machine's disk in bytes.
	Disk int64
}

// Choose returns the name of the host with the most free memory among those that take the machine, the
// first by name among equals. The error says for each host why it does not take the machine.
func Choose(hosts []Host, req Request) (string, error) {
	var best *Host
	var refusals []string
	for i := range hosts {
		h := &hosts[i]
		if why := refusal(h, req); why != "" {
			refusals = append(refusals, h.Name+" "+why)
			continue
		}
		if best == nil || h.FreeMemory > best.FreeMemory || h.FreeMemory == best.FreeMemory && h.Name < best.Name {
			best = h
		}
	}
	if best != nil {
		return best.Name, nil
	}
	if len(hosts) == 0 {
		return "", fmt.Errorf("no CapstanHost admits this namespace and matches the host selectors: create one, or see spec.allowedNamespaces of those that exist")
	}
	slices.Sort(refusals)
	return "", fmt.Errorf("no host accepts the machine: %s", strings.Join(refusals, "; "))
}

// refusal returns the reason why a host does not take a machine, in the order in which an operator would look.
func refusal(h *Host, req Request) string {
	switch {
	case req.FailureDomain != "" && h.FailureDomain != req.FailureDomain:
		return fmt.Sprintf("is in failure domain %s, not %s", h.FailureDomain, req.FailureDomain)
	case !SameBox(h.Box, req.Box):
		return "is on another box than the cluster's load balancer, and a cluster's network does not leave its box"
	case h.Unavailable != "":
		return h.Unavailable
	case req.Version != "" && !slices.Contains(h.Versions, req.Version):
		return fmt.Sprintf("cannot run Kubernetes %s (it has %s)", req.Version, list(h.Versions))
	case req.Image != "" && !slices.Contains(h.Images, req.Image):
		return fmt.Sprintf("has no image %s (it has %s)", req.Image, list(h.Images))
	case req.ControlPlane && !h.ControlPlane:
		return "does not accept control plane machines"
	case h.CPUs < req.CPUs:
		return fmt.Sprintf("has %d processors, %d are needed", h.CPUs, req.CPUs)
	case h.FreeMemory < req.Memory:
		return fmt.Sprintf("has %s of memory left, %s are needed", quantity(h.FreeMemory), quantity(req.Memory))
	// Disks occupy only what is written to them, so that their sum may exceed the host's disk. One alone can never be larger.
	case h.Disk > 0 && h.Disk < req.Disk:
		return fmt.Sprintf("has a disk of %s, %s are needed", quantity(h.Disk), quantity(req.Disk))
	}
	return ""
}

// SameBox reports whether two hosts can have machines of one cluster. A host that does not tell its box can.
func SameBox(a, b string) bool { return a == "" || b == "" || a == b }

func list(s []string) string {
	if len(s) == 0 {
		return "none"
	}
	return strings.Join(s, ", ")
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

// AllowsControlPlane reports whether control plane machines may be placed on a host; they may unless
// it says otherwise.
func AllowsControlPlane(h *infrav1.CapstanHost) bool { return ptr.Deref(h.Spec.ControlPlane, true) }

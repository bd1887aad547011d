// Package admission contains the rules by which a host accepts or refuses the calls of hostpb.Host. The three
// implementations (capstand, the hollow host, the fake host of the tests) share them; package conformance proves that.
// The functions are pure: they get the state of the host and return nil or a refusal.
//
// Layer: host. Allowed imports: api, library, contract.
package admission

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machinedisk"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/host/refusal"
)

// HostImage is the machine image that consists of the host's own /usr.
const HostImage = "host"

// minMemory is the least memory of a machine, in bytes. No machine starts with less.
const minMemory = 64 << 20

// defaultPidsLimit applies to specs without a limit, which managers older than the field send.
const defaultPidsLimit = 16384

// PidsLimit returns the largest number of processes of a machine.
func PidsLimit(s *hostpb.MachineSpec) int64 { return cmp.Or(s.PidsLimit, defaultPidsLimit) }

// defaultDiskBytes applies to specs without a size, which managers older than the field send.
const defaultDiskBytes = 20 << 30

// DiskBytes returns the size of a machine's disk, in bytes.
func DiskBytes(s *hostpb.MachineSpec) int64 { return cmp.Or(s.DiskBytes, defaultDiskBytes) }

var (
	idForm   = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}$`)
	nameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)
)

// ValidID returns whether an id has the form that hosts accept. Such an id can be part of a path.
func ValidID(id string) bool { return idForm.MatchString(id) }

// CheckID refuses an id of another form (INVALID).
func CheckID(what, id string) error {
	if ValidID(id) {
		return nil
	}
	return invalid("%s id %q is not valid: expected at most 63 letters, digits, - and _", what, id)
}

// CheckService refuses a name that no service of a machine has (INVALID).
func CheckService(name string) error {
	if err := accessapi.CheckService(name); err != nil {
		return invalid("%v", err)
	}
	return nil
}

// CheckExec refuses a command that no machine can run (INVALID).
func CheckExec(start *hostpb.ExecStart) error {
	if start == nil {
		return invalid("expected the start of a command first")
	}
	if err := accessapi.CheckCommand(start.GetCommand(), start.GetTerm()); err != nil {
		return invalid("%v", err)
	}
	return CheckID("machine", start.GetMachine())
}

func invalid(format string, args ...any) error {
	return refusal.Errorf(hostpb.Refusal_INVALID, format, args...)
}

// CheckMachine refuses a spec that is invalid on every host (INVALID).
func CheckMachine(s *hostpb.MachineSpec) error {
	if err := CheckID("machine", s.GetId()); err != nil {
		return err
	}
	switch {
	case !nameForm.MatchString(s.Name):
		return invalid("machine name %q is not a host name: expected at most 63 lower-case letters, digits, - and .", s.Name)
	case s.Cpus < 0:
		return invalid("machine %s/%s requests %d cpus: expected a positive number, or 0 for all", s.Namespace, s.Name, s.Cpus)
	case s.MemoryBytes < minMemory:
		return invalid("machine %s/%s requests %d bytes of memory: expected at least %d", s.Namespace, s.Name, s.MemoryBytes, minMemory)
	case s.PidsLimit < 0:
		return invalid("machine %s/%s requests a limit of %d processes: expected a positive number, or 0 for the default of the host", s.Namespace, s.Name, s.PidsLimit)
	case DiskBytes(s) < machinedisk.MinBytes:
		return invalid("machine %s/%s requests a disk of %d bytes: expected at least %d", s.Namespace, s.Name, s.DiskBytes, machinedisk.MinBytes)
	case len(s.Addresses) == 0:
		return invalid("machine %s/%s has no address", s.Namespace, s.Name)
	}
	if err := owner.Given("machine", s.Id, s); err != nil {
		return err
	}
	if err := checkMounts(s); err != nil {
		return err
	}
	if err := CheckNetwork(s.Network); err != nil {
		return err
	}
	if err := checkAddresses(s); err != nil {
		return invalid("machine %s/%s: %v", s.Namespace, s.Name, err)
	}
	if err := checkHostAccess(s); err != nil {
		return invalid("machine %s/%s: %v", s.Namespace, s.Name, err)
	}
	return nil
}

// checkAddresses requires an address of the first network, and accepts one of the second network of dual stack.
func checkAddresses(s *hostpb.MachineSpec) error {
	subnets, err := subnetsOf(s.Network)
	if err != nil {
		return err
	}
	for i, a := range s.Addresses {
		if i == len(subnets) {
			return fmt.Errorf("address %s is one more than the number of address families of the machine network %s", a.Address, s.Network.Cidr)
		}
		if err := network.CheckAddress(subnets[i].Prefix, a.Address, int(a.Prefix)); err != nil {
			return err
		}
		if a.Gateway == "" && s.Network.Lan != nil {
			return fmt.Errorf("address %s has no gateway: expected that of the LAN", a.Address)
		}
		if canonical := netip.MustParseAddr(a.Address).String(); a.Address != canonical && s.Network.Lan != nil {
			return fmt.Errorf("address %s: expected the form %s", a.Address, canonical) // Leases are compared as text.
		}
		if gateway, err := netip.ParseAddr(a.Gateway); a.Gateway != "" && (err != nil || !subnets[i].Prefix.Contains(gateway)) {
			return fmt.Errorf("gateway %q is not in the machine network %s", a.Gateway, subnets[i].Prefix)
		}
	}
	return nil
}

func subnetsOf(n *hostpb.Network) ([]network.Subnet, error) {
	return network.Subnets(n.GetCidr(), n.GetIpv6Cidr())
}

// CheckNetwork refuses a network that is invalid on every host (INVALID).
func CheckNetwork(n *hostpb.Network) error {
	if err := CheckID("network", n.GetId()); err != nil {
		return err
	}
	if _, err := subnetsOf(n); err != nil {
		return invalid("cluster %s/%s: %v", n.Namespace, n.Name, err)
	}
	if err := cmp.Or(checkOverlay(n.Overlay), checkLAN(n)); err != nil {
		return invalid("cluster %s/%s: %v", n.Namespace, n.Name, err)
	}
	return owner.Given("network", n.Id, n)
}

// CheckLoadBalancer refuses a load balancer that is invalid on every host (INVALID).
func CheckLoadBalancer(lb *hostpb.LoadBalancer) error {
	if err := CheckID("load balancer", lb.GetId()); err != nil {
		return err
	}
	if len(lb.Listen) == 0 {
		return invalid("load balancer %s/%s (%s) has no listen address", lb.Namespace, lb.Name, lb.Id)
	}
	for i, listen := range lb.Listen {
		if err := checkListen(listen, i == 0); err != nil {
			return invalid("load balancer %s/%s: %v", lb.Namespace, lb.Name, err)
		}
	}
	if err := checkEndpoint(lb.Endpoint); err != nil {
		return invalid("load balancer %s/%s: %v", lb.Namespace, lb.Name, err)
	}
	if err := checkVirtualAddress(lb); err != nil {
		return invalid("load balancer %s/%s: %v", lb.Namespace, lb.Name, err)
	}
	return owner.Given("load balancer", lb.Id, lb)
}

// checkListen returns an error unless a load balancer may listen on an address: one for all addresses of the host, or a loopback address, would
// take the place of other programs. The first address of a load balancer may be empty; it is then the gateway's.
func checkListen(listen string, first bool) error {
	address, _, err := net.SplitHostPort(listen)
	if err != nil {
		return fmt.Errorf("listen address %q: expected host:port", listen)
	}
	if a, err := netip.ParseAddr(address); (err != nil || !a.IsGlobalUnicast()) && (address != "" || !first) {
		return fmt.Errorf("listen address %q: expected a unicast address of the host", listen)
	}
	return nil
}

// checkVirtualAddress returns an error unless the virtual address is the address of the endpoint.
func checkVirtualAddress(lb *hostpb.LoadBalancer) error {
	if lb.VirtualAddress == nil {
		return nil
	}
	endpoint, err := netip.ParseAddrPort(lb.Endpoint)
	if err != nil || endpoint.Addr().String() != lb.VirtualAddress.Address || !endpoint.Addr().IsGlobalUnicast() {
		return fmt.Errorf("virtual address %q must be the address of the endpoint %q, and a unicast address", lb.VirtualAddress.Address, lb.Endpoint)
	}
	return nil
}

// unchanged refuses another spec for an existing machine (SPEC_CHANGED). The outputs of the network do not count, and
// an omitted gateway equals the default gateway.
func unchanged(have, want *hostpb.MachineSpec) error {
	if proto.Equal(Normalized(have), Normalized(want)) {
		return nil
	}
	return refusal.Errorf(hostpb.Refusal_SPEC_CHANGED,
		"machine %s/%s (%s) exists with another spec, and the spec of a machine cannot change: found %v, requested %v",
		have.Namespace, have.Name, have.Id, Normalized(have), Normalized(want))
}

// Normalized returns a copy of a spec with all defaults and without the outputs of its network.
func Normalized(s *hostpb.MachineSpec) *hostpb.MachineSpec {
	s = proto.CloneOf(s)
	s.Network.Gateway, s.Network.Bridge = "", ""
	s.PidsLimit, s.DiskBytes = PidsLimit(s), DiskBytes(s)
	subnets, _ := subnetsOf(s.Network)
	for i, a := range s.Addresses {
		if a.Gateway == "" && i < len(subnets) {
			a.Gateway = subnets[i].Gateway.String()
		}
	}
	return s
}

// fits refuses a machine for which the host has too few processors (INVALID), too little free memory (OUT_OF_MEMORY) or a
// file system that is smaller than the disk (NO_DISK_SPACE). Machines share processors, but not memory.
func fits(s *hostpb.MachineSpec, info *hostpb.HostInfo) error {
	if s.Cpus > info.Cpus {
		return invalid("machine %s/%s requests %d cpus, this host has %d", s.Namespace, s.Name, s.Cpus, info.Cpus)
	}
	if free := info.MemoryBytes - info.AllocatedMemoryBytes; s.MemoryBytes > free {
		return refusal.Errorf(hostpb.Refusal_OUT_OF_MEMORY,
			"machine %s/%s requests %d MiB of memory, %d of %d MiB are free on this host; delete machines, choose smaller ones, or add a host",
			s.Namespace, s.Name, s.MemoryBytes>>20, free>>20, info.MemoryBytes>>20)
	}
	if size := DiskBytes(s); info.DiskBytes > 0 && size > info.DiskBytes {
		return refusal.Errorf(hostpb.Refusal_NO_DISK_SPACE, "machine %s/%s requests a disk of %d MiB, the host's file system has %d MiB; choose a smaller disk, or add a host",
			s.Namespace, s.Name, size>>20, info.DiskBytes>>20)
	}
	return nil
}

// SpaceLeft refuses a machine while the host has less free space than it reserves, in bytes (NO_DISK_SPACE). The machines
// that have disks would fail to write. claimed is the part of the free space that its disk, and the disks of accepted machines, will occupy at once.
func SpaceLeft(s *hostpb.MachineSpec, free, claimed, reserve int64) error {
	if free-claimed < reserve {
		return refusal.Errorf(hostpb.Refusal_NO_DISK_SPACE,
			"machine %s/%s needs space for its disk, the host has %d MiB left, of which new disks claim %d MiB, and reserves %d MiB; free space on the host, or add a host",
			s.Namespace, s.Name, free>>20, claimed>>20, reserve>>20)
	}
	return nil
}

// provided refuses a machine whose image or Kubernetes version the host does not have (NOT_PROVIDED).
func provided(s *hostpb.MachineSpec, info *hostpb.HostInfo) error {
	if !slices.Contains(info.Images, s.Image) {
		return refusal.Errorf(hostpb.Refusal_NOT_PROVIDED, "machine %s/%s requests image %q, this host has: %s",
			s.Namespace, s.Name, s.Image, strings.Join(info.Images, ", "))
	}
	if !slices.Contains(info.KubernetesVersions, s.KubernetesVersion) {
		return refusal.Errorf(hostpb.Refusal_NOT_PROVIDED, "machine %s/%s requests Kubernetes %q, this host has: %s",
			s.Namespace, s.Name, s.KubernetesVersion, strings.Join(info.KubernetesVersions, ", "))
	}
	return nil
}

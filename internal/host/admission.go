package host

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machinedisk"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/owner"
)

// HostImage is the machine image that is the host's own /usr.
const HostImage = "host"

// minMemory is below what any machine could start with.
const minMemory = 64 << 20

// defaultPidsLimit is that of machines whose spec has none: those that a manager from before the field made.
const defaultPidsLimit = 16384

func pidsLimit(s *hostpb.MachineSpec) int64 { return cmp.Or(s.PidsLimit, defaultPidsLimit) }

// defaultDiskBytes applies to specs without a size, which managers older than the field send.
const defaultDiskBytes = 20 << 30

func diskBytes(s *hostpb.MachineSpec) int64 { return cmp.Or(s.DiskBytes, defaultDiskBytes) }

var (
	idForm   = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}$`)
	nameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)
)

// checkMachine says what is wrong with a machine's spec in itself.
func checkMachine(s *hostpb.MachineSpec) error {
	invalid := func(format string, args ...any) error { return status.Errorf(codes.InvalidArgument, format, args...) }
	switch {
	case !idForm.MatchString(s.GetId()):
		return invalid("machine id %q is not valid, want letters, digits, - and _, at most 63", s.GetId())
	case !nameForm.MatchString(s.Name):
		return invalid("machine name %q is no host name, want lower-case letters, digits, - and ., at most 63", s.Name)
	case s.Cpus < 0 || int(s.Cpus) > runtime.NumCPU():
		return invalid("machine %s/%s wants %d cpus, the host has %d", s.Namespace, s.Name, s.Cpus, runtime.NumCPU())
	case s.MemoryBytes < minMemory:
		return invalid("machine %s/%s wants %d bytes of memory, the least is %d", s.Namespace, s.Name, s.MemoryBytes, minMemory)
	case s.PidsLimit < 0:
		return invalid("machine %s/%s wants %d processes at most: want a positive number, or 0 for the host's default", s.Namespace, s.Name, s.PidsLimit)
	case diskBytes(s) < machinedisk.MinBytes:
		return invalid("machine %s/%s wants a disk of %d bytes, the least is %d", s.Namespace, s.Name, s.DiskBytes, machinedisk.MinBytes)
	case len(s.Addresses) == 0:
		return invalid("machine %s/%s has no address", s.Namespace, s.Name)
	}
	if err := owner.Given("machine", s.Id, s); err != nil {
		return err
	}
	if err := checkNetwork(s.Network); err != nil {
		return err
	}
	if err := checkAddresses(s); err != nil {
		return invalid("machine %s/%s: %v", s.Namespace, s.Name, err)
	}
	return nil
}

// checkAddresses: the first one is IPv4, and a second one is of the network's IPv6 part.
func checkAddresses(s *hostpb.MachineSpec) error {
	subnets, err := subnets(s.Network)
	if err != nil {
		return err
	}
	for i, a := range s.Addresses {
		if i == len(subnets) {
			return fmt.Errorf("address %s is one more than the machine network %s has address families", a.Address, s.Network.Cidr)
		}
		if err := network.CheckAddress(subnets[i].Prefix, a.Address, int(a.Prefix)); err != nil {
			return err
		}
		if gateway, err := netip.ParseAddr(a.Gateway); a.Gateway != "" && (err != nil || !subnets[i].Prefix.Contains(gateway)) {
			return fmt.Errorf("gateway %q is not in the machine network %s", a.Gateway, subnets[i].Prefix)
		}
	}
	return nil
}

func subnets(n *hostpb.Network) ([]network.Subnet, error) {
	return network.Subnets(n.GetCidr(), n.GetIpv6Cidr())
}

func checkNetwork(n *hostpb.Network) error {
	if !idForm.MatchString(n.GetId()) {
		return status.Errorf(codes.InvalidArgument, "network id %q is not valid, want letters, digits, - and _, at most 63", n.GetId())
	}
	if _, err := subnets(n); err != nil {
		return status.Errorf(codes.InvalidArgument, "cluster %s/%s: %v", n.Namespace, n.Name, err)
	}
	return owner.Given("network", n.Id, n)
}

// changed names the field in which a machine that exists differs from what is asked for. The network's
// outputs do not count, and the default gateway may be spelled out.
func changed(have, want *hostpb.MachineSpec) error {
	if proto.Equal(normal(have), normal(want)) {
		return nil
	}
	return status.Errorf(codes.InvalidArgument,
		"machine %s/%s (%s) exists with another spec, and a machine does not change: have %v, want %v",
		have.Namespace, have.Name, have.Id, normal(have), normal(want))
}

func normal(s *hostpb.MachineSpec) *hostpb.MachineSpec {
	s = proto.CloneOf(s)
	s.Network.Gateway, s.Network.Bridge = "", ""
	s.PidsLimit, s.DiskBytes = pidsLimit(s), diskBytes(s)
	subnets, _ := subnets(s.Network)
	for i, a := range s.Addresses {
		if a.Gateway == "" && i < len(subnets) {
			a.Gateway = subnets[i].Gateway.String()
		}
	}
	return s
}

// fits says whether a machine has room: memory is promised only once, cpus are shared.
func fits(s *hostpb.MachineSpec, info *hostpb.HostInfo) error {
	if free := info.MemoryBytes - info.AllocatedMemoryBytes; s.MemoryBytes > free {
		return status.Errorf(codes.ResourceExhausted,
			"machine %s/%s wants %d MiB of memory, %d of %d MiB are free on this host; delete machines, choose smaller ones, or add a host",
			s.Namespace, s.Name, s.MemoryBytes>>20, free>>20, info.MemoryBytes>>20)
	}
	if size := diskBytes(s); info.DiskBytes > 0 && size > info.DiskBytes {
		return status.Errorf(codes.FailedPrecondition, "machine %s/%s wants a disk of %d MiB, the host's file system has %d MiB; choose a smaller disk, or add a host",
			s.Namespace, s.Name, size>>20, info.DiskBytes>>20)
	}
	return nil
}

// spaceLeft refuses a machine while the host has less free space than it reserves: machines that have disks would fail to write.
func spaceLeft(s *hostpb.MachineSpec, free, reserve int64) error {
	if free < reserve {
		return status.Errorf(codes.FailedPrecondition,
			"machine %s/%s needs space for its disk, the host has %d MiB left and reserves %d MiB; free space on the host, or add a host",
			s.Namespace, s.Name, free>>20, reserve>>20)
	}
	return nil
}

// provided says whether the host has what the machine is made of.
func provided(s *hostpb.MachineSpec, info *hostpb.HostInfo) error {
	if !slices.Contains(info.Images, s.Image) {
		return status.Errorf(codes.FailedPrecondition, "machine %s/%s wants image %q, this host has: %s",
			s.Namespace, s.Name, s.Image, strings.Join(info.Images, ", "))
	}
	if !slices.Contains(info.KubernetesVersions, s.KubernetesVersion) {
		return status.Errorf(codes.FailedPrecondition, "machine %s/%s wants Kubernetes %q, this host has: %s",
			s.Namespace, s.Name, s.KubernetesVersion, strings.Join(info.KubernetesVersions, ", "))
	}
	return nil
}

// networkError gives an error of package network its code.
func networkError(err error) error {
	var inUse network.InUseError
	var conflict network.ConflictError
	switch {
	case errors.As(err, &inUse):
		return status.Error(codes.AlreadyExists, err.Error())
	case errors.As(err, &conflict):
		return status.Error(codes.FailedPrecondition, err.Error())
	}
	return status.Error(codes.Internal, err.Error())
}

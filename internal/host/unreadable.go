package host

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/runc"
)

// What a capstand finds and cannot read, because a disk or a person has damaged it, must stay visible and removable. A machine
// without a readable record is failed: it is neither watched nor started, and its deletion removes its container, cgroup, network
// and files like those of any other. Networks are written again from what machines and the box have of them. A load balancer is
// left as it is until its owner describes it anew.

// nobody is the namespace of a machine whose owner is not known; its name is its id. No object of Kubernetes has such a namespace.
const nobody = "-"

// loadUnreadable takes over the machines whose record cannot be read, and those that have a container or a cgroup and no
// record at all; mu is held.
func (ms *machines) loadUnreadable(unreadable map[string]error) {
	for id, err := range unreadable {
		ms.addUnreadable(id, fmt.Sprintf("capstand cannot read the record of the machine: %v", err))
	}
	for _, id := range ms.strangers() {
		ms.addUnreadable(id, "the machine has a container or a cgroup on the host and no record")
	}
}

// addUnreadable registers a machine without a readable record; mu is held.
func (ms *machines) addUnreadable(id, why string) {
	m := ms.add(ms.identify(id))
	m.broken = why + ". It is neither watched nor started, and its processes may run: delete it, or repair its record and restart capstand"
	m.log.Error("machine cannot be taken over", "why", why)
}

// strangers are the ids of containers and cgroups of this host that belong to no machine that was read; mu is held.
func (ms *machines) strangers() []string {
	found := append(folders(ms.runc.Root), ms.cgroup("").Children()...)
	slices.Sort(found)
	return slices.DeleteFunc(slices.Compact(found), func(id string) bool {
		return ms.byID[id] != nil || !admission.ValidID(id) || strings.HasPrefix(id, balancerCgroup)
	})
}

// identify finds out as much as possible of a machine without a record. Its bundle and its container say whose it is; those of
// machines from before they did have leases.
func (ms *machines) identify(id string) *hostpb.MachineSpec {
	spec := &hostpb.MachineSpec{Id: id, Namespace: nobody, Name: id, Network: &hostpb.Network{}}
	var bundle oci.Spec
	if err := atomicfile.ReadJSON(ms.store.path(machinesDir, id, "bundle", "config.json"), &bundle); err == nil && bundle.Linux != nil {
		if r := bundle.Linux.Resources; r != nil && r.Memory != nil && r.Memory.Limit != nil {
			spec.MemoryBytes = *r.Memory.Limit
		}
	}
	annotations := bundle.Annotations
	if annotations[runc.NameAnnotation] == "" {
		state, _ := ms.runc.State(ms.ctx, id) // without a container there are none
		annotations = state.Annotations
	}
	if annotations[runc.NameAnnotation] != "" {
		spec.Namespace, spec.Name = annotations[runc.NamespaceAnnotation], annotations[runc.NameAnnotation]
		spec.Network.Id = annotations[runc.NetworkAnnotation]
		return spec
	}
	if lease, networkID := ms.box.LeaseOf(id); networkID != "" {
		spec.Network.Id = networkID
		if namespace, name, ok := strings.Cut(lease.Name, "/"); ok {
			spec.Namespace, spec.Name = namespace, name
		}
	}
	return spec
}

// mendNetworks writes the records of networks again that cannot be read or are not there though machines need them. A network
// that nobody has anything of is discarded: its owner makes it again. mu is held, and the machines are loaded.
func (h *Host) mendNetworks(unreadable map[string]error) error {
	missing := maps.Clone(unreadable)
	for _, m := range h.machines.byID {
		if id := m.spec.Network.Id; id != "" && h.networks.byID[id] == nil && missing[id] == nil {
			missing[id] = fmt.Errorf("machine %s/%s has it, and it is not there", m.spec.Namespace, m.spec.Name)
		}
	}
	for id, why := range missing {
		n := h.knownNetwork(id)
		h.log.Error("the record of a network is damaged", "id", id, "error", why, "can be written again", n != nil)
		demanded := atomicfile.Exists(h.store.path(networksDir, id, onDemand)) || unreadable[id] == nil
		if err := h.store.discard(h.store.path(networksDir, id)); err != nil {
			return err
		}
		if n == nil {
			continue
		}
		files := map[string][]byte{}
		if demanded {
			files[onDemand] = nil
		}
		if err := h.store.create(networksDir, id, n, files); err != nil {
			return err
		}
		h.networks.byID[id] = n
	}
	return nil
}

// knownNetwork is what the machines, or else the box, have of a network; nil if nothing. mu is held.
func (h *Host) knownNetwork(id string) *hostpb.Network {
	for _, m := range h.machines.byID {
		if n := m.spec.Network; n.Id == id && n.Cidr != "" {
			return &hostpb.Network{Id: id, Namespace: n.Namespace, Name: n.Name, Cidr: n.Cidr, Ipv6Cidr: n.Ipv6Cidr}
		}
	}
	n, ok := h.box.Network(id)
	namespace, name, named := strings.Cut(n.Cluster, "/")
	if !ok || !named {
		return nil
	}
	return &hostpb.Network{Id: id, Namespace: namespace, Name: name, Cidr: n.CIDR, Ipv6Cidr: n.IPv6CIDR}
}

// loadUnreadable keeps the load balancers whose record cannot be read until their owners describe them again, or delete
// them. A load balancer has the id, namespace and name of its cluster's network. mu is held, and the networks are loaded.
func (bs *balancers) loadUnreadable(unreadable map[string]error) {
	for id, err := range unreadable {
		spec := &hostpb.LoadBalancer{Id: id, NetworkId: id, Namespace: nobody, Name: id}
		if n := bs.networks.byID[id]; n != nil {
			spec.Namespace, spec.Name = n.Namespace, n.Name
		}
		lb := bs.add(spec, nil)
		lb.described = make(chan struct{})
		lb.message = fmt.Sprintf("capstand cannot read the record of the load balancer: %v. It stays as it is until its owner describes it again", err)
		lb.log.Error("load balancer", "error", err)
	}
}

// folders lists the names of the folders in dir.
func folders(dir string) (names []string) {
	found, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, path := range found {
		names = append(names, filepath.Base(path))
	}
	return names
}

// checkRecord says what is wrong with the record of a machine that could be read as JSON.
func checkRecord(folder string, spec *hostpb.MachineSpec) error {
	if spec.Id != folder {
		return fmt.Errorf("it is of machine %q and lies in the folder of %q", spec.Id, folder)
	}
	if cmp.Or(spec.Namespace, spec.Name) == "" || len(spec.Addresses) == 0 {
		return fmt.Errorf("it has no name or no address")
	}
	_, err := network.Subnets(spec.GetNetwork().GetCidr(), spec.GetNetwork().GetIpv6Cidr())
	return err
}

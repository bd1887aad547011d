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

// Objects whose records are damaged must stay visible and removable. A machine without a readable record is failed: capstand
// neither watches nor starts it, and its deletion removes its container, cgroup, network and files as usual. The record of a
// network is written again from the machines and the leases of the box. A load balancer without a record, or without that of its
// network, stays as it is until its owner describes it again.

// nobody is the namespace of a machine whose owner is unknown; its name is its id. No Kubernetes namespace can have this
// name.
const nobody = "-"

// loadUnreadable registers the machines whose record cannot be read, and those that have a container or a cgroup but no
// record; mu is held.
func (ms *machines) loadUnreadable(unreadable map[string]error) {
	for id, err := range unreadable {
		ms.addUnreadable(id, fmt.Sprintf("capstand cannot read the record of the machine: %v", err))
	}
	for _, id := range ms.strangers() {
		ms.addUnreadable(id, "the machine has a container or a cgroup on the host, but no record")
	}
}

// addUnreadable registers a machine without a readable record; mu is held.
func (ms *machines) addUnreadable(id, why string) {
	m := ms.add(ms.identify(id))
	m.broken = why + ". It is neither watched nor started, and its processes may run: delete it, or repair its record and restart capstand"
	m.log.Error("Cannot take over the machine", "reason", why)
}

// strangers returns the ids of containers and cgroups of this host that belong to no readable machine; mu is held.
func (ms *machines) strangers() []string {
	found := append(folders(ms.runc.Root), ms.cgroup("").Children()...)
	slices.Sort(found)
	return slices.DeleteFunc(slices.Compact(found), func(id string) bool {
		return ms.byID[id] != nil || !admission.ValidID(id) || strings.HasPrefix(id, admission.BalancerCgroup)
	})
}

// identify collects the known properties of a machine without a record. Its bundle and its container name its owner.
// Machines of older versions have only leases.
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

// mendNetworks restores the missing and unreadable records of networks that machines use. It discards an unused
// network, because its owner creates it again. A record that cannot be written, for example on a full disk, is restored when the network is
// demanded again. mu is held, and the machines are loaded.
func (h *Host) mendNetworks(unreadable map[string]error) {
	missing := maps.Clone(unreadable)
	for _, m := range h.machines.byID {
		if id := m.spec.Network.Id; id != "" && h.networks.byID[id] == nil && missing[id] == nil {
			missing[id] = fmt.Errorf("machine %s/%s uses the network, and its record does not exist", m.spec.Namespace, m.spec.Name)
		}
	}
	for id, why := range missing {
		n := h.knownNetwork(id)
		h.log.Error("The record of a network is damaged", "id", id, "error", why, "restored", n != nil)
		demanded := atomicfile.Exists(h.store.path(networksDir, id, onDemand)) || unreadable[id] == nil
		if err := h.replaceNetwork(id, n, demanded); err != nil {
			h.log.Error("The record of a network was not replaced", "id", id, "error", err)
		}
		if n != nil {
			h.networks.byID[id] = n
		}
	}
}

// replaceNetwork writes the record of a network again, or discards it if n is nil.
func (h *Host) replaceNetwork(id string, n *hostpb.Network, demanded bool) error {
	if err := h.store.discard(h.store.path(networksDir, id)); err != nil || n == nil {
		return err
	}
	files := map[string][]byte{}
	if demanded {
		files[onDemand] = nil
	}
	return h.store.create(networksDir, id, n, files)
}

// knownNetwork returns the record of a network in the machines, or else in the box, or nil. mu is held.
func (h *Host) knownNetwork(id string) *hostpb.Network {
	for _, m := range h.machines.byID {
		if n := m.spec.Network; n.Id == id && n.Cidr != "" {
			return &hostpb.Network{Id: id, Namespace: n.Namespace, Name: n.Name, Cidr: n.Cidr, Ipv6Cidr: n.Ipv6Cidr, Overlay: n.Overlay, Lan: n.Lan}
		}
	}
	n, ok := h.box.Network(id)
	namespace, name, named := strings.Cut(n.Cluster, "/")
	if !ok || !named {
		return nil
	}
	return &hostpb.Network{Id: id, Namespace: namespace, Name: name, Cidr: n.CIDR, Ipv6Cidr: n.IPv6CIDR, Overlay: recordedOverlay(n.Overlay), Lan: recordedLAN(n.LAN)}
}

// recordedLAN converts the record of the box.
func recordedLAN(l *network.LAN) *hostpb.LAN {
	if l == nil {
		return nil
	}
	out := &hostpb.LAN{Bridge: l.Bridge, Vlan: uint32(l.VLAN)}
	for _, pods := range l.Pods {
		out.Pods = append(out.Pods, pods.String())
	}
	return out
}

func recordedOverlay(o *network.Overlay) *hostpb.Overlay {
	if o == nil {
		return nil
	}
	return &hostpb.Overlay{Vni: o.VNI, Address: o.Address.String(), Mtu: int32(o.MTU)}
}

// loadUnreadable keeps the load balancers whose record cannot be read until their owners describe or delete them. A load
// balancer has the id, namespace and name of its cluster's network. mu is held, and the networks are loaded.
func (bs *balancers) loadUnreadable(unreadable map[string]error) {
	for id, err := range unreadable {
		namespace, name := nobody, id
		if n := bs.networks.byID[id]; n != nil {
			namespace, name = n.Namespace, n.Name
		}
		bs.addUndescribed(id, id, namespace, name, fmt.Errorf("capstand cannot read the record of the load balancer: %w", err))
	}
}

// addUndescribed registers a load balancer that stays as it is until its owner describes or deletes it; mu is held.
func (bs *balancers) addUndescribed(id, networkID, namespace, name string, why error) {
	lb := bs.add(&hostpb.LoadBalancer{Id: id, NetworkId: networkID, Namespace: namespace, Name: name}, nil)
	lb.described = make(chan struct{})
	lb.message = fmt.Sprintf("%v. It stays as it is until its owner describes it again", why)
	lb.log.Error("Cannot continue the load balancer", "error", why)
}

// folders lists the names of the folders in dir.
func folders(dir string) (names []string) {
	found, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, path := range found {
		names = append(names, filepath.Base(path))
	}
	return names
}

// checkRecord returns an error if the record of a machine is valid JSON with wrong content.
func checkRecord(folder string, spec *hostpb.MachineSpec) error {
	if spec.Id != folder {
		return fmt.Errorf("the record in the folder of machine %[2]q is the record of machine %[1]q", spec.Id, folder)
	}
	if cmp.Or(spec.Namespace, spec.Name) == "" || len(spec.Addresses) == 0 {
		return fmt.Errorf("the record has no name or no address")
	}
	_, err := network.Subnets(spec.GetNetwork().GetCidr(), spec.GetNetwork().GetIpv6Cidr())
	return err
}

package network

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"capstan.dev/capstan/internal/atomicfile"
)

// Lease reserves an address.
type Lease struct {
	// Machine is the id of the machine, or of the load balancer, that has the address.
	Machine string `json:"machine"`
	// Name is its namespace and name, for messages.
	Name string `json:"name"`
	// Bridge is true if a load balancer listens on the address, so that the bridge has it. The lease is written first and
	// removed last.
	Bridge bool `json:"bridge,omitempty"`
	owner

	address string // the file's name
}

func (l Lease) holder() string {
	if l.Bridge {
		return "load balancer " + l.Name
	}
	return "machine " + l.Name
}

// Lease reserves addresses for a new machine, all or none. It returns an InUseError if another machine has one of them, if a
// machine of another capstand has the id, or if a lease cannot be read.
func (b Box) Lease(networkID, machineID, name string, addresses []string) error {
	return b.lend(networkID, machineID, name, addresses, false)
}

// Renew is Lease for a machine with a record on this capstand. The record replaces a lease that cannot be read.
func (b Box) Renew(networkID, machineID, name string, addresses []string) error {
	return b.lend(networkID, machineID, name, addresses, true)
}

func (b Box) lend(networkID, machineID, name string, addresses []string, recorded bool) error {
	return b.locked(func() error {
		if err := b.elsewhere(machineID); err != nil {
			return err
		}
		if err := b.lentElsewhere(networkID, addresses); err != nil {
			return err
		}
		if err := b.take(networkID, Lease{Machine: machineID, Name: name, owner: b.me()}, addresses, recorded); err != nil {
			return err
		}
		return errors.Join(b.syncPeers(networkID), b.syncStations(networkID))
	})
}

// elsewhere refuses the id of a machine of another capstand, and an id with the hash of another one, because the names of cables and network
// namespaces on the box contain the hash.
func (b Box) elsewhere(machineID string) error {
	leases, err := filepath.Glob(filepath.Join(b.Dir, "networks", "*", "leases", "*"))
	if err != nil {
		return err
	}
	for _, path := range leases {
		var l Lease
		if atomicfile.ReadJSON(path, &l) != nil || l.Bridge || !sameNames(l.Machine, machineID) || l.stale() {
			continue
		}
		switch {
		case l.Machine != machineID:
			return InUseError{message: fmt.Sprintf("the id %s has the same short hash as that of another machine on this box: create the machine again with another id", machineID)}
		case l.Host != b.HostID:
			return InUseError{message: fmt.Sprintf("machine id %s belongs to %s of the host in %s, and the new machine is a copy of it: delete the copy and create it again without an id",
				machineID, l.holder(), l.Root)}
		}
	}
	return nil
}

// Serve gives the network's bridge the addresses that a load balancer listens on, all or none, and removes its earlier ones.
// It returns an InUseError if a machine or another load balancer has one of them. A load balancer that moved here from another capstand of
// the box takes its addresses over, also if that capstand does not run.
func (b Box) Serve(networkID, balancerID, name string, addresses []string) error {
	others := len(addresses) > 0 // Without addresses, the load balancer is removed from this capstand only.
	return b.locked(func() error { return b.serve(networkID, balancerID, name, addresses, others) })
}

// ServeAgain is Serve for a load balancer with a record on this capstand. It returns an InUseError if the load balancer moved to another
// capstand of the box.
func (b Box) ServeAgain(networkID, balancerID, name string, addresses []string) error {
	return b.locked(func() error {
		paths, _ := filepath.Glob(filepath.Join(b.dir(networkID), "leases", "*"))
		for _, path := range paths {
			var l Lease
			if atomicfile.ReadJSON(path, &l) == nil && l.Bridge && l.Machine == balancerID && l.Host != b.HostID && !l.stale() {
				address := filepath.Base(path)
				return InUseError{Address: address, message: fmt.Sprintf("the load balancer %s moved to the host in %s, which has its address %s: this host waits for the request to remove its own", l.Name, l.Root, address)}
			}
		}
		return b.serve(networkID, balancerID, name, addresses, false)
	})
}

// serve drops the earlier addresses of the load balancer. others: also those that other capstands of the box recorded.
func (b Box) serve(networkID, balancerID, name string, addresses []string, others bool) error {
	if err := b.take(networkID, Lease{Machine: balancerID, Name: name, Bridge: true, owner: b.me()}, addresses, false); err != nil {
		return err
	}
	for _, address := range addresses {
		if err := addBridgeAddress(BridgeName(networkID), address); err != nil {
			return err
		}
	}
	if err := b.dropLeases(networkID, func(l Lease) bool {
		return l.Bridge && l.Machine == balancerID && (others || l.Host == b.HostID || l.stale()) && !slices.Contains(addresses, l.address)
	}); err != nil {
		return err
	}
	return b.syncPeers(networkID)
}

// take writes a lease for each of the addresses, all or none. A lease that cannot be read counts as the lease of another
// holder, unless the holder is recorded elsewhere.
func (b Box) take(networkID string, want Lease, addresses []string, recorded bool) error {
	for _, address := range addresses {
		var l Lease
		err := atomicfile.ReadJSON(b.lease(networkID, address), &l)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !recorded {
			return InUseError{Address: address, message: fmt.Sprintf("the lease of address %s cannot be read (%v), and another machine may have the address: restart the capstands of this host, which write the leases of their machines again, or remove the file if no machine has the address", address, err)}
		}
		if err != nil || l.Machine == want.Machine && l.Bridge == want.Bridge {
			continue
		}
		if !l.stale() {
			return InUseError{Address: address, message: fmt.Sprintf("address %s belongs to %s (%s) of the host in %s", address, l.holder(), l.Machine, l.Root)}
		}
		if err := b.drop(networkID, address, l); err != nil {
			return err
		}
	}
	for _, address := range addresses {
		if err := atomicfile.WriteJSON(b.lease(networkID, address), want, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// drop releases one address.
func (b Box) drop(networkID, address string, l Lease) error {
	if l.Bridge {
		if err := deleteBridgeAddress(BridgeName(networkID), address); err != nil {
			return err
		}
	}
	return atomicfile.Remove(b.lease(networkID, address))
}

func (b Box) lease(networkID, address string) string {
	return filepath.Join(b.dir(networkID), "leases", address)
}

// Unlease releases the addresses of a machine of this capstand.
func (b Box) Unlease(networkID, machineID string) error {
	return b.unlease(networkID, func(l Lease) bool { return l.Machine == machineID && l.Host == b.HostID && !l.Bridge })
}

// UnleaseAll releases the addresses that a machine of this capstand has in any network.
func (b Box) UnleaseAll(machineID string) error {
	return b.locked(func() error {
		networks, err := b.list()
		for _, n := range networks {
			err = errors.Join(err, b.dropLeases(n.ID, func(l Lease) bool {
				return l.Machine == machineID && l.Host == b.HostID && !l.Bridge
			}), b.syncPeers(n.ID), b.syncStations(n.ID))
		}
		return err
	})
}

// LeaseOf finds an address that a machine of this capstand has, and the network of the address. The id of the network is empty if the machine
// has no address.
func (b Box) LeaseOf(machineID string) (lease Lease, networkID string) {
	_ = b.locked(func() error {
		networks, err := b.list()
		for _, n := range networks {
			paths, _ := filepath.Glob(filepath.Join(b.dir(n.ID), "leases", "*"))
			for _, path := range paths {
				var l Lease
				if atomicfile.ReadJSON(path, &l) == nil && l.Machine == machineID && l.Host == b.HostID && !l.Bridge {
					lease, networkID = l, n.ID
				}
			}
		}
		return err
	})
	return lease, networkID
}

// KeepLeases releases the leases of this capstand whose machine or load balancer is not in the given list. A crash can leave
// a lease without its holder's record.
func (b Box) KeepLeases(networkID string, ids []string) error {
	return b.unlease(networkID, func(l Lease) bool {
		return l.Host == b.HostID && !slices.Contains(ids, l.Machine)
	})
}

func (b Box) unlease(networkID string, which func(Lease) bool) error {
	return b.locked(func() error {
		if err := b.dropLeases(networkID, which); err != nil {
			return err
		}
		return errors.Join(b.syncPeers(networkID), b.syncStations(networkID))
	})
}

func (b Box) dropLeases(networkID string, which func(Lease) bool) error {
	dir := filepath.Join(b.dir(networkID), "leases")
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, entry := range entries {
		l := Lease{address: entry.Name()}
		if _, err := netip.ParseAddr(l.address); err != nil { // A crash left the unfinished file of a lease.
			if err := atomicfile.Remove(b.lease(networkID, l.address)); err != nil {
				return err
			}
			continue
		}
		if atomicfile.ReadJSON(filepath.Join(dir, l.address), &l) == nil && which(l) {
			if err := b.drop(networkID, l.address, l); err != nil {
				return err
			}
		}
	}
	return nil
}

// served lists the addresses of the network on which load balancers of this box listen. A lease that cannot be read counts as that
// of a machine.
func (b Box) served(networkID string) (all []string, err error) {
	local, err := b.local(networkID)
	for _, address := range local {
		var l Lease
		if atomicfile.ReadJSON(b.lease(networkID, address), &l) == nil && l.Bridge {
			all = append(all, address)
		}
	}
	return all, err
}

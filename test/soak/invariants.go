//go:build e2e

package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// snapshot is the state of the management plane, capstand, the clusters and the host at one moment.
type snapshot struct {
	Wanted   []string          // names of the required Clusters
	Size     int               // number of the required machines
	Clusters []string          // names of the Clusters that exist
	Machines map[string]string // names of CapstanMachines by their id
	Running  map[string]string // names of capstand's machines by their id
	Networks map[string]string // names of CapstanClusters by their id
	// Machines of capstand and IPAddresses are holders: they have an address now.
	Holders []holder
	Traces  []trace
	Secrets []secret
	Members map[string]membership // by Cluster
	Claims  claims
}

// holder has an address of a network or of a pool. No other holder of that network or pool may have it.
type holder struct{ Network, Address, Name string }

// trace is an object on the host that belongs to a machine or to a cluster's network, by its id.
type trace struct{ Kind, Name, ID string }

// secret is a Secret of the soak's namespace.
type secret struct{ Name, Cluster string }

// membership contains the members of a cluster's etcd, and the machines that should be members.
type membership struct{ Members, Machines []string }

// The claims of the pool: the required claims and the existing addresses.
type claims struct {
	Wanted    []string
	Found     []string
	Addresses map[string]string // of claims
	Used      int               // as the pool counts them
}

// violations lists the violated invariants. It is empty for a healthy installation at rest.
func (s snapshot) violations() []string {
	return slices.Concat(s.wrongClusters(), s.duplicates(), s.leakedMachines(), s.leakedTraces(), s.leakedSecrets(), s.wrongMembers(), s.wrongClaims())
}

func (s snapshot) wrongClusters() (out []string) {
	if wanted, found := slices.Sorted(slices.Values(s.Wanted)), slices.Sorted(slices.Values(s.Clusters)); !slices.Equal(wanted, found) {
		out = append(out, fmt.Sprintf("expected the Clusters %v, found %v", wanted, found))
	}
	if len(s.Machines) != s.Size {
		out = append(out, fmt.Sprintf("expected %d CapstanMachines, found %d: %v", s.Size, len(s.Machines), slices.Sorted(maps.Values(s.Machines))))
	}
	for _, id := range slices.Sorted(maps.Keys(s.Networks)) {
		if !slices.Contains(s.Clusters, s.Networks[id]) {
			out = append(out, fmt.Sprintf("expected CapstanClusters of existing Clusters only, found %s", s.Networks[id]))
		}
	}
	return out
}

// duplicates must be empty at all times, also during faults.
func (s snapshot) duplicates() (out []string) {
	has := map[[2]string]string{}
	for _, h := range s.Holders {
		key := [2]string{h.Network, h.Address}
		if other, ok := has[key]; ok && other != h.Name {
			out = append(out, fmt.Sprintf("expected one holder of the address %s of %s, found %s and %s", h.Address, h.Network, other, h.Name))
		}
		has[key] = h.Name
	}
	return out
}

func (s snapshot) leakedMachines() (out []string) {
	for _, id := range slices.Sorted(maps.Keys(s.Running)) {
		if _, ok := s.Machines[id]; !ok {
			out = append(out, fmt.Sprintf("expected a CapstanMachine for each machine of capstand, found none for %s (id %s)", s.Running[id], id))
		}
	}
	for _, id := range slices.Sorted(maps.Keys(s.Machines)) {
		if _, ok := s.Running[id]; !ok {
			out = append(out, fmt.Sprintf("expected a machine of capstand for each CapstanMachine, found none for %s (id %q)", s.Machines[id], id))
		}
	}
	return out
}

func (s snapshot) leakedTraces() (out []string) {
	for _, t := range s.Traces {
		if s.Machines[t.ID] == "" && s.Networks[t.ID] == "" {
			out = append(out, fmt.Sprintf("expected no trace of a deleted machine or network, found %s %s of id %q", t.Kind, t.Name, t.ID))
		}
	}
	return out
}

func (s snapshot) leakedSecrets() (out []string) {
	for _, x := range s.Secrets {
		if x.Cluster == "" || !slices.Contains(s.Clusters, x.Cluster) {
			out = append(out, fmt.Sprintf("expected Secrets of existing Clusters only (%s), found %s of Cluster %q", strings.Join(s.Clusters, ", "), x.Name, x.Cluster))
		}
	}
	return out
}

func (s snapshot) wrongMembers() (out []string) {
	for _, name := range slices.Sorted(maps.Keys(s.Members)) {
		m := s.Members[name]
		members, machines := slices.Sorted(slices.Values(m.Members)), slices.Sorted(slices.Values(m.Machines))
		if !slices.Equal(members, machines) {
			out = append(out, fmt.Sprintf("expected the etcd members of Cluster %s to be its control plane machines %v, found %v", name, machines, members))
		}
	}
	return out
}

func (s snapshot) wrongClaims() (out []string) {
	wanted, found := slices.Sorted(slices.Values(s.Claims.Wanted)), slices.Sorted(slices.Values(s.Claims.Found))
	if !slices.Equal(wanted, found) {
		out = append(out, fmt.Sprintf("expected the IPAddressClaims %v, found %v", wanted, found))
	}
	if having := slices.Sorted(maps.Keys(s.Claims.Addresses)); !slices.Equal(wanted, having) {
		out = append(out, fmt.Sprintf("expected one IPAddress for each of the claims %v, found those of %v", wanted, having))
	}
	if s.Claims.Used != len(wanted) {
		out = append(out, fmt.Sprintf("expected the pool to count %d used addresses, found %d", len(wanted), s.Claims.Used))
	}
	return out
}

// written is the state of one key of a writer.
type written struct {
	Acknowledged int // the newest acknowledged value; 0: none
	Revision     int // the resourceVersion of the acknowledgement
	Tried        int // the newest value that was sent; without a response it may be stored or not
}

// stored is the value of one key as a reader finds it.
type stored struct{ Value, Revision int }

// lostWrites compares the acknowledged values with the read ones. A value that was sent and not acknowledged may be
// stored or not.
func lostWrites(keys map[string]written, found map[string]stored) (out []string) {
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		w, f := keys[key], found[key]
		switch {
		case f.Value < w.Acknowledged:
			out = append(out, fmt.Sprintf("expected %s to hold the acknowledged value %d or a later one, found %d: an acknowledged write is lost", key, w.Acknowledged, f.Value))
		case f.Value > w.Tried:
			out = append(out, fmt.Sprintf("expected %s to hold at most %d, the last value sent, found %d", key, w.Tried, f.Value))
		case f.Revision < w.Revision:
			out = append(out, fmt.Sprintf("expected %s at revision %d or later, found %d: the cluster returned to an earlier state", key, w.Revision, f.Revision))
		}
	}
	return out
}

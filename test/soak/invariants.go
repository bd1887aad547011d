//go:build e2e

package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// snapshot is what was found at one moment: in the management plane, in capstand, in the clusters, and on the box.
type snapshot struct {
	Wanted   []string          // names of the Clusters that were asked for
	Size     int               // number of the machines that were asked for
	Clusters []string          // names of the Clusters that exist
	Machines map[string]string // names of CapstanMachines by their id
	Running  map[string]string // names of capstand's machines by their id
	Networks map[string]string // names of CapstanClusters by their id
	// Holders have an address now: machines of capstand, and IPAddresses.
	Holders []holder
	Traces  []trace
	Secrets []secret
	Members map[string]membership // by Cluster
	Claims  claims
}

// holder has an address of a network or of a pool, which no other holder of it may have.
type holder struct{ Network, Address, Name string }

// trace is a thing on the box that belongs to a machine or to a cluster's network, by its id.
type trace struct{ Kind, Name, ID string }

// secret is a Secret of the soak's namespace.
type secret struct{ Name, Cluster string }

// membership is what the etcd of a cluster says, next to the machines that should be members.
type membership struct{ Members, Machines []string }

// claims of the pool: those that were asked for, and the addresses there are.
type claims struct {
	Wanted    []string
	Found     []string
	Addresses map[string]string // of claims
	Used      int               // as the pool counts them
}

// violations lists what must not be, in plain words; the empty list is a healthy installation at rest.
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

// duplicates must be empty at every moment, also while faults are injected.
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
			out = append(out, fmt.Sprintf("expected nothing of a machine or network that is gone, found %s %s of id %q", t.Kind, t.Name, t.ID))
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
	Acknowledged int // the newest value whose write was acknowledged; 0: none
	Revision     int // the resourceVersion of the acknowledgement
	Tried        int // the newest value that was sent: it may have been stored without an answer
}

// stored is what a reader finds under one key.
type stored struct{ Value, Revision int }

// lostWrites compares what was acknowledged with what is read. A value that was sent and not acknowledged may be there
// or not.
func lostWrites(keys map[string]written, found map[string]stored) (out []string) {
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		w, f := keys[key], found[key]
		switch {
		case f.Value < w.Acknowledged:
			out = append(out, fmt.Sprintf("expected %s to hold the acknowledged value %d or a later one, found %d: an acknowledged write is lost", key, w.Acknowledged, f.Value))
		case f.Value > w.Tried:
			out = append(out, fmt.Sprintf("expected %s to hold at most %d, the last value sent, found %d", key, w.Tried, f.Value))
		case f.Revision < w.Revision:
			out = append(out, fmt.Sprintf("expected %s at revision %d or later, found %d: the cluster went back in time", key, w.Revision, f.Revision))
		}
	}
	return out
}

// Package volumeplan decides which volumes a machine gets, with pure functions: those of its predecessors that are free, on one
// host, or new ones.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package volumeplan

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// Request describes a machine.
type Request struct {
	// Machine is the name of the CapstanMachine, Cluster that of its Cluster, and Owner its owner as in spec.owner of volumes.
	Machine, Cluster, Owner string
	// Replicas is the number of machines that the owner shall have. It has as many volumes of one name at most.
	Replicas int
	// Wanted are the volumes of the machine.
	Wanted []infrav1.MachineVolume
}

// Option is one possibility for a machine.
type Option struct {
	// Host is the host of the volumes that exist; empty if all are new.
	Host string
	// Volume is the name of one of them, for messages.
	Volume string
	// Bind are the free volumes that the machine gets.
	Bind []infrav1.CapstanVolume
	// Create are the new ones.
	Create []infrav1.MachineVolume
}

// VolumeBytes is the size of the new volumes together.
func (o Option) VolumeBytes() (sum int64) {
	for _, v := range o.Create {
		sum += int64(v.SizeGiB) << 30
	}
	return sum
}

// PendingBytes returns the size of the volumes, by host, that their hosts have not made yet. A namespace can write a CapstanVolume with any
// host, so one counts only if its host is among those that admit its namespace (ALL-18).
func PendingBytes(all []infrav1.CapstanVolume, admitting func(namespace string) ([]infrav1.CapstanHost, error)) (map[string]int64, error) {
	pending := map[string]int64{}
	for i := range all {
		v := &all[i]
		if v.Spec.HostID != "" {
			continue
		}
		hosts, err := admitting(v.Namespace)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(hosts, func(h infrav1.CapstanHost) bool { return h.Name == v.Spec.HostName }) {
			pending[v.Spec.HostName] += int64(v.Spec.SizeGiB) << 30
		}
	}
	return pending, nil
}

// Bound returns the volumes that a machine has, by their names in the machine.
func Bound(all []infrav1.CapstanVolume, machine string) map[string]infrav1.CapstanVolume {
	bound := map[string]infrav1.CapstanVolume{}
	for _, v := range all {
		if v.Spec.MachineName == machine {
			bound[v.Spec.VolumeName] = v
		}
	}
	return bound
}

// Plan returns the possibilities, the best one first: a host with more of the machine's volumes comes before one with fewer, then the
// first by name. Volumes that are being deleted are left out. The error explains why the machine must wait.
func Plan(req Request, all []infrav1.CapstanVolume) ([]Option, error) {
	all = slices.DeleteFunc(slices.Clone(all), func(v infrav1.CapstanVolume) bool {
		return !v.DeletionTimestamp.IsZero() || v.Spec.ClusterName != req.Cluster || v.Spec.Owner != req.Owner
	})
	bound := Bound(all, req.Machine)
	missing := slices.DeleteFunc(slices.Clone(req.Wanted), func(w infrav1.MachineVolume) bool { _, found := bound[w.Name]; return found })
	host, err := hostOf(bound)
	if err != nil {
		return nil, err
	}
	var options []Option
	for _, name := range hostsOf(all, missing, host) {
		if option, ok := on(name, req, all, missing); ok {
			option.Volume = cmp.Or(option.Volume, nameOf(bound))
			options = append(options, option)
		}
	}
	if len(options) > 0 {
		return options, nil
	}
	return nil, fmt.Errorf("%s", inUse(req, all, missing, host))
}

// hostOf is the host of the volumes that the machine has, or "".
func hostOf(bound map[string]infrav1.CapstanVolume) (string, error) {
	host, of := "", ""
	for _, name := range slices.Sorted(maps.Keys(bound)) {
		v := bound[name]
		if host != "" && host != v.Spec.HostName {
			return "", fmt.Errorf("CapstanVolume %s is on host %s, and CapstanVolume %s on host %s: one machine cannot have both; delete one of them to start with an empty volume",
				of, host, v.Name, v.Spec.HostName)
		}
		host, of = v.Spec.HostName, v.Name
	}
	return host, nil
}

func nameOf(bound map[string]infrav1.CapstanVolume) string {
	for _, name := range slices.Sorted(maps.Keys(bound)) {
		return bound[name].Name
	}
	return ""
}

// hostsOf lists the hosts to try. A fixed host is the only one. Otherwise, hosts with a free volume are listed. Without any, the list
// contains "", which stands for every host.
func hostsOf(all []infrav1.CapstanVolume, missing []infrav1.MachineVolume, fixed string) []string {
	if fixed != "" {
		return []string{fixed}
	}
	names := map[string]map[string]bool{}
	for _, v := range all {
		if v.Spec.MachineName == "" && wants(missing, v.Spec.VolumeName) {
			if names[v.Spec.HostName] == nil {
				names[v.Spec.HostName] = map[string]bool{}
			}
			names[v.Spec.HostName][v.Spec.VolumeName] = true
		}
	}
	if len(names) == 0 {
		return []string{""}
	}
	return slices.SortedFunc(maps.Keys(names), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(names[b]), len(names[a])), cmp.Compare(a, b))
	})
}

func wants(wanted []infrav1.MachineVolume, name string) bool {
	return slices.ContainsFunc(wanted, func(w infrav1.MachineVolume) bool { return w.Name == name })
}

// on returns the volumes that the machine gets on a host. It is impossible if a volume is missing there and the owner has all of its own.
func on(host string, req Request, all []infrav1.CapstanVolume, missing []infrav1.MachineVolume) (Option, bool) {
	o := Option{Host: host}
	for _, w := range missing {
		free := slices.IndexFunc(all, func(v infrav1.CapstanVolume) bool {
			return v.Spec.MachineName == "" && v.Spec.VolumeName == w.Name && v.Spec.HostName == host
		})
		switch {
		case free >= 0:
			o.Bind, o.Volume = append(o.Bind, all[free]), cmp.Or(o.Volume, all[free].Name)
		case count(all, w.Name) < req.Replicas:
			o.Create = append(o.Create, w)
		default:
			return o, false
		}
	}
	return o, true
}

func count(all []infrav1.CapstanVolume, name string) (n int) {
	for _, v := range all {
		if v.Spec.VolumeName == name {
			n++
		}
	}
	return n
}

// inUse explains that the owner has a volume for each replica, and none is free on the host.
func inUse(req Request, all []infrav1.CapstanVolume, missing []infrav1.MachineVolume, host string) string {
	var found []string
	for _, v := range all {
		if !wants(missing, v.Spec.VolumeName) || len(found) == maxListed {
			continue
		}
		text := fmt.Sprintf("%s is free on host %s", v.Name, v.Spec.HostName)
		if v.Spec.MachineName != "" {
			text = fmt.Sprintf("%s belongs to machine %s", v.Name, v.Spec.MachineName)
		}
		found = append(found, text)
	}
	slices.Sort(found)
	where := ""
	if host != "" {
		where = ", on host " + host + " where its other volume is"
	}
	return fmt.Sprintf("the machine waits for a free volume of %s%s, which has %d replicas and a volume for each (CapstanVolume %s). %s",
		req.Owner, where, req.Replicas, strings.Join(found, "; "), remedy(req.Owner))
}

// remedy describes how a volume becomes free. Control planes and pools of Capstan delete machines with volumes before they create successors.
func remedy(owner string) string {
	switch kind, _, _ := strings.Cut(owner, "/"); kind {
	case controlplanev1.ControlPlaneKind:
		return "A volume becomes free when its machine is deleted. A control plane with one machine cannot delete it first: set spec.replicas to 3, which creates two more volumes, and to 1 after the rollout"
	case "MachinePool":
		return "A volume becomes free when its machine is deleted"
	}
	return "A rollout must delete a machine before it creates its successor: set maxSurge 0 and maxUnavailable 1"
}

// maxListed limits the volumes in a message.
const maxListed = 8

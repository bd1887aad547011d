// Package networklist reads and writes the annotation of a CapstanHost that names the networks to remove. All functions are pure. It is a
// package of its own because Go compiles all packages that a fuzz test imports once more, and capstanhost imports a thousand.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package networklist

import (
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
)

// most is the largest number of networks in the annotation. One request adds at most infrav1.MaxUnknownMachines.
const most = 10 * infrav1.MaxUnknownMachines

// networkID is the form of CapstanCluster.spec.id. Hosts also accept capital letters and underscores, for ids of other clients. Such
// a network is never one of a CapstanCluster, so this package ignores it.
var networkID = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// Parse returns the networks in the value of infrav1.HostPruneNetworksAnnotation, each once, and how many entries it ignored.
func Parse(value string) (networks []*hostpb.Network, ignored int) {
	if value == "" {
		return nil, 0
	}
	for entry := range strings.SplitSeq(value, ",") {
		n, ok := parse(entry)
		switch {
		case !ok || len(networks) == most:
			ignored++
		case !contains(networks, n):
			networks = append(networks, n)
		}
	}
	return networks, ignored
}

func parse(entry string) (*hostpb.Network, bool) {
	parts := strings.SplitN(entry, "/", 4)
	if len(parts) != 3 {
		return nil, false
	}
	n := &hostpb.Network{Namespace: parts[0], Name: parts[1], Id: parts[2]}
	return n, len(validation.IsDNS1123Label(n.Namespace)) == 0 && len(validation.IsDNS1123Subdomain(n.Name)) == 0 && networkID.MatchString(n.Id)
}

// Format returns the value of the annotation.
func Format(networks []*hostpb.Network) string {
	entries := make([]string, 0, len(networks))
	for _, n := range networks {
		entries = append(entries, format(n))
	}
	return strings.Join(entries, ",")
}

func format(n *hostpb.Network) string {
	return n.GetNamespace() + "/" + n.GetName() + "/" + n.GetId()
}

// WithLost adds the networks of the machines that have no cluster. A network that could not be read again is left out: no host
// accepts one.
func WithLost(networks []*hostpb.Network, machines []*hostpb.Machine, hasCluster func(*hostpb.Network) bool) []*hostpb.Network {
	for _, m := range machines {
		n := m.GetSpec().GetNetwork()
		_, valid := parse(format(n))
		if !hasCluster(n) && valid && !contains(networks, n) {
			networks = append(networks, n)
		}
	}
	return networks
}

func contains(networks []*hostpb.Network, n *hostpb.Network) bool {
	return slices.ContainsFunc(networks, func(have *hostpb.Network) bool { return have.GetId() == n.GetId() && owner.Same(have, n) })
}

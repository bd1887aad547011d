package hostselection

import (
	"fmt"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// Abandoned reports whether one of the objects has the annotation by which its parts on the host count as removed.
func Abandoned(objs ...client.Object) bool {
	return slices.ContainsFunc(objs, func(o client.Object) bool {
		_, ok := o.GetAnnotations()[infrav1.HostAbandonedAnnotation]
		return ok
	})
}

// Mismatch reports whether a CapstanHost is another host than the one of the recorded id, and the remedy; "" if it is
// that host, or if no id was recorded. Two management clusters may have given one name to two hosts: after a move,
// objects on one of them must not be searched, created again or counted as removed on the other.
func Mismatch(name, recorded, actual string) string {
	if recorded == "" || actual == "" || recorded == actual {
		return ""
	}
	return fmt.Sprintf("CapstanHost %s is the host with the id %s, but the host with the id %s was chosen. Capstan changes nothing on it. "+
		"Set spec.address of the CapstanHost to the address of the host with the id %s, or move the cluster to the management cluster whose CapstanHost %s is that host. "+
		"If the host was installed again and its machines are lost, annotate this object with %s and delete it",
		name, actual, recorded, recorded, name, infrav1.HostAbandonedAnnotation)
}

// BalancerHosts returns the names of the hosts that have a cluster's load balancer or network, and of those where
// they are not removed yet. The host of spec.loadBalancer comes first; its name may be empty.
func BalancerHosts(c *infrav1.CapstanCluster) []string {
	names := []string{c.Spec.LoadBalancer.HostName}
	for _, h := range c.Spec.LoadBalancerHosts {
		if h.Name != names[0] {
			names = append(names, h.Name)
		}
	}
	return names
}

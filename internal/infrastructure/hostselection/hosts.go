// Package hostselection finds the CapstanHosts that a namespace may use, and describes them to placement. It reads the record of the hosts of
// a load balancer, and the boxes and WireGuard keys of hosts.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package hostselection

import (
	"context"
	"slices"
	"sort"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/selection"
)

// Usable lists the hosts that admit the namespace (ALL-18) and match every selector, by name. Hosts that
// are abandoned are left out. The hosts belong to the cache and must not be changed: copies would make each machine cost more with
// each host.
func Usable(ctx context.Context, c client.Reader, namespace string, selectors ...*metav1.LabelSelector) ([]infrav1.CapstanHost, error) {
	list := &infrav1.CapstanHostList{}
	if err := c.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	usable, err := usableOf(ctx, c, namespace, list.Items, selectors)
	sort.Slice(usable, func(a, b int) bool { return usable[a].Name < usable[b].Name }) // slices.SortFunc would copy two hosts for each comparison.
	return usable, err
}

// UsableIn is Usable for the machines of a Cluster: the hosts match the selector of its CapstanCluster too. Templates of no Cluster pass nil.
func UsableIn(ctx context.Context, c client.Reader, cluster *clusterv1.Cluster, namespace string, selector *metav1.LabelSelector) ([]infrav1.CapstanHost, error) {
	capstanCluster := &infrav1.CapstanCluster{}
	if cluster != nil && cluster.Spec.InfrastructureRef.Kind == infrav1.ClusterKind {
		key := client.ObjectKey{Namespace: cluster.Namespace, Name: cluster.Spec.InfrastructureRef.Name}
		if err := c.Get(ctx, key, capstanCluster); client.IgnoreNotFound(err) != nil {
			return nil, err
		}
	}
	return Usable(ctx, c, namespace, capstanCluster.Spec.HostSelector, selector)
}

// UsableHost returns the host of a name if Usable would list it, else an empty list. It reads no other host.
func UsableHost(ctx context.Context, c client.Reader, name, namespace string, selectors ...*metav1.LabelSelector) ([]infrav1.CapstanHost, error) {
	hosts := make([]infrav1.CapstanHost, 1)
	if err := c.Get(ctx, client.ObjectKey{Name: name}, &hosts[0], client.UnsafeDisableDeepCopy); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return usableOf(ctx, c, namespace, hosts, selectors)
}

// usableOf is the usable part of a list, in the memory of the list.
func usableOf(ctx context.Context, c client.Reader, namespace string, hosts []infrav1.CapstanHost, selectors []*metav1.LabelSelector) ([]infrav1.CapstanHost, error) {
	ns, err := admitted(ctx, c, namespace, hosts)
	if err != nil {
		return nil, err
	}
	selected := selection.All(selectors...)
	return keep(hosts, func(h *infrav1.CapstanHost) bool {
		return placement.Admits(h, namespace, ns.Labels) && !Abandoned(h) && selected(h.Labels)
	}), nil
}

// Admitting returns the hosts of a list that admit a namespace (ALL-18).
func Admitting(ctx context.Context, c client.Reader, namespace string, hosts []infrav1.CapstanHost) ([]infrav1.CapstanHost, error) {
	ns, err := admitted(ctx, c, namespace, hosts)
	if err != nil {
		return nil, err
	}
	return keep(slices.Clone(hosts), func(h *infrav1.CapstanHost) bool { return placement.Admits(h, namespace, ns.Labels) }), nil
}

// ByNamespace returns Admitting for any namespace and the same list. It reads each Namespace once.
func ByNamespace(ctx context.Context, c client.Reader, hosts []infrav1.CapstanHost) func(namespace string) ([]infrav1.CapstanHost, error) {
	known := map[string][]infrav1.CapstanHost{}
	return func(namespace string) ([]infrav1.CapstanHost, error) {
		if admitting, ok := known[namespace]; ok {
			return admitting, nil
		}
		admitting, err := Admitting(ctx, c, namespace, hosts)
		if err == nil {
			known[namespace] = admitting
		}
		return admitting, err
	}
}

// admitted reads the Namespace if a host of the list selects namespaces by their labels.
func admitted(ctx context.Context, c client.Reader, namespace string, hosts []infrav1.CapstanHost) (*corev1.Namespace, error) {
	ns := &corev1.Namespace{}
	for i := range hosts {
		if allowed := hosts[i].Spec.AllowedNamespaces; allowed != nil && allowed.Selector != nil {
			return ns, c.Get(ctx, client.ObjectKey{Name: namespace}, ns)
		}
	}
	return ns, nil
}

// keep moves the hosts that pass to the front of their list, without copies of the others: a CapstanHost has more than 1 KiB.
func keep(hosts []infrav1.CapstanHost, passes func(*infrav1.CapstanHost) bool) []infrav1.CapstanHost {
	n := 0
	for i := range hosts {
		if !passes(&hosts[i]) {
			continue
		}
		if n != i {
			hosts[n] = hosts[i]
		}
		n++
	}
	return hosts[:n]
}

// RebootEnded passes the change of the status with which a host accepts machines again. The start of a reboot is a change of spec.
func RebootEnded() predicate.Predicate {
	return reconciling.Became(func(h *infrav1.CapstanHost) bool { return !h.RebootPending() })
}

// HostsChosen passes the changes of a CapstanCluster with which its machines can have other hosts: that of its selector, and that of the
// load balancer's host, whose box or tunnels the machines reach.
func HostsChosen() predicate.Predicate {
	return reconciling.Changed(func(before, after *infrav1.CapstanCluster) bool {
		return !equality.Semantic.DeepEqual(before.Spec.HostSelector, after.Spec.HostSelector) ||
			before.Spec.LoadBalancer.HostName != after.Spec.LoadBalancer.HostName
	})
}

// Find returns the host of a list that has the name, or nil.
func Find(list []infrav1.CapstanHost, name string) *infrav1.CapstanHost {
	for i := range list {
		if list[i].Name == name {
			return &list[i]
		}
	}
	return nil
}

// Package hostselection finds the CapstanHosts that a namespace may use, and describes them to placement. It reads the record of the hosts of
// a load balancer, and the boxes and WireGuard keys of hosts.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package hostselection

import (
	"context"
	"fmt"
	"slices"
	"sort"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
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

// Box returns the box of a host in its current or last report, or "" before the first report.
func Box(h *infrav1.CapstanHost, pool *connections.Pool) string {
	if conn := pool.Connected(h.Name); conn != nil {
		return conn.Info().GetBoxId()
	}
	return h.Status.BoxID
}

// OverlayKey returns the WireGuard key with which a host encrypts its overlays, in its current or last report, or "".
func OverlayKey(h *infrav1.CapstanHost, pool *connections.Pool) string {
	if conn := pool.Connected(h.Name); conn != nil {
		return conn.Info().GetOverlayPublicKey()
	}
	return h.Status.OverlayPublicKey
}

// KeyOwners are the tunnel addresses of hosts by the WireGuard keys in their status.
type KeyOwners map[string]string

// KeyOwnersOf returns the owners in a list of hosts.
func KeyOwnersOf(hosts []infrav1.CapstanHost) KeyOwners {
	out := KeyOwners{}
	for i := range hosts {
		if key := hosts[i].Status.OverlayPublicKey; key != "" {
			out[key] = hosts[i].Spec.TunnelAddress
		}
	}
	return out
}

// Admit returns a key that a host reports, or "" if it is the key of a host with another tunnel address. Root on a host can report any key, and
// other hosts would then send the packets for its owner there.
func (o KeyOwners) Admit(h *infrav1.CapstanHost, key string) string {
	if tunnel, owned := o[key]; owned && tunnel != h.Spec.TunnelAddress && h.Status.OverlayPublicKey != key {
		return ""
	}
	return key
}

// Within returns the part of a placement request that keeps the machines of a cluster on hosts of its network: the box
// and the tunnel address of the host that networkHost returns. Both are empty without such a host and in a LAN: then no host has the
// network of a cluster across hosts, and each host can have one on a box.
func Within(ctx context.Context, c client.Reader, pool *connections.Pool, cluster *infrav1.CapstanCluster) (placement.Request, error) {
	req := placement.Request{Overlay: cluster.Spec.Network.Overlay.VNI != 0, Namespace: cluster.Namespace, LAN: placement.LANOf(cluster, nil)}
	if cluster.Spec.LoadBalancer.HostName == "" || req.LAN.Name != "" {
		return req, nil
	}
	h, err := networkHost(ctx, c, cluster)
	if h == nil || err != nil {
		return req, err
	}
	req.Box, req.Tunnel, req.Encrypted = Box(h, pool), h.Spec.TunnelAddress, OverlayKey(h, pool) != ""
	return req, nil
}

// networkHost returns the load balancer's host. If its CapstanHost was deleted, another host with a part of the network across hosts
// takes its place: all of them have the same IP family and encryption. It returns nil if none exists.
func networkHost(ctx context.Context, c client.Reader, cluster *infrav1.CapstanCluster) (*infrav1.CapstanHost, error) {
	names := BalancerHosts(cluster)
	if cluster.Spec.Network.Overlay.VNI == 0 {
		names = names[:1]
	}
	for _, name := range names {
		h := &infrav1.CapstanHost{}
		err := c.Get(ctx, client.ObjectKey{Name: name}, h)
		if err == nil {
			return h, nil
		}
		if !apierrors.IsNotFound(err) {
			return nil, err
		}
	}
	return nil, nil
}

// Reached is the part of a list that the network of a cluster reaches; see Within.
func Reached(list []infrav1.CapstanHost, pool *connections.Pool, within placement.Request) []infrav1.CapstanHost {
	return keep(slices.Clone(list), func(h *infrav1.CapstanHost) bool {
		return placement.Reaches(&placement.Host{Box: Box(h, pool), Tunnel: h.Spec.TunnelAddress, Encrypted: OverlayKey(h, pool) != ""}, within)
	})
}

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

// IgnoresVLAN reports whether the capstand of a host would attach machines of a VLAN to the LAN without the VLAN, because it is older
// than VLANs. The answer is no without a VLAN (0), and for a host without a connection: it gets no request.
func IgnoresVLAN(conn *connections.Host, vlan int32) bool {
	return vlan != 0 && conn != nil && !conn.Info().GetVlans()
}

// Candidates describes hosts to placement, with the current state of their connections.
func Candidates(list []infrav1.CapstanHost, pool *connections.Pool) []placement.Host {
	out := make([]placement.Host, 0, len(list))
	for i := range list {
		h := &list[i]
		c := placement.Host{
			Name:          h.Name,
			FailureDomain: placement.FailureDomain(h),
			Box:           Box(h, pool),
			Tunnel:        h.Spec.TunnelAddress,
			Encrypted:     OverlayKey(h, pool) != "",
			ControlPlane:  placement.AllowsControlPlane(h),
			Taints:        h.Spec.Taints,
		}
		conn := pool.Get(h.Name)
		if c.Unavailable = unavailable(h, conn); c.Unavailable == "" {
			addCapacity(&c, conn)
		}
		out = append(out, c)
	}
	return out
}

// unavailable returns the reason why a host gets no new machines; "" if it can get some.
func unavailable(h *infrav1.CapstanHost, conn *connections.Host) string {
	switch {
	case !h.DeletionTimestamp.IsZero():
		return "is being deleted"
	case !placement.Schedulable(h):
		return "is unschedulable"
	case conn == nil:
		return "is not connected"
	case conn.ConnectionError() != nil:
		return "is not connected: " + conn.ConnectionError().Error()
	case conn.SilenceError() != nil:
		return "does not answer"
	}
	return ""
}

// addCapacity adds the abilities and the free capacity that a host reports.
func addCapacity(c *placement.Host, conn *connections.Host) {
	info, free := conn.Info(), conn.Free()
	c.Versions, c.Images = info.GetKubernetesVersions(), info.GetImages()
	for _, i := range info.GetMachineImages() {
		if i.GetProblem() != "" {
			c.BadImages = append(c.BadImages, i.GetName())
		}
	}
	c.Volumes, c.FreeVolumes = info.GetVolumes(), info.GetDiskBytes()-info.GetVolumeBytes()
	c.CPUs, c.Disk = info.GetCpus(), info.GetDiskBytes()
	c.FreeCPUs, c.FreeMemory, c.FreeDisk = free.CPUs, free.Memory, free.Disk
	c.LANs, c.VLANs, c.IPv6LANs = info.GetLans(), info.GetVlans(), info.GetIpv6Lans()
	c.HostAccess, c.FreeDevices = info.GetHostMounts(), free.Devices
}

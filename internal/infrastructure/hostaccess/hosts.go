// Package hostaccess finds the CapstanHosts that a namespace may use.
//
// Layer: reconciler.
package hostaccess

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/selection"
)

// ManagementCluster identifies the management cluster by the UID of its namespace kube-system. A restore of its etcd preserves it.
func ManagementCluster(ctx context.Context, c client.Reader) (string, error) {
	ns := &corev1.Namespace{}
	err := c.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, ns)
	return string(ns.UID), err
}

// Usable lists the hosts that admit the namespace (ALL-18) and match every selector, by name. Hosts that
// are abandoned are left out.
func Usable(ctx context.Context, c client.Reader, namespace string, selectors ...*metav1.LabelSelector) ([]infrav1.CapstanHost, error) {
	list := &infrav1.CapstanHostList{}
	if err := c.List(ctx, list); err != nil {
		return nil, err
	}
	ns := &corev1.Namespace{}
	if slices.ContainsFunc(list.Items, selectsNamespaces) {
		if err := c.Get(ctx, client.ObjectKey{Name: namespace}, ns); err != nil {
			return nil, err
		}
	}
	usable := slices.DeleteFunc(list.Items, func(h infrav1.CapstanHost) bool {
		return Abandoned(&h) || !placement.Admits(&h, namespace, ns.Labels) ||
			slices.ContainsFunc(selectors, func(s *metav1.LabelSelector) bool { return !selection.Labels(s, h.Labels) })
	})
	slices.SortFunc(usable, func(a, b infrav1.CapstanHost) int { return cmp.Compare(a.Name, b.Name) })
	return usable, nil
}

// Named is the part of a list that has the name: one host or none.
func Named(list []infrav1.CapstanHost, name string) []infrav1.CapstanHost {
	return slices.DeleteFunc(slices.Clone(list), func(h infrav1.CapstanHost) bool { return h.Name != name })
}

func selectsNamespaces(h infrav1.CapstanHost) bool {
	return h.Spec.AllowedNamespaces != nil && h.Spec.AllowedNamespaces.Selector != nil
}

// Box that a host stands on, as it says itself or has last said; empty when it never did.
func Box(h *infrav1.CapstanHost, pool *connections.Pool) string {
	if conn := pool.Get(h.Name); conn != nil && conn.Connected() == nil {
		return conn.Info().GetBoxId()
	}
	return h.Status.BoxID
}

// BoxOf is the box of a cluster, which is that of its load balancer's host; empty when the host does not tell or does
// not exist, and without a load balancer.
func BoxOf(ctx context.Context, c client.Reader, pool *connections.Pool, cluster *infrav1.CapstanCluster) (string, error) {
	name := cluster.Spec.LoadBalancer.HostName
	if name == "" {
		return "", nil
	}
	h := &infrav1.CapstanHost{}
	if err := c.Get(ctx, client.ObjectKey{Name: name}, h); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	return Box(h, pool), nil
}

// OnBox is the part of a list that can have machines of a cluster on that box.
func OnBox(list []infrav1.CapstanHost, pool *connections.Pool, box string) []infrav1.CapstanHost {
	return slices.DeleteFunc(slices.Clone(list), func(h infrav1.CapstanHost) bool { return !placement.SameBox(Box(&h, pool), box) })
}

// Abandoned reports whether one of the objects carries the annotation that says that what is on
// its host counts as gone.
func Abandoned(objs ...client.Object) bool {
	return slices.ContainsFunc(objs, func(o client.Object) bool {
		_, ok := o.GetAnnotations()[infrav1.HostAbandonedAnnotation]
		return ok
	})
}

// Mismatch reports whether a CapstanHost is another host than the one of the recorded id, and what to do; nothing when
// it is that host, or when no id was recorded. Two management clusters may have given one name to two hosts:
// after a move what is on the one must not be looked for, made anew or counted as removed on the other.
func Mismatch(name, recorded, actual string) string {
	if recorded == "" || actual == "" || recorded == actual {
		return ""
	}
	return fmt.Sprintf("CapstanHost %s is the host with the id %s, but the host with the id %s was chosen. Capstan changes nothing on it. "+
		"Set its spec.address to the chosen host, or move the cluster to a management cluster where this is so. If the host was installed again and its machines are lost, annotate this object with %s and delete it",
		name, actual, recorded, infrav1.HostAbandonedAnnotation)
}

// Candidates describes hosts to placement, as the connections know them now.
func Candidates(list []infrav1.CapstanHost, pool *connections.Pool) []placement.Host {
	out := make([]placement.Host, 0, len(list))
	for i := range list {
		h := &list[i]
		c := placement.Host{
			Name:          h.Name,
			FailureDomain: placement.FailureDomain(h),
			Box:           Box(h, pool),
			ControlPlane:  placement.AllowsControlPlane(h),
		}
		conn := pool.Get(h.Name)
		switch {
		case !h.DeletionTimestamp.IsZero():
			c.Unavailable = "is being deleted"
		case ptr.Deref(h.Spec.Unschedulable, false):
			c.Unavailable = "is unschedulable"
		case conn == nil:
			c.Unavailable = "is not connected"
		case conn.Connected() != nil:
			c.Unavailable = "is not connected: " + conn.Connected().Error()
		default:
			info := conn.Info()
			c.Versions, c.Images = info.GetKubernetesVersions(), info.GetImages()
			c.CPUs, c.FreeMemory, c.Disk = info.GetCpus(), conn.FreeMemory(), info.GetDiskBytes()
		}
		out = append(out, c)
	}
	return out
}

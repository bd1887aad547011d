package hostselection

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

// Permissions returns the permissions of each host of a list for the machines of a namespace, by the name of the host. It is empty for a
// machine without mounts and devices in a cluster with a network of its own.
func Permissions(ctx context.Context, c client.Reader, m *infrav1.CapstanMachine, cluster *infrav1.CapstanCluster, hosts []infrav1.CapstanHost) (map[string]placement.Permissions, error) {
	lan := cluster.Spec.Network.LAN.Name
	if len(m.Spec.HostMounts)+len(m.Spec.Devices) == 0 && lan == "" {
		return nil, nil
	}
	permissions, err := permitted(ctx, c, m.Namespace, hosts)
	if err != nil || lan == "" {
		return permissions, err
	}
	virtual, err := virtualAddresses(ctx, c, lan)
	for name, p := range permissions {
		p.Virtual = virtual
		permissions[name] = p
	}
	return permissions, err
}

// virtualAddresses returns the networks with the endpoints of clusters in a LAN. A host without virtual addresses has machines in the LAN, too.
// A host has an address in one VLAN of the LAN, and no record says in which one: its endpoints are those of all VLANs.
func virtualAddresses(ctx context.Context, c client.Reader, lan string) (all []string, err error) {
	hosts := &infrav1.CapstanHostList{}
	if err := c.List(ctx, hosts, client.UnsafeDisableDeepCopy); err != nil { // All hosts, and only read.
		return nil, err
	}
	for i := range hosts.Items {
		h := &hosts.Items[i]
		if slices.ContainsFunc(h.Spec.LANNetworks, func(n infrav1.LANNetwork) bool { return n.Name == lan }) {
			all = append(all, h.Spec.VirtualAddresses...)
		}
	}
	return all, nil
}

func permitted(ctx context.Context, c client.Reader, namespace string, hosts []infrav1.CapstanHost) (map[string]placement.Permissions, error) {
	ns := &corev1.Namespace{}
	if err := c.Get(ctx, client.ObjectKey{Name: namespace}, ns); err != nil {
		return nil, err
	}
	out := map[string]placement.Permissions{}
	for i := range hosts {
		out[hosts[i].Name] = placement.Permitted(&hosts[i], namespace, ns.Labels)
	}
	return out, nil
}

// Offer returns the entry of a host for the LAN of a cluster, or why the host does not offer it to the namespace of the cluster.
func Offer(ctx context.Context, c client.Reader, cluster *infrav1.CapstanCluster, h *infrav1.CapstanHost) (offer *infrav1.LANNetwork, why string, err error) {
	permissions, err := permitted(ctx, c, cluster.Namespace, []infrav1.CapstanHost{*h})
	if err != nil {
		return nil, "", err
	}
	p, lan := permissions[h.Name], placement.LANOf(cluster, nil)
	if why := p.LANRefusal(cluster.Namespace, lan); why != "" {
		return nil, why, nil
	}
	return p.Offer(lan), "", nil
}

// Offering is the part of a list that offers the LAN of a cluster to its namespace: all of them for a cluster with a network of its
// own. The second result is the network of the LAN on the first of them that has the cluster's machine network, or any if the
// cluster has none yet. why is the reason of a host that does not offer it.
func Offering(ctx context.Context, c client.Reader, cluster *infrav1.CapstanCluster, hosts []infrav1.CapstanHost) (offering []infrav1.CapstanHost, cidr, why string, err error) {
	lan := placement.LANOf(cluster, nil)
	if lan.Name == "" {
		return hosts, "", "", nil
	}
	permissions, err := permitted(ctx, c, cluster.Namespace, hosts)
	if err != nil {
		return nil, "", "", err
	}
	for _, h := range hosts {
		p := permissions[h.Name]
		if offer := p.Offer(lan); offer != nil && lan.CIDR == "" {
			lan.CIDR = offer.CIDR
		}
		if refusal := p.LANRefusal(cluster.Namespace, lan); refusal != "" {
			why = "CapstanHost " + h.Name + " " + refusal
			continue
		}
		offering = append(offering, h)
	}
	return offering, lan.CIDR, why, nil
}

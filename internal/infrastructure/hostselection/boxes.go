package hostselection

import (
	"context"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

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

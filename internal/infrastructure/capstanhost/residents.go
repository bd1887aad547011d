package capstanhost

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
)

// A namespace can write any host into its objects. So an object of a namespace that the host does not admit keeps the host only if the
// host has something of it: otherwise a tenant could prevent the drain, the reboot and the deletion of every host. What the host has
// stays under the rules of the drain. An object of a namespace that the host admits always counts, because its machine may be on the
// way. While the host is not connected, nothing is certain, and every object counts.

// residents decides which objects count as those of a host.
type residents struct {
	// conn is nil while the host is not connected.
	conn *connections.Host
	// admits returns whether the host admits a namespace.
	admits func(namespace string) (bool, error)
}

func (r *Reconciler) residentsOf(ctx context.Context, host *infrav1.CapstanHost) residents {
	admitting := hostselection.ByNamespace(ctx, r.Client, []infrav1.CapstanHost{*host})
	return residents{conn: r.Pool.Connected(host.Name), admits: func(namespace string) (bool, error) {
		hosts, err := admitting(namespace)
		if err != nil {
			return false, fmt.Errorf("read Namespace %s: %w", namespace, err)
		}
		return len(hosts) > 0, nil
	}}
}

func (r residents) machine(m *infrav1.CapstanMachine) (bool, error) {
	return r.counts(m, func() bool {
		spec := r.conn.Machine(m.Spec.ID).GetSpec()
		return spec != nil && spec.GetNamespace() == m.Namespace
	})
}

// cluster looks for the load balancer. A network without one leaves the host with its last machine.
func (r residents) cluster(c *infrav1.CapstanCluster) (bool, error) {
	return r.counts(c, func() bool {
		balancer := r.conn.LoadBalancer(c.Spec.ID)
		return balancer != nil && balancer.GetNamespace() == c.Namespace
	})
}

// volume counts while the host has any volume, because the host reports only the size of all volumes together.
func (r residents) volume(v *infrav1.CapstanVolume) (bool, error) {
	return r.counts(v, func() bool { return r.conn.Info().GetVolumeBytes() > 0 })
}

// counts returns whether an object counts. onHost is called only while the host is connected.
func (r residents) counts(o client.Object, onHost func() bool) (bool, error) {
	if r.conn == nil || onHost() {
		return true, nil
	}
	return r.admits(o.GetNamespace())
}

// only returns the part of a list that passes, with the objects that cannot be judged, and the first error about those. It uses the
// memory of the list.
func only[T any](list []T, passes func(*T) (bool, error)) (kept []T, first error) {
	kept = list[:0]
	for i := range list {
		ok, err := passes(&list[i])
		if first == nil {
			first = err
		}
		if ok || err != nil {
			kept = append(kept, list[i])
		}
	}
	return kept, first
}

package hostaccess

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

// Permissions returns what each host of a list allows for the machines of a namespace, by the name of the host. It is empty for a
// machine without mounts and devices.
func Permissions(ctx context.Context, c client.Reader, m *infrav1.CapstanMachine, hosts []infrav1.CapstanHost) (map[string]placement.Permissions, error) {
	if len(m.Spec.HostMounts)+len(m.Spec.Devices) == 0 {
		return nil, nil
	}
	ns := &corev1.Namespace{}
	if err := c.Get(ctx, client.ObjectKey{Name: m.Namespace}, ns); err != nil {
		return nil, err
	}
	out := map[string]placement.Permissions{}
	for i := range hosts {
		out[hosts[i].Name] = placement.Permitted(&hosts[i], m.Namespace, ns.Labels)
	}
	return out, nil
}

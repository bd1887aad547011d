package bootstrap

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// owner is the object that a CapstanConfig bootstraps: a Machine, or a MachinePool for all its machines.
type owner struct {
	clusterName  string
	version      string
	controlPlane bool
	// joined is true if the machine has its node and needs nothing more from this provider. It is never true for pools,
	// which add machines at any time.
	joined bool
	// started is true if the machine has used its bootstrap data, or uses it now. It is never true for pools.
	started  bool
	deleting bool
	// pool is the MachinePool; nil for a Machine.
	pool *clusterv1.MachinePool
}

// findOwner returns the Machine or MachinePool of a config (BC-04). It returns nil for a config without an owner.
func findOwner(ctx context.Context, c client.Client, config *bootstrapv1.CapstanConfig) (*owner, error) {
	for _, ref := range config.OwnerReferences {
		gv, err := schema.ParseGroupVersion(ref.APIVersion)
		if err != nil || gv.Group != clusterv1.GroupVersion.Group {
			continue
		}
		switch ref.Kind {
		case "Machine":
			machine, err := util.GetMachineByName(ctx, c, config.Namespace, ref.Name)
			if err != nil {
				return nil, client.IgnoreNotFound(err)
			}
			return ptr.To(ofMachine(machine)), nil
		case "MachinePool":
			pool, err := util.GetMachinePoolByName(ctx, c, config.Namespace, ref.Name)
			if err != nil {
				return nil, client.IgnoreNotFound(err)
			}
			return &owner{
				clusterName: pool.Spec.ClusterName,
				version:     pool.Spec.Template.Spec.Version,
				deleting:    !pool.DeletionTimestamp.IsZero(),
				pool:        pool,
			}, nil
		}
	}
	return nil, nil
}

// ofMachine returns what this provider reads of a Machine. machineChanged compares it.
func ofMachine(m *clusterv1.Machine) owner {
	joined := m.Status.NodeRef.IsDefined()
	return owner{
		clusterName:  m.Spec.ClusterName,
		version:      m.Spec.Version,
		controlPlane: util.IsControlPlaneMachine(m),
		joined:       joined,
		started:      joined || ptr.Deref(m.Status.Initialization.InfrastructureProvisioned, false),
		deleting:     !m.DeletionTimestamp.IsZero(),
	}
}

package controlplane

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/external"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
)

// findOutdated finds the outdated Machines and the reasons, and the deletion timestamps of infrastructure machines.
func (r *objects) findOutdated(ctx context.Context, s *scope) error {
	s.Outdated, s.InfrastructureDeletedAt = map[string][]string{}, map[string]time.Time{}
	for _, machine := range s.Machines {
		config, infraMachine, err := r.partsOf(ctx, machine)
		if err != nil {
			return err
		}
		if infraMachine != nil && infraMachine.GetDeletionTimestamp() != nil {
			s.InfrastructureDeletedAt[machine.Name] = infraMachine.GetDeletionTimestamp().Time
		}
		s.Outdated[machine.Name] = model.Outdated(s.Object, machine, config, infraMachine, s.Now)
	}
	return r.findOtherAuthorities(ctx, s)
}

// partsOf returns the CapstanConfig and the infrastructure machine of a Machine; nil for one that does not exist or cannot be
// read. A missing object does not make a Machine outdated.
func (r *objects) partsOf(ctx context.Context, machine *clusterv1.Machine) (*bootstrapv1.CapstanConfig, *unstructured.Unstructured, error) {
	config := &bootstrapv1.CapstanConfig{}
	key := client.ObjectKey{Namespace: machine.Namespace, Name: machine.Spec.Bootstrap.ConfigRef.Name}
	if err := r.Client.Get(ctx, key, config); client.IgnoreNotFound(err) != nil {
		return nil, nil, err
	} else if err != nil {
		config = nil
	}
	infraMachine, err := external.GetObjectFromContractVersionedRef(ctx, r.Client, machine.Spec.InfrastructureRef, machine.Namespace)
	if err != nil {
		infraMachine = nil
	}
	return config, infraMachine, nil
}

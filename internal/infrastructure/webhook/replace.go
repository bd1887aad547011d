package webhook

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/manager/replace"
)

// +kubebuilder:webhook:verbs=update,path=/mutate-infrastructure-capstan-dev-v1beta2-capstancluster,mutating=true,failurePolicy=fail,matchPolicy=Equivalent,groups=infrastructure.capstan.dev,resources=capstanclusters,versions=v1beta2,name=default.capstancluster.infrastructure.capstan.dev,sideEffects=None,admissionReviewVersions=v1
// +kubebuilder:webhook:verbs=update,path=/mutate-infrastructure-capstan-dev-v1beta2-capstanmachinepool,mutating=true,failurePolicy=fail,matchPolicy=Equivalent,groups=infrastructure.capstan.dev,resources=capstanmachinepools,versions=v1beta2,name=default.capstanmachinepool.infrastructure.capstan.dev,sideEffects=None,admissionReviewVersions=v1

var (
	_ admission.Defaulter[*infrav1.CapstanCluster]     = &Cluster{}
	_ admission.Defaulter[*infrav1.CapstanMachinePool] = MachinePool{}
)

// Default restores the fields that the controller has written to a CapstanCluster, when a manifest replaces it. It changes nothing else.
func (v *Cluster) Default(ctx context.Context, c *infrav1.CapstanCluster) error {
	before := &infrav1.CapstanCluster{}
	if replaced, err := replace.Restore(ctx, c, before, infrav1.ClusterFinalizer); err != nil || !replaced {
		return err
	}
	spec, was := &c.Spec, before.Spec
	replace.Field(&spec.ID, was.ID)
	replace.Field(&spec.ControlPlaneEndpoint, was.ControlPlaneEndpoint)
	replace.Field(&spec.Network.MachineCIDR, was.Network.MachineCIDR)
	replace.Field(&spec.Network.Overlay, was.Network.Overlay)
	if spec.LoadBalancerHosts == nil {
		spec.LoadBalancerHosts = was.LoadBalancerHosts
	}
	lb := &spec.LoadBalancer
	if _, ours := before.Annotations[infrav1.PortFromRangeAnnotation]; ours {
		replace.Field(&lb.Port, was.LoadBalancer.Port)
	}
	if lb.AddressFromPool != nil {
		replace.Field(&lb.Address, was.LoadBalancer.Address)
	}
	if lb.HostName == "" || lb.HostName == was.LoadBalancer.HostName {
		lb.HostName, lb.HostID = was.LoadBalancer.HostName, was.LoadBalancer.HostID
	}
	return nil
}

// Default restores the fields that the controller has written to a CapstanMachinePool, when a manifest replaces it. It changes nothing else.
func (MachinePool) Default(ctx context.Context, p *infrav1.CapstanMachinePool) error {
	before := &infrav1.CapstanMachinePool{}
	if replaced, err := replace.Restore(ctx, p, before, infrav1.MachinePoolFinalizer); err != nil || !replaced {
		return err
	}
	replace.Field(&p.Spec.ID, before.Spec.ID)
	replace.Field(&p.Spec.ProviderID, before.Spec.ProviderID)
	replace.Field(&p.Spec.Replicas, before.Spec.Replicas)
	if p.Spec.ProviderIDList == nil {
		p.Spec.ProviderIDList = before.Spec.ProviderIDList
	}
	return nil
}

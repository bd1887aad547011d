package conversion

import (
	"cmp"
	"context"
	"slices"

	"k8s.io/utils/ptr"
	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/webhook/conversion"

	infrav1beta1 "capstan.dev/capstan/api/infrastructure/v1beta1"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// Converters of the infrastructure provider's kinds.
var (
	CapstanCluster = conversion.NewHubSpokeConverter(&infrav1.CapstanCluster{},
		conversion.NewSpokeConverter(&infrav1beta1.CapstanCluster{}, clusterFromHub, clusterToHub))
	CapstanClusterTemplate = conversion.NewHubSpokeConverter(&infrav1.CapstanClusterTemplate{},
		conversion.NewSpokeConverter(&infrav1beta1.CapstanClusterTemplate{}, clusterTemplateFromHub, clusterTemplateToHub))
	CapstanMachine = conversion.NewHubSpokeConverter(&infrav1.CapstanMachine{},
		conversion.NewSpokeConverter(&infrav1beta1.CapstanMachine{}, machineFromHub, machineToHub))
	CapstanMachineTemplate = conversion.NewHubSpokeConverter(&infrav1.CapstanMachineTemplate{},
		conversion.NewSpokeConverter(&infrav1beta1.CapstanMachineTemplate{}, machineTemplateFromHub, machineTemplateToHub))
	CapstanMachinePool = conversion.NewHubSpokeConverter(&infrav1.CapstanMachinePool{},
		conversion.NewSpokeConverter(&infrav1beta1.CapstanMachinePool{}, machinePoolFromHub, machinePoolToHub))
	CapstanMachinePoolTemplate = conversion.NewHubSpokeConverter(&infrav1.CapstanMachinePoolTemplate{},
		conversion.NewSpokeConverter(&infrav1beta1.CapstanMachinePoolTemplate{}, machinePoolTemplateFromHub, machinePoolTemplateToHub))
)

func clusterFromHub(_ context.Context, src *infrav1.CapstanCluster, dst *infrav1beta1.CapstanCluster) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	dst.Status = infrav1beta1.CapstanClusterStatus{
		Ready:              src.Status.Initialization.Provisioned,
		FailureDomains:     domainsFromHub(src.Status.FailureDomains),
		Conditions:         legacy(src.Status.Conditions),
		ObservedGeneration: src.Status.ObservedGeneration,
		V1Beta2:            infrav1beta1.V1Beta2Status{Conditions: src.Status.Conditions},
	}
	return nil
}

func clusterToHub(_ context.Context, src *infrav1beta1.CapstanCluster, dst *infrav1.CapstanCluster) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	dst.Status = infrav1.CapstanClusterStatus{
		Conditions:         src.Status.V1Beta2.Conditions,
		Initialization:     infrav1.CapstanClusterInitializationStatus{Provisioned: src.Status.Ready},
		FailureDomains:     domainsToHub(src.Status.FailureDomains),
		ObservedGeneration: src.Status.ObservedGeneration,
	}
	return nil
}

// domainsFromHub turns the list of failure domains into a map (IC-04).
func domainsFromHub(domains []clusterv1.FailureDomain) clusterv1beta1.FailureDomains {
	if len(domains) == 0 {
		return nil
	}
	out := clusterv1beta1.FailureDomains{}
	for _, d := range domains {
		out[d.Name] = clusterv1beta1.FailureDomainSpec{ControlPlane: ptr.Deref(d.ControlPlane, false), Attributes: d.Attributes}
	}
	return out
}

// domainsToHub turns the map of failure domains into a list, sorted by name as the controller writes it.
func domainsToHub(domains clusterv1beta1.FailureDomains) []clusterv1.FailureDomain {
	var out []clusterv1.FailureDomain
	for name, d := range domains {
		out = append(out, clusterv1.FailureDomain{Name: name, ControlPlane: ptr.To(d.ControlPlane), Attributes: d.Attributes})
	}
	slices.SortFunc(out, func(a, b clusterv1.FailureDomain) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

func machineFromHub(_ context.Context, src *infrav1.CapstanMachine, dst *infrav1beta1.CapstanMachine) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	dst.Status = infrav1beta1.CapstanMachineStatus{
		Ready:              src.Status.Initialization.Provisioned,
		Addresses:          src.Status.Addresses,
		FailureDomain:      src.Status.FailureDomain,
		Restarts:           src.Status.Restarts,
		Update:             src.Status.Update,
		Conditions:         legacy(src.Status.Conditions),
		ObservedGeneration: src.Status.ObservedGeneration,
		V1Beta2:            infrav1beta1.V1Beta2Status{Conditions: src.Status.Conditions},
	}
	dst.Status.FailureReason, dst.Status.FailureMessage = failure(src.Status.Conditions)
	return nil
}

func machineToHub(_ context.Context, src *infrav1beta1.CapstanMachine, dst *infrav1.CapstanMachine) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	dst.Status = infrav1.CapstanMachineStatus{
		Conditions:         src.Status.V1Beta2.Conditions,
		Initialization:     infrav1.CapstanMachineInitializationStatus{Provisioned: src.Status.Ready},
		Addresses:          src.Status.Addresses,
		FailureDomain:      src.Status.FailureDomain,
		Restarts:           src.Status.Restarts,
		Update:             src.Status.Update,
		ObservedGeneration: src.Status.ObservedGeneration,
	}
	return nil
}

func machinePoolFromHub(_ context.Context, src *infrav1.CapstanMachinePool, dst *infrav1beta1.CapstanMachinePool) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	dst.Status = infrav1beta1.CapstanMachinePoolStatus{
		Ready:                     src.Status.Ready,
		Replicas:                  src.Status.Replicas,
		ReadyReplicas:             src.Status.ReadyReplicas,
		AvailableReplicas:         src.Status.AvailableReplicas,
		UpToDateReplicas:          src.Status.UpToDateReplicas,
		Selector:                  src.Status.Selector,
		InfrastructureMachineKind: src.Status.InfrastructureMachineKind,
		Instances:                 src.Status.Instances,
		Capacity:                  src.Status.Capacity,
		NodeInfo:                  src.Status.NodeInfo,
		Conditions:                legacy(src.Status.Conditions),
		ObservedGeneration:        src.Status.ObservedGeneration,
		V1Beta2: infrav1beta1.CapstanMachinePoolV1Beta2Status{
			Conditions: src.Status.Conditions, Initialization: src.Status.Initialization,
		},
	}
	return nil
}

func machinePoolToHub(_ context.Context, src *infrav1beta1.CapstanMachinePool, dst *infrav1.CapstanMachinePool) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	dst.Status = infrav1.CapstanMachinePoolStatus{
		Conditions:                src.Status.V1Beta2.Conditions,
		Initialization:            src.Status.V1Beta2.Initialization,
		Ready:                     src.Status.Ready,
		Replicas:                  src.Status.Replicas,
		ReadyReplicas:             src.Status.ReadyReplicas,
		AvailableReplicas:         src.Status.AvailableReplicas,
		UpToDateReplicas:          src.Status.UpToDateReplicas,
		Selector:                  src.Status.Selector,
		InfrastructureMachineKind: src.Status.InfrastructureMachineKind,
		Instances:                 src.Status.Instances,
		Capacity:                  src.Status.Capacity,
		NodeInfo:                  src.Status.NodeInfo,
		ObservedGeneration:        src.Status.ObservedGeneration,
	}
	return nil
}

func clusterTemplateFromHub(_ context.Context, src *infrav1.CapstanClusterTemplate, dst *infrav1beta1.CapstanClusterTemplate) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	return nil
}

func clusterTemplateToHub(_ context.Context, src *infrav1beta1.CapstanClusterTemplate, dst *infrav1.CapstanClusterTemplate) error {
	dst.ObjectMeta, dst.Spec = src.ObjectMeta, src.Spec
	return nil
}

func machineTemplateFromHub(_ context.Context, src *infrav1.CapstanMachineTemplate, dst *infrav1beta1.CapstanMachineTemplate) error {
	dst.ObjectMeta, dst.Spec, dst.Status = src.ObjectMeta, src.Spec, src.Status
	return nil
}

func machineTemplateToHub(_ context.Context, src *infrav1beta1.CapstanMachineTemplate, dst *infrav1.CapstanMachineTemplate) error {
	dst.ObjectMeta, dst.Spec, dst.Status = src.ObjectMeta, src.Spec, src.Status
	return nil
}

func machinePoolTemplateFromHub(_ context.Context, src *infrav1.CapstanMachinePoolTemplate, dst *infrav1beta1.CapstanMachinePoolTemplate) error {
	dst.ObjectMeta, dst.Spec, dst.Status = src.ObjectMeta, src.Spec, src.Status
	return nil
}

func machinePoolTemplateToHub(_ context.Context, src *infrav1beta1.CapstanMachinePoolTemplate, dst *infrav1.CapstanMachinePoolTemplate) error {
	dst.ObjectMeta, dst.Spec, dst.Status = src.ObjectMeta, src.Spec, src.Status
	return nil
}

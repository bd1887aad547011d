package machine

import (
	"cmp"
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// waitForPrerequisites waits for the cluster's infrastructure and the bootstrap data (IM-05). A machine
// that was made needs neither.
func (r *Reconciler) waitForPrerequisites(ctx context.Context, s *scope) error {
	if s.capstan.Spec.ProviderID != "" {
		return nil
	}
	if provisioned, err := r.hasInfrastructure(ctx, s); err != nil {
		return err
	} else if !provisioned {
		reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForClusterInfrastructureReason,
			"%s", r.missingInfrastructure(s.cluster))
		return reconciling.ErrWaiting
	}
	name, err := r.dataSecretName(ctx, s)
	if err != nil {
		return err
	}
	if name == "" {
		reconciling.SetCondition(s.capstan, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForBootstrapDataReason,
			"Waiting for the bootstrap provider to create the bootstrap data")
		return reconciling.ErrWaiting
	}
	return nil
}

// hasInfrastructure reports whether the cluster has the infrastructure that a machine needs to boot. By default the CapstanCluster shows
// this before it is provisioned: the package cluster explains the reason.
func (r *Reconciler) hasInfrastructure(ctx context.Context, s *scope) (bool, error) {
	if ptr.Deref(s.cluster.Status.Initialization.InfrastructureProvisioned, false) {
		return true, nil
	}
	if !r.bootsAhead(s.cluster) {
		return false, nil
	}
	c, err := r.capstanCluster(ctx, s)
	return err == nil && c.AllowsBoot(), client.IgnoreNotFound(err)
}

// bootsAhead reports whether machines boot as soon as the CapstanCluster allows it, before the Cluster is provisioned.
func (r *Reconciler) bootsAhead(c *clusterv1.Cluster) bool {
	return !r.StrictContract && c.Spec.InfrastructureRef.Kind == infrav1.ClusterKind
}

// missingInfrastructure names the field for which hasInfrastructure waits.
func (r *Reconciler) missingInfrastructure(c *clusterv1.Cluster) string {
	if r.bootsAhead(c) {
		return "Waiting until the CapstanCluster allows the boot: see its condition " + infrav1.BootAllowedCondition
	}
	return fmt.Sprintf("Waiting for status.initialization.infrastructureProvisioned of Cluster %s: see the conditions of its infrastructure, %s %s",
		c.Name, c.Spec.InfrastructureRef.Kind, c.Spec.InfrastructureRef.Name)
}

// isPooled reports whether a Machine belongs to a machine pool.
func isPooled(m *clusterv1.Machine) bool {
	_, ok := m.Labels[clusterv1.MachinePoolNameLabel]
	return ok
}

// poolRecord returns a decision that a pool recorded for its machine, because core gives the Machine of a pool neither bootstrap data nor a
// failure domain, and a version only after its Node exists. The annotations of other machines come from templates of users, and do not
// count: the owner of the Machine decides.
func poolRecord(s *scope, annotation string) string {
	if !isPooled(s.machine) {
		return ""
	}
	return s.capstan.Annotations[annotation]
}

// kubernetesVersion returns the version that the pool recorded, which an update in place changes before the Node has it, or that of the
// Machine.
func kubernetesVersion(s *scope) string {
	return cmp.Or(poolRecord(s, infrav1.MachineVersionAnnotation), s.machine.Spec.Version)
}

// wantedFailureDomain returns the failure domain that the pool recorded, or that of the Machine.
func wantedFailureDomain(s *scope) string {
	return cmp.Or(poolRecord(s, infrav1.MachineFailureDomainAnnotation), s.machine.Spec.FailureDomain)
}

// dataSecretName returns the name in the Machine. For a Machine of a pool it is the name that the pool recorded, else
// that of the MachinePool.
func (r *Reconciler) dataSecretName(ctx context.Context, s *scope) (string, error) {
	if name := ptr.Deref(s.machine.Spec.Bootstrap.DataSecretName, ""); name != "" {
		return name, nil
	}
	if name := poolRecord(s, infrav1.MachineBootstrapSecretAnnotation); name != "" {
		return name, nil
	}
	if !isPooled(s.machine) {
		return "", nil
	}
	pool, err := util.GetMachinePoolByLabels(ctx, r.Client, s.machine.Namespace, s.machine.Labels)
	if err != nil || pool == nil {
		return "", err
	}
	return ptr.Deref(pool.Spec.Template.Spec.Bootstrap.DataSecretName, ""), nil
}

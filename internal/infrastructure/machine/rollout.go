package machine

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/shorten"
)

// Core asks the hook about a MachineSet and writes the answer to its log only. So each machine of a MachineDeployment with the
// policy Only shows itself which change stops the rollout.

// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machinedeployments,verbs=get
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachinetemplates,verbs=get
// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigtemplates,verbs=get

// withoutUpdate shows a machine whose owner has begun no update, and the obstacle of one.
func (r *Reconciler) withoutUpdate(ctx context.Context, s *scope, report *hostpb.UpdateStatus) error {
	m := s.capstan
	deployment, why, err := r.stoppedRollout(ctx, s)
	if err != nil {
		return err
	}
	if why == "" {
		notUpdating(m, report)
		return nil
	}
	mirrorUpdate(&m.Status.Update, report)
	if conditions.GetMessage(m, infrav1.UpdatingCondition) != why {
		r.recorder.Eventf(deployment, m, corev1.EventTypeWarning, infrav1.CannotUpdateInPlaceReason, "Update", "%s", why)
	}
	reconciling.SetCondition(m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.CannotUpdateInPlaceReason, "%s", why)
	return nil
}

// stoppedRollout returns the MachineDeployment of an outdated machine and the change that stops its rollout under the policy Only;
// "" if nothing does. It reads live: an outdated machine is rare, and the manager caches no templates of others.
func (r *Reconciler) stoppedRollout(ctx context.Context, s *scope) (*clusterv1.MachineDeployment, string, error) {
	name, ok := s.machine.Labels[clusterv1.MachineDeploymentNameLabel]
	if !ok || differences(s.machine) == "" {
		return nil, "", nil
	}
	deployment := &clusterv1.MachineDeployment{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: s.machine.Namespace, Name: name}, deployment); err != nil {
		return nil, "", client.IgnoreNotFound(err)
	}
	if deployment.Annotations[infrav1.InPlaceAnnotation] != "Only" {
		return nil, "", nil
	}
	changes, err := r.changesOf(ctx, s, deployment.Spec.Template.Spec)
	var out []string
	for _, c := range inplace.Blocking(changes) {
		out = append(out, c.String())
	}
	if err != nil || len(out) == 0 {
		return nil, "", client.IgnoreNotFound(err) // A template that is missing is created later, or the MachineDeployment changes.
	}
	return deployment, shorten.To(fmt.Sprintf("The annotation %s of the MachineDeployment %s is Only: %s", infrav1.InPlaceAnnotation, name, strings.Join(out, "; ")), maxWhy), nil
}

// maxWhy limits the message in bytes. The templates of tenants have lists of any length.
const maxWhy = 1024

// changesOf returns the differences between a machine and the template of its MachineDeployment.
func (r *Reconciler) changesOf(ctx context.Context, s *scope, desired clusterv1.MachineSpec) ([]inplace.Change, error) {
	out := []inplace.Change{
		inplace.Version(s.machine.Spec.Version, desired.Version), inplace.FailureDomain(s.machine.Spec.FailureDomain, desired.FailureDomain),
	}
	if ref := desired.InfrastructureRef; ref.APIGroup != infrav1.GroupVersion.Group || ref.Kind != infrav1.MachineTemplateKind {
		return append(out, otherKind("infrastructureRef", infrav1.MachineTemplateKind, ref.Kind)), nil
	}
	if ref := desired.Bootstrap.ConfigRef; ref.APIGroup != bootstrapv1.GroupVersion.Group || ref.Kind != bootstrapv1.ConfigTemplateKind {
		return append(out, otherKind("bootstrap.configRef", bootstrapv1.ConfigTemplateKind, ref.Kind)), nil
	}
	infra, template := &infrav1.CapstanMachineTemplate{}, &bootstrapv1.CapstanConfigTemplate{}
	config := &bootstrapv1.CapstanConfig{}
	for _, wanted := range []struct {
		name   string
		object client.Object
	}{{desired.InfrastructureRef.Name, infra}, {desired.Bootstrap.ConfigRef.Name, template}, {s.machine.Spec.Bootstrap.ConfigRef.Name, config}} {
		if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: s.machine.Namespace, Name: wanted.name}, wanted.object); err != nil {
			return nil, err
		}
	}
	out = append(out, inplace.Machine(s.capstan.Spec, infra.Spec.Template.Spec)...)
	return append(out, inplace.Config(config.Spec, template.Spec.Template.Spec)...), nil
}

func otherKind(path, want, found string) inplace.Change {
	return inplace.Change{Path: path, Verdict: inplace.Replace, Why: fmt.Sprintf("expected a %s, found a %s", want, found)}
}

package controlplane

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/stored"
)

// propagation is the step that brings changes of the template to existing Machines in place.
type propagation struct {
	*clients
	*applier
}

// reconcile applies changes that need no new Machine to the existing ones: labels, annotations, timeouts, readiness gates,
// minReadySeconds, taints (CP-07, CP-17, CP-18). If the change of one Machine fails, the other Machines still get theirs. The failure
// is logged and tried again, and is not returned: after repeated errors the next reconciliation can be many minutes away.
func (r *propagation) reconcile(ctx context.Context, s *scope) (out result, err error) {
	f := s.CompleteFleet()
	for n := range f.Instances {
		i := &f.Instances[n]
		propagate := r.propagateTo
		if i.Deleting() {
			propagate = r.propagateToDeleting
		}
		if err := propagate(ctx, s, i); err != nil {
			ctrl.LoggerFrom(ctx).Error(err, "A change did not reach a Machine", "Machine", klog.KObj(i.Machine))
			out.refused = append(out.refused, advise(err))
			out.requeueAfter = longestPause // The end of a refusal is no event.
		}
	}
	return out, nil
}

func (r *propagation) propagateTo(ctx context.Context, s *scope, i *model.Instance) error {
	stored := i.Machine.DeepCopy()
	if i.Member != nil && !i.Member.CertificatesExpire.IsZero() {
		metav1.SetMetaDataAnnotation(&stored.ObjectMeta, clusterv1.MachineCertificatesExpiryDateAnnotation, i.Member.CertificatesExpire.UTC().Format(time.RFC3339))
	}
	if err := r.applyOnce(ctx, i.Machine, desiredMachine(s, stored)); err != nil {
		return fmt.Errorf("cannot bring changes to the Machine %s: %w", i.Name(), err)
	}
	config, infraMachine := s.parts[i.Name()].config, s.parts[i.Name()].infraMachine
	if config != nil {
		if err := r.applyOnce(ctx, config, desiredMetadata(s, config, bootstrapv1.GroupVersion.String(), bootstrapv1.ConfigKind)); err != nil {
			return fmt.Errorf("cannot bring changes to the CapstanConfig %s: %w", config.Name, err)
		}
	}
	if infraMachine == nil {
		return nil
	}
	if err := r.applyOnce(ctx, infraMachine, desiredMetadata(s, infraMachine, infraMachine.GetAPIVersion(), infraMachine.GetKind())); err != nil {
		return fmt.Errorf("cannot bring changes to the %s %s: %w", infraMachine.GetKind(), infraMachine.GetName(), err)
	}
	return nil
}

// desiredMachine returns the applied configuration of a Machine: its stored immutable fields, and the fields of the present
// template.
func desiredMachine(s *scope, stored *clusterv1.Machine) *clusterv1.Machine {
	template := s.Object.Spec.MachineTemplate
	out := &clusterv1.Machine{
		TypeMeta:   metav1.TypeMeta{APIVersion: clusterv1.GroupVersion.String(), Kind: "Machine"},
		ObjectMeta: metav1.ObjectMeta{Namespace: stored.Namespace, Name: stored.Name, UID: stored.UID},
		Spec: clusterv1.MachineSpec{
			ClusterName:       stored.Spec.ClusterName,
			Version:           stored.Spec.Version,
			FailureDomain:     stored.Spec.FailureDomain,
			Bootstrap:         clusterv1.Bootstrap{ConfigRef: stored.Spec.Bootstrap.ConfigRef},
			InfrastructureRef: stored.Spec.InfrastructureRef,
			ReadinessGates:    readinessGates(s),
			MinReadySeconds:   template.Spec.MinReadySeconds,
			Taints:            template.Spec.Taints,
			Deletion: clusterv1.MachineDeletionSpec{
				NodeDrainTimeoutSeconds:        template.Spec.Deletion.NodeDrainTimeoutSeconds,
				NodeVolumeDetachTimeoutSeconds: template.Spec.Deletion.NodeVolumeDetachTimeoutSeconds,
				NodeDeletionTimeoutSeconds:     template.Spec.Deletion.NodeDeletionTimeoutSeconds,
			},
		},
	}
	out.OwnerReferences = []metav1.OwnerReference{controllerRef(s.Object)}
	if slices.Contains(stored.Finalizers, clusterv1.MachineFinalizer) { // core's, given at birth: see handOver
		out.Finalizers = []string{clusterv1.MachineFinalizer}
	}
	out.Labels = maps.Clone(template.ObjectMeta.Labels)
	out.Annotations = maps.Clone(template.ObjectMeta.Annotations)
	if out.Labels == nil {
		out.Labels = map[string]string{}
	}
	if out.Annotations == nil {
		out.Annotations = map[string]string{}
	}
	maps.Copy(out.Labels, ownLabels(s))
	out.Annotations[controlplanev1.PreTerminateHookAnnotation] = ""
	for _, kept := range []string{controlplanev1.RemediationForAnnotation, controlplanev1.RestoreAnnotation, clusterv1.MachineCertificatesExpiryDateAnnotation} {
		if value, ok := stored.Annotations[kept]; ok {
			out.Annotations[kept] = value
		}
	}
	return out
}

// readinessGates returns our gates and then those of the user (CP-18).
func readinessGates(s *scope) []clusterv1.MachineReadinessGate {
	out := []clusterv1.MachineReadinessGate{{ConditionType: controlplanev1.MachineAPIServerHealthyCondition}}
	if s.Stacked() {
		out = append(out, clusterv1.MachineReadinessGate{ConditionType: controlplanev1.MachineEtcdMemberHealthyCondition})
	}
	ours := len(out)
	for _, gate := range s.Object.Spec.MachineTemplate.Spec.ReadinessGates {
		known := false
		for _, mine := range out[:ours] {
			known = known || mine.ConditionType == gate.ConditionType
		}
		if !known {
			out = append(out, gate)
		}
	}
	return out
}

// desiredMetadata returns the applied metadata of a CapstanConfig or an infrastructure machine.
func desiredMetadata(s *scope, stored client.Object, apiVersion, kind string) client.Object {
	template := s.Object.Spec.MachineTemplate.ObjectMeta
	out := &unstructured.Unstructured{}
	out.SetAPIVersion(apiVersion)
	out.SetKind(kind)
	out.SetNamespace(stored.GetNamespace())
	out.SetName(stored.GetName())
	out.SetUID(stored.GetUID())
	labels := maps.Clone(template.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	maps.Copy(labels, ownLabels(s))
	out.SetLabels(labels)
	if len(template.Annotations) > 0 {
		out.SetAnnotations(maps.Clone(template.Annotations))
	}
	return out
}

// defaultNodeDeletionTimeoutSeconds is the value that Cluster API's admission gives each Machine without one. A Machine never lacks it, so
// its removal would be written again in each reconciliation.
const defaultNodeDeletionTimeoutSeconds = 10

// propagateToDeleting changes the timeouts of a Machine that is being deleted, and removes those that the template lacks. Other fields have
// no effect any more.
func (r *propagation) propagateToDeleting(ctx context.Context, s *scope, i *model.Instance) error {
	machine, after := i.Machine, i.Machine.DeepCopy()
	want := s.Object.Spec.MachineTemplate.Spec.Deletion
	after.Spec.Deletion.NodeDrainTimeoutSeconds = want.NodeDrainTimeoutSeconds
	after.Spec.Deletion.NodeVolumeDetachTimeoutSeconds = want.NodeVolumeDetachTimeoutSeconds
	after.Spec.Deletion.NodeDeletionTimeoutSeconds = ptr.To(ptr.Deref(want.NodeDeletionTimeoutSeconds, defaultNodeDeletionTimeoutSeconds))
	if stored.Equal(machine.Spec.Deletion, after.Spec.Deletion) {
		return nil
	}
	if err := client.IgnoreNotFound(r.Client.Patch(ctx, after, client.MergeFrom(machine))); err != nil {
		return fmt.Errorf("cannot bring timeouts to the Machine %s: %w", machine.Name, err)
	}
	return nil
}

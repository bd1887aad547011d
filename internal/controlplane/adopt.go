package controlplane

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/blang/semver/v4"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
)

// A backup tool brings objects back without their owner references: Velero restores none. So labels, and not
// references, say which Machines belong to a control plane, as with KubeadmControlPlane; the references follow.

// controlPlaneKind is the kind of control planes in every API version.
var controlPlaneKind = controlplanev1.GroupVersion.WithKind(kind).GroupKind()

// ownMachines are the Machines of a control plane. s.mixed names those that have the labels and belong to something else.
func (r *Reconciler) ownMachines(ctx context.Context, c client.Reader, s *scope) (collections.Machines, error) {
	list := &clusterv1.MachineList{}
	if err := c.List(ctx, list, client.InNamespace(s.cluster.Namespace), client.MatchingLabels{
		clusterv1.ClusterNameLabel: s.cluster.Name,
	}, client.HasLabels{clusterv1.MachineControlPlaneLabel}); err != nil {
		return nil, err
	}
	out, others := collections.Machines{}, []string{}
	for i := range list.Items {
		m := &list.Items[i]
		switch why := notOurs(s.controlPlane, s.cluster, m); {
		case why == "":
			out.Insert(m)
		case named(s.controlPlane, s.cluster):
			others = append(others, why)
		}
	}
	slices.Sort(others)
	s.mixed = strings.Join(others, "; ")
	return out, nil
}

// named is true if the Cluster references the control plane.
func named(controlPlane *controlplanev1.CapstanControlPlane, cluster *clusterv1.Cluster) bool {
	ref := cluster.Spec.ControlPlaneRef
	return ref.GroupKind() == controlPlaneKind && ref.Name == controlPlane.Name
}

// controls says whether the control plane is the controller of an object. A reference may have an older version, or the
// UID that the control plane had before it was restored.
func controls(controlPlane *controlplanev1.CapstanControlPlane, obj metav1.Object) bool {
	return metav1.IsControlledBy(obj, controlPlane) || util.IsControlledBy(obj, controlPlane, controlPlaneKind)
}

// notOurs is why a Machine with a control plane's labels does not belong to it, and what to do; "" when it does.
func notOurs(controlPlane *controlplanev1.CapstanControlPlane, cluster *clusterv1.Cluster, m *clusterv1.Machine) string {
	controller, ref := metav1.GetControllerOfNoCopy(m), m.Spec.Bootstrap.ConfigRef
	switch {
	case controls(controlPlane, m):
		return ""
	case controller != nil:
		return fmt.Sprintf("Machine %s has the label %s and is controlled by the %s %s: remove the label or the Machine", m.Name, clusterv1.MachineControlPlaneLabel, controller.Kind, controller.Name)
	case m.Spec.ClusterName != cluster.Name:
		return fmt.Sprintf("Machine %s has the label of the Cluster %s and spec.clusterName %s: correct the label", m.Name, cluster.Name, m.Spec.ClusterName)
	case !named(controlPlane, cluster):
		return fmt.Sprintf("Machine %s belongs to the control plane that the Cluster names, %s", m.Name, cluster.Spec.ControlPlaneRef.Name)
	case ref.APIGroup != bootstrapv1.GroupVersion.Group || ref.Kind != "CapstanConfig":
		return fmt.Sprintf("Machine %s has no owner and bootstrap.configRef of kind %q; only Machines with a CapstanConfig can be adopted: remove the label %s or the Machine", m.Name, ref.Kind, clusterv1.MachineControlPlaneLabel)
	}
	return ""
}

// notAdoptable is why a Machine without a reference cannot be given one; "" when it can. The rule is KubeadmControlPlane's.
func notAdoptable(controlPlane *controlplanev1.CapstanControlPlane, m *clusterv1.Machine) string {
	wanted, errWanted := semver.ParseTolerant(controlPlane.Spec.Version)
	found, errFound := semver.ParseTolerant(m.Spec.Version)
	if errWanted != nil || errFound != nil || util.IsSupportedVersionSkew(wanted, found) {
		return ""
	}
	return fmt.Sprintf("Machine %s has no owner and Kubernetes %s, and can only be adopted within one minor version of spec.version %s: set spec.version to one that is near", m.Name, m.Spec.Version, controlPlane.Spec.Version)
}

// reconcileOwnership gives Machines that have lost their reference, or have an outdated one, the right one. s.mixed says
// why nothing can be decided about Machines then.
func (r *Reconciler) reconcileOwnership(ctx context.Context, s *scope) error {
	if len(s.machines) == 0 && s.initialized() {
		return r.findUnlabelled(ctx, s)
	}
	ref, lost := controllerRef(s.controlPlane), []*clusterv1.Machine{}
	for _, m := range s.machines.SortedByCreationTimestamp() {
		if !m.DeletionTimestamp.IsZero() || util.HasExactOwnerRef(m.OwnerReferences, ref) {
			continue
		}
		if why := notAdoptable(s.controlPlane, m); why != "" && metav1.GetControllerOfNoCopy(m) == nil {
			s.mixed = joinNonEmpty(s.mixed, why)
			continue
		}
		lost = append(lost, m)
	}
	if len(lost) == 0 {
		return nil
	}
	// Live: the garbage collector may have taken the references away because the control plane is being deleted.
	live := &controlplanev1.CapstanControlPlane{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(s.controlPlane), live); err != nil {
		return client.IgnoreNotFound(err)
	}
	if live.UID != s.controlPlane.UID || !live.DeletionTimestamp.IsZero() {
		return nil // An event follows.
	}
	for _, m := range lost {
		if err := r.own(ctx, m, ref); err != nil {
			return fmt.Errorf("cannot adopt the Machine %s: %w", m.Name, err)
		}
		r.event(s, corev1.EventTypeNormal, "Adopted", "Adopt", "Adopted Machine %s", m.Name)
	}
	return nil
}

// own writes a reference, in the place of an outdated one to the same owner, unless somebody else has written meanwhile.
func (r *Reconciler) own(ctx context.Context, obj client.Object, ref metav1.OwnerReference) error {
	before := obj.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy has the type of the original.
	obj.SetOwnerReferences(util.EnsureOwnerRef(slices.Clone(obj.GetOwnerReferences()), ref))
	return r.Client.Patch(ctx, obj, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// everyMachine returns all Machines of the cluster from the API server, also those without labels and owners.
func (r *Reconciler) everyMachine(ctx context.Context, s *scope) ([]clusterv1.Machine, error) {
	list := &clusterv1.MachineList{}
	if err := r.LiveClient.List(ctx, list, client.InNamespace(s.cluster.Namespace)); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(m clusterv1.Machine) bool { return m.Spec.ClusterName != s.cluster.Name }), nil
}

// findUnlabelled looks for control plane Machines that have lost their labels, before it is said that all are gone.
func (r *Reconciler) findUnlabelled(ctx context.Context, s *scope) error {
	machines, err := r.everyMachine(ctx, s)
	if err != nil {
		return err
	}
	for i := range machines {
		if controls(s.controlPlane, &machines[i]) {
			s.mixed = joinNonEmpty(s.mixed, fmt.Sprintf("Machine %s belongs to this control plane and lacks its labels: set %s=%s and %s", machines[i].Name, clusterv1.ClusterNameLabel, s.cluster.Name, clusterv1.MachineControlPlaneLabel))
		}
	}
	return nil
}

// machineOf is the Machine that an etcd member may run on, whatever labels and owner it has; "" when there is none.
func machineOf(machines []clusterv1.Machine, member string) string {
	for i := range machines {
		m := &machines[i]
		if m.Name == member || slices.Contains(namesOf(m), member) {
			return m.Name
		}
	}
	for i := range machines {
		if m := &machines[i]; util.IsControlPlaneMachine(m) && len(namesOf(m)) == 0 && m.Spec.Bootstrap.DataSecretName != nil {
			return m.Name
		}
	}
	return ""
}

// ownSecret makes the control plane the controller of a Secret of its cluster, so that it moves and goes with it. As with
// KubeadmControlPlane the type tells whose a Secret is: Cluster API makes them with its own type, and what a user
// provides has another one. A Secret with another controller stays as it is.
func (r *Reconciler) ownSecret(ctx context.Context, s *scope, existing *corev1.Secret) error {
	ref := controllerRef(s.controlPlane)
	if existing.Type != clusterv1.ClusterSecretType || util.HasExactOwnerRef(existing.OwnerReferences, ref) {
		return nil
	}
	if metav1.GetControllerOfNoCopy(existing) != nil && !controls(s.controlPlane, existing) {
		return nil
	}
	if err := r.own(ctx, existing, ref); err != nil {
		return fmt.Errorf("cannot adopt the secret %s: %w", existing.Name, err)
	}
	return nil
}

// ownSecrets is ownSecret for all that are there, before the control plane goes.
func (r *Reconciler) ownSecrets(ctx context.Context, s *scope) error {
	names := []string{bootstrap.EncryptionSecretName(s.cluster.Name), secret.Name(s.cluster.Name, secret.Kubeconfig)}
	for _, c := range bootstrap.Certificates(s.controlPlane.Spec.Config.Cluster) {
		if !c.External {
			names = append(names, secret.Name(s.cluster.Name, c.Purpose))
		}
	}
	for _, name := range names {
		existing, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.cluster.Namespace, Name: name})
		if err != nil {
			return err
		}
		if existing == nil {
			continue
		}
		if err := r.ownSecret(ctx, s, existing); err != nil {
			return err
		}
	}
	return nil
}

func joinNonEmpty(parts ...string) string {
	return join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }))
}

package controlplane

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
)

// Backup tools such as Velero restore objects without their owner references. So labels determine the Machines of a control
// plane, as with KubeadmControlPlane, and the references are written again.

// ownMachines returns the Machines of a control plane. s.Ambiguous names those that have the labels and belong to another
// owner.
func (r *objects) ownMachines(ctx context.Context, c client.Reader, s *scope) (collections.Machines, error) {
	list := &clusterv1.MachineList{}
	if err := c.List(ctx, list, client.InNamespace(s.Cluster.Namespace), client.MatchingLabels{
		clusterv1.ClusterNameLabel: s.Cluster.Name,
	}, client.HasLabels{clusterv1.MachineControlPlaneLabel}); err != nil {
		return nil, err
	}
	out, others := collections.Machines{}, []string{}
	for i := range list.Items {
		m := &list.Items[i]
		switch why := model.WhyNotOwned(s.Object, s.Cluster, m); {
		case why == "":
			out.Insert(m)
		case model.IsReferenced(s.Object, s.Cluster):
			others = append(others, why)
		}
	}
	slices.Sort(others)
	s.Ambiguous = strings.Join(others, "; ")
	return out, nil
}

// adoption is the step that restores owner references of Machines.
type adoption struct{ *objects }

// reconcile writes the owner reference of Machines without one or with an outdated one. s.Ambiguous is the reason when the
// Machines of the control plane cannot be determined.
func (r *adoption) reconcile(ctx context.Context, s *scope) (result, error) {
	if len(s.Machines) == 0 && s.Initialized() {
		return result{}, r.findUnlabelled(ctx, s)
	}
	ref, lost := controllerRef(s.Object), []*clusterv1.Machine{}
	for _, m := range s.Machines.SortedByCreationTimestamp() {
		if !m.DeletionTimestamp.IsZero() || util.HasExactOwnerRef(m.OwnerReferences, ref) {
			continue
		}
		if why := model.WhyNotAdoptable(s.Object, m); why != "" && metav1.GetControllerOfNoCopy(m) == nil {
			s.Ambiguous = model.JoinNonEmpty(s.Ambiguous, why)
			continue
		}
		lost = append(lost, m)
	}
	if len(lost) == 0 {
		return result{}, nil
	}
	// Live: the garbage collector may have taken the references away because the control plane is being deleted.
	live := &controlplanev1.CapstanControlPlane{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(s.Object), live); err != nil {
		return result{}, client.IgnoreNotFound(err)
	}
	if live.UID != s.Object.UID || !live.DeletionTimestamp.IsZero() {
		return result{}, nil // An event follows.
	}
	for _, m := range lost {
		if err := r.own(ctx, m, ref); err != nil {
			return result{}, fmt.Errorf("cannot adopt the Machine %s: %w", m.Name, err)
		}
		r.event(s, corev1.EventTypeNormal, "Adopted", "Adopt", "Adopted Machine %s", m.Name)
		ctrl.LoggerFrom(ctx).Info("Adopted Machine", "Machine", klog.KObj(m))
	}
	return result{}, nil
}

// own writes a reference. It replaces an outdated reference to the same owner, and fails when the object was changed
// meanwhile.
func (r *objects) own(ctx context.Context, obj client.Object, ref metav1.OwnerReference) error {
	return reconciling.Change(ctx, r.Client, obj, func() {
		obj.SetOwnerReferences(util.EnsureOwnerRef(slices.Clone(obj.GetOwnerReferences()), ref))
	})
}

// everyMachine returns all Machines of the cluster from the API server, including those without labels and owners.
func (r *objects) everyMachine(ctx context.Context, s *scope) ([]clusterv1.Machine, error) {
	list := &clusterv1.MachineList{}
	if err := r.LiveClient.List(ctx, list, client.InNamespace(s.Cluster.Namespace)); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(m clusterv1.Machine) bool { return m.Spec.ClusterName != s.Cluster.Name }), nil
}

// findUnlabelled finds control plane Machines without their labels, before all Machines are reported as gone.
func (r *objects) findUnlabelled(ctx context.Context, s *scope) error {
	machines, err := r.everyMachine(ctx, s)
	if err != nil {
		return err
	}
	for i := range machines {
		if model.IsController(s.Object, &machines[i]) {
			s.Ambiguous = model.JoinNonEmpty(s.Ambiguous, fmt.Sprintf("Machine %s belongs to this control plane and lacks its labels: set %s=%s and %s", machines[i].Name, clusterv1.ClusterNameLabel, s.Cluster.Name, clusterv1.MachineControlPlaneLabel))
		}
	}
	return nil
}

// ownSecret makes the control plane the controller of a Secret of its cluster, so that it is moved and deleted with it. As
// with KubeadmControlPlane, the type determines the owner: Cluster API uses its own type, and Secrets of users have another
// one. A Secret with another controller does not change.
func (r *objects) ownSecret(ctx context.Context, s *scope, existing *corev1.Secret) error {
	ref := controllerRef(s.Object)
	if existing.Type != clusterv1.ClusterSecretType || util.HasExactOwnerRef(existing.OwnerReferences, ref) {
		return nil
	}
	if metav1.GetControllerOfNoCopy(existing) != nil && !model.IsController(s.Object, existing) {
		return nil
	}
	if err := r.own(ctx, existing, ref); err != nil {
		return fmt.Errorf("cannot adopt the secret %s: %w", existing.Name, err)
	}
	return nil
}

// ownSecrets owns all existing Secrets before the control plane is deleted.
func (r *objects) ownSecrets(ctx context.Context, s *scope) error {
	names := []string{bootstrap.EncryptionSecretName(s.Cluster.Name), secret.Name(s.Cluster.Name, secret.Kubeconfig)}
	for _, c := range bootstrap.Certificates(s.Object.Spec.Config.Cluster) {
		if !c.External {
			names = append(names, secret.Name(s.Cluster.Name, c.Purpose))
		}
	}
	for _, name := range names {
		existing, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: name})
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

package controlplane

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
)

// Backup tools such as Velero restore objects without their owner references. So labels determine the Machines of a control
// plane, as with KubeadmControlPlane, and the references are written again.

// adoption is the step that restores owner references of Machines.
type adoption struct {
	*clients
	*machineReader
	*recorder
}

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
		if err := reconciling.Own(ctx, r.Client, m, ref); err != nil {
			return result{}, fmt.Errorf("cannot adopt the Machine %s: %w", m.Name, err)
		}
		r.event(s, corev1.EventTypeNormal, "Adopted", "Adopt", "Adopted Machine %s", m.Name)
		ctrl.LoggerFrom(ctx).Info("Adopted Machine", "Machine", klog.KObj(m))
	}
	return result{}, nil
}

// findUnlabelled finds control plane Machines without their labels, before all Machines are reported as gone.
func (r *adoption) findUnlabelled(ctx context.Context, s *scope) error {
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

package controlplane

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
)

// The first Machine of a cluster starts its etcd, so two of them would be two clusters. Two managers may both act as the
// leader for a while, and each may be stopped between any two steps. So the name of the first Machine is recorded on the
// control plane with compare-and-swap before any object has it, and every manager uses that name.

// reserveFirst returns the name of the first Machine of the cluster, or of a restored one. It never changes for the same
// cluster, even when the Machine is created again. otherwise is used when no name is recorded.
func (r *machines) reserveFirst(ctx context.Context, s *scope, otherwise string) (string, error) {
	live := &controlplanev1.CapstanControlPlane{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(s.Object), live); err != nil {
		return "", err
	}
	if live.UID != s.Object.UID {
		return "", apierrors.NewConflict(controlplanev1.GroupVersion.WithResource("capstancontrolplanes").GroupResource(), live.Name, fmt.Errorf("it is another one"))
	}
	wanted := controlplanev1.FirstMachine{Name: otherwise, Restore: s.RestoredAs()}
	if found := controlplanev1.GetFirstMachine(live); found.Name != "" && found.Restore == wanted.Restore {
		return found.Name, nil
	}
	value, err := json.Marshal(wanted)
	if err != nil {
		return "", err
	}
	before := live.DeepCopy()
	metav1.SetMetaDataAnnotation(&live.ObjectMeta, controlplanev1.FirstMachineAnnotation, string(value))
	if err := r.Client.Patch(ctx, live, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return "", fmt.Errorf("cannot reserve the name of the first Machine: %w", err)
	}
	metav1.SetMetaDataAnnotation(&s.Object.ObjectMeta, controlplanev1.FirstMachineAnnotation, string(value))
	return wanted.Name, nil
}

// checkName makes sure that the name does not belong to a Machine of another owner, which an apply would change.
func (r *machines) checkName(ctx context.Context, s *scope, name string) error {
	m := &clusterv1.Machine{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: name}, m); err != nil {
		return client.IgnoreNotFound(err)
	}
	if why := model.WhyNotOwned(s.Object, s.Cluster, m); why != "" || !util.IsControlPlaneMachine(m) && !model.IsController(s.Object, m) {
		return fmt.Errorf("the name %s is taken by a Machine that does not belong to this control plane: delete that Machine, or remove the annotation %s", name, controlplanev1.FirstMachineAnnotation)
	}
	return nil
}

// checkData makes sure that no bootstrap data of a former machine has the name. The bootstrap provider compares only the names of owners,
// because UIDs change with a move or a restore. The new CapstanConfig would therefore get the data of the former one, if it came before
// the garbage collector.
func (r *machines) checkData(ctx context.Context, s *scope, name string) error {
	data := &corev1.Secret{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: name}, data); err != nil {
		return client.IgnoreNotFound(err)
	}
	if owner := metav1.GetControllerOfNoCopy(data); owner != nil {
		return fmt.Errorf("the Secret %s still has the bootstrap data of a former %s: the garbage collector has to delete it first", name, owner.Kind)
	}
	return nil
}

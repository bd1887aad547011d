package controlplane

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/nodedrain"
	"capstan.dev/capstan/internal/stored"
)

// An update in place has these writes, in this order:
//
//  1. Machine: the annotation of Cluster API, the record, and the new version, in one patch.
//  2. CapstanConfig: the annotation and the new spec. The bootstrap provider renders the data of the update.
//  3. CapstanMachine: the annotation and the new spec. The infrastructure provider calls the host only with the data of 2.
//  4. After the success: the Node becomes schedulable, and the success is recorded on the Machine. Then the annotations of
//     CapstanMachine and CapstanConfig are removed, and those of the Machine at last.
//
// After an interruption, the records on the Machine make the next reconciliation continue with the first missing write.

// updates carries out updates in place.
type updates struct {
	*clients
	*machineReader
	*recorder
}

// updateRetry is the interval at which the progress of an update is read if no event announces it.
const updateRetry = 5 * time.Second

// again returns the time after which an update has to be looked at without an event; 0 without an update.
func (r *updates) again(s *scope) time.Duration {
	for _, u := range s.Updates {
		if u != nil && !u.Failed() {
			return updateRetry
		}
	}
	return 0
}

// advance does the next writes of an update. A conflict means that an object has changed, which is an event.
func (r *updates) advance(ctx context.Context, s *scope, i *model.Instance) (result, error) {
	parts := s.parts[i.Name()]
	if parts.config == nil || parts.infraMachine == nil {
		return result{blocked: fmt.Sprintf("Machine %s cannot be updated in place, because its CapstanConfig or its infrastructure machine is missing", i.Name()), requeueAfter: updateRetry}, nil
	}
	next := r.write
	if i.Update != nil && i.Update.Phase == infrav1.UpdateSucceeded {
		next = r.finish
	}
	out, err := next(ctx, s, i, parts.config, parts.infraMachine)
	if apierrors.IsConflict(err) {
		return requeueAfter(updateRetry), nil
	}
	return out, err
}

// write writes the desired state of a Machine.
func (r *updates) write(ctx context.Context, s *scope, i *model.Instance, config *bootstrapv1.CapstanConfig, infraMachine *unstructured.Unstructured) (result, error) {
	if err := r.mark(ctx, s, i, config); err != nil {
		return result{}, err
	}
	if ptr.Deref(s.Object.Spec.Rollout.Strategy.DrainBeforeUpdate, false) {
		if waits, err := r.drain(ctx, s, i.Machine); err != nil || waits != "" {
			return result{blocked: waits, requeueAfter: updateRetry}, err
		}
	}
	if err := r.writeConfig(ctx, s, config); err != nil {
		return result{}, err
	}
	return requeueAfter(updateRetry), r.writeInfraMachine(ctx, s, infraMachine)
}

// mark records the update on the Machine. From then on it counts as updating, with its former version and encryption.
func (r *updates) mark(ctx context.Context, s *scope, i *model.Instance, config *bootstrapv1.CapstanConfig) error {
	machine := i.Machine
	err := r.change(ctx, machine, func() {
		if !model.Updates(machine) {
			metav1.SetMetaDataAnnotation(&machine.ObjectMeta, controlplanev1.UpdateFromAnnotation, machine.Spec.Version)
		}
		if model.HasOtherEncryption(s.Object, machine, config) {
			metav1.SetMetaDataAnnotation(&machine.ObjectMeta, controlplanev1.UpdateEncryptionAnnotation, "")
		}
		metav1.SetMetaDataAnnotation(&machine.ObjectMeta, clusterv1.UpdateInProgressAnnotation, "")
		machine.Spec.Version = model.WantedVersion(s.Object)
	})
	if err != nil {
		return fmt.Errorf("cannot begin the update of the Machine %s: %w", machine.Name, err)
	}
	if i.Update == nil {
		r.event(s, corev1.EventTypeNormal, "UpdateStarted", "Update", "Updating Machine %s in place from %s to %s", machine.Name, model.VersionOf(machine), machine.Spec.Version)
		ctrl.LoggerFrom(ctx).Info("Updating Machine in place", "Machine", klog.KObj(machine), "from", model.VersionOf(machine), "to", machine.Spec.Version)
	}
	return nil
}

func (r *updates) writeConfig(ctx context.Context, s *scope, config *bootstrapv1.CapstanConfig) error {
	if err := r.change(ctx, config, func() {
		metav1.SetMetaDataAnnotation(&config.ObjectMeta, clusterv1.UpdateInProgressAnnotation, "")
		config.Spec = model.UpdatedConfig(s.Object, config.Spec)
	}); err != nil {
		return fmt.Errorf("cannot change the CapstanConfig %s: %w", config.Name, err)
	}
	return nil
}

// writeInfraMachine writes the spec of the template, without the fields that identify the machine, and the name of the
// template.
func (r *updates) writeInfraMachine(ctx context.Context, s *scope, obj *unstructured.Unstructured) error {
	machine, parts := capstanMachine(obj), model.Parts{}
	if machine == nil {
		return fmt.Errorf("the %s %s cannot be updated in place", obj.GetKind(), obj.GetName())
	}
	if err := r.desiredInfrastructure(ctx, s, obj, &parts); err != nil {
		return err
	}
	if err := r.change(ctx, machine, func() {
		metav1.SetMetaDataAnnotation(&machine.ObjectMeta, clusterv1.UpdateInProgressAnnotation, "")
		if parts.Desired != nil {
			ref := s.Object.Spec.MachineTemplate.Spec.InfrastructureRef
			metav1.SetMetaDataAnnotation(&machine.ObjectMeta, clusterv1.TemplateClonedFromNameAnnotation, ref.Name)
			metav1.SetMetaDataAnnotation(&machine.ObjectMeta, clusterv1.TemplateClonedFromGroupKindAnnotation, ref.GroupKind().String())
			machine.Spec = inplace.KeepIdentity(machine.Spec, *parts.Desired)
		}
	}); err != nil {
		return fmt.Errorf("cannot change the CapstanMachine %s: %w", machine.Name, err)
	}
	return nil
}

// finish removes the annotations after a success. The records of the Machine go last. The Node comes first, because without a
// connection only the Node itself shows that a drain has cordoned it.
func (r *updates) finish(ctx context.Context, s *scope, i *model.Instance, config *bootstrapv1.CapstanConfig, infraMachine *unstructured.Unstructured) (result, error) {
	if s.client == nil {
		return result{blocked: "there is no connection to the workload cluster to make the Node of Machine " + i.Name() + " schedulable", requeueAfter: updateRetry}, nil
	}
	if err := r.release(ctx, s, i.Machine); err != nil {
		return result{}, err
	}
	from := model.VersionOf(i.Machine)
	if err := r.removeMarks(ctx, i.Machine, config, infraMachine); err != nil {
		return result{}, fmt.Errorf("cannot finish the update of the Machine %s: %w", i.Name(), err)
	}
	updated.WithLabelValues(s.Object.Namespace, s.Object.Name).Inc()
	r.event(s, corev1.EventTypeNormal, "Updated", "Update", "Updated Machine %s in place from %s to %s", i.Name(), from, i.Machine.Spec.Version)
	ctrl.LoggerFrom(ctx).Info("Updated Machine in place", "Machine", klog.KObj(i.Machine), "from", from, "to", i.Machine.Spec.Version)
	return requeueAfter(updateRetry), nil
}

// removeMarks records the success and removes all annotations of the update.
func (r *updates) removeMarks(ctx context.Context, machine *clusterv1.Machine, config *bootstrapv1.CapstanConfig, infraMachine *unstructured.Unstructured) error {
	if err := r.change(ctx, machine, func() {
		metav1.SetMetaDataAnnotation(&machine.ObjectMeta, controlplanev1.UpdateSucceededAnnotation, "")
	}); err != nil {
		return err
	}
	for _, obj := range []client.Object{infraMachine, config, machine} {
		if err := r.change(ctx, obj, func() {
			annotations := obj.GetAnnotations()
			delete(annotations, clusterv1.UpdateInProgressAnnotation)
			delete(annotations, controlplanev1.UpdateFromAnnotation)
			delete(annotations, controlplanev1.UpdateHeldAnnotation)
			delete(annotations, controlplanev1.UpdateEncryptionAnnotation)
			delete(annotations, controlplanev1.UpdateSucceededAnnotation)
			obj.SetAnnotations(annotations)
		}); err != nil {
			return err
		}
	}
	return nil
}

// drain empties the Node of a Machine, and returns the reason of a wait.
func (r *updates) drain(ctx context.Context, s *scope, machine *clusterv1.Machine) (waits string, err error) {
	if s.client == nil {
		return "there is no connection to the workload cluster for the drain of Machine " + machine.Name, nil
	}
	ctx, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	limits := s.Object.Spec.MachineTemplate.Spec.Deletion
	return nodedrain.Drain{
		Management: r.LiveClient, Workload: s.client, Cluster: s.Cluster, Machine: machine, Now: s.Now,
		DrainTimeout: limits.NodeDrainTimeoutSeconds, DetachTimeout: limits.NodeVolumeDetachTimeoutSeconds,
	}.Run(ctx)
}

// release uncordons the Node of a Machine if its update has cordoned it.
func (r *updates) release(ctx context.Context, s *scope, machine *clusterv1.Machine) error {
	if !machine.Status.NodeRef.IsDefined() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	return nodedrain.Release(ctx, s.client, machine.Status.NodeRef.Name)
}

// releaseStopped uncordons the Nodes of Machines whose update has failed or was refused: they run as before. An update that waits for capacity
// keeps its Node drained: the host begins it as soon as there is room.
func (r *updates) releaseStopped(ctx context.Context, s *scope) error {
	if s.client == nil {
		return nil // The connection is an event.
	}
	var errs []error
	for _, i := range s.Fleet().Instances {
		if i.Update != nil && i.Update.Written && i.Update.Stopped() {
			errs = append(errs, r.release(ctx, s, i.Machine))
		}
	}
	return errors.Join(errs...)
}

// hold keeps hosts from beginning updates that wait while etcd would lose its quorum, and ends this. It comes before the steps that let
// members go: after a new hold these wait for the next reconciliation. No member leaves before the infrastructure provider has confirmed the
// hold, because its call to a host can be on the way.
func (r *updates) hold(ctx context.Context, s *scope) (out result, err error) {
	f := s.Fleet()
	for n := range f.Instances {
		i := &f.Instances[n]
		holds := f.Holds(i)
		if _, held := i.Machine.Annotations[controlplanev1.UpdateHeldAnnotation]; held == holds {
			continue
		}
		if err := r.change(ctx, i.Machine, func() {
			if holds {
				metav1.SetMetaDataAnnotation(&i.Machine.ObjectMeta, controlplanev1.UpdateHeldAnnotation, "")
			} else {
				delete(i.Machine.Annotations, controlplanev1.UpdateHeldAnnotation)
			}
		}); err != nil {
			return out, fmt.Errorf("cannot hold or release the update of the Machine %s: %w", i.Name(), err)
		}
		if holds {
			out.merge(result{stop: true, requeueAfter: time.Second})
		}
		ctrl.LoggerFrom(ctx).Info("Changed whether the waiting update of the Machine may begin", "Machine", klog.KObj(i.Machine), "held", holds)
	}
	return out, nil
}

// change patches an object if the change has an effect. It fails when the object was changed since it was read.
func (r *updates) change(ctx context.Context, obj client.Object, change func()) error {
	before, ok := obj.DeepCopyObject().(client.Object)
	if !ok {
		return fmt.Errorf("%T is no object", obj)
	}
	change()
	if stored.Equal(before, obj) {
		return nil
	}
	return r.Client.Patch(ctx, obj, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

package machine

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	runtimev1 "sigs.k8s.io/cluster-api/api/runtime/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/shorten"
)

// An update in place begins with Cluster API's annotation of an update in progress, which the owner of the Machine sets. A
// tenant can set it as well. The update then asks for nothing that the specs do not contain, the decisions of package inplace
// limit it, and the host checks it again.

// updateRequest is the update that the specs request.
type updateRequest struct {
	spec *hostpb.MachineSpec
	// data is the Secret with the data of the update.
	data *corev1.Secret
	id   string
}

// update drives an update in place and shows the host's report of it.
func (r *Reconciler) update(ctx context.Context, s *scope, host *connections.Host, observed *hostpb.Machine) error {
	m, report := s.capstan, observed.GetStatus().GetUpdate()
	if _, wanted := m.Annotations[clusterv1.UpdateInProgressAnnotation]; !wanted {
		return r.withoutUpdate(ctx, s, report)
	}
	before := m.Status.Update
	mirrorUpdate(&m.Status.Update, report) // Perhaps an earlier update, whose end its owner waits for while the next one cannot begin.
	if why := uncommitted(s.machine); why != "" {
		updating(m, waitingReason(s.machine), "%s", why)
		return nil // The change of the object is an event.
	}
	request, why, err := r.updateRequest(ctx, s, observed.GetSpec())
	if err != nil {
		return err
	}
	if why != "" {
		updating(m, waitingReason(s.machine), "%s", why)
		return nil // The Secret is an event.
	}
	if report.GetId() != request.id {
		if held, err := r.held(ctx, s); held || err != nil {
			return err // The change of the Machine is an event.
		}
		if report, err = r.beginUpdate(ctx, s, host, observed, request); err != nil || report == nil {
			return err
		}
	}
	r.unplaced.Delete(client.ObjectKeyFromObject(m))
	r.showUpdate(m, before, request, report)
	return nil
}

// held reports whether the control plane lets its Machine wait, because etcd would lose its quorum. A cached Machine can be older than that.
func (r *Reconciler) held(ctx context.Context, s *scope) (bool, error) {
	if !util.IsControlPlaneMachine(s.machine) {
		return false, nil
	}
	machine := &clusterv1.Machine{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(s.machine), machine); err != nil {
		return false, err
	}
	held := metav1.HasAnnotation(machine.ObjectMeta, controlplanev1.UpdateHeldAnnotation)
	if held {
		updating(s.capstan, infrav1.UpdateHeldReason, "Waiting until etcd has a quorum without this machine: the control plane removes the annotation %s from the Machine then", controlplanev1.UpdateHeldAnnotation)
	}
	return held, nil
}

// waitingReason is the reason of an update that cannot begin yet. For one that is held it confirms the hold.
func waitingReason(m *clusterv1.Machine) string {
	if metav1.HasAnnotation(m.ObjectMeta, controlplanev1.UpdateHeldAnnotation) {
		return infrav1.UpdateHeldReason
	}
	return infrav1.WaitingForUpdateReason
}

// uncommitted returns why the specs are not complete yet, or "". The updater of a MachineSet writes several objects; the pending
// hook is its last write. The updater of a machine pool writes the CapstanMachine only. Other updaters write the Machine before
// the CapstanConfig, whose generation the Secret of the update has.
func uncommitted(m *clusterv1.Machine) string {
	if isPooled(m) {
		return ""
	}
	if _, marked := m.Annotations[clusterv1.UpdateInProgressAnnotation]; !marked {
		return "Waiting for the annotation of the update on the Machine"
	}
	_, moving := m.Annotations[clusterv1.PendingAcknowledgeMoveAnnotation]
	if owner := metav1.GetControllerOf(m); owner != nil && owner.Kind == "MachineSet" && (moving || !hookPending(m)) {
		return "Waiting for the MachineSet to write the desired state"
	}
	ref := m.Spec.Bootstrap.ConfigRef
	if ref.APIGroup != bootstrapv1.GroupVersion.Group || ref.Kind != bootstrapv1.ConfigKind {
		return fmt.Sprintf("The Machine's bootstrap configuration is a %s, and only a CapstanConfig has the data of an update: delete the Machine to replace it", ref.Kind)
	}
	return ""
}

// hookPending reports whether core waits for the hook UpdateMachine of the Machine.
func hookPending(m *clusterv1.Machine) bool {
	for hook := range strings.SplitSeq(m.Annotations[runtimev1.PendingHooksAnnotation], ",") {
		if hook == "UpdateMachine" {
			return true
		}
	}
	return false
}

// updateRequest reads the spec and the data of the update. While the data is not complete, it returns the reason.
func (r *Reconciler) updateRequest(ctx context.Context, s *scope, current *hostpb.MachineSpec) (*updateRequest, string, error) {
	version := kubernetesVersion(s)
	secret, why, err := r.updateSecret(ctx, s, version)
	if err != nil || why != "" {
		return nil, why, err
	}
	m := s.capstan
	spec := proto.CloneOf(current)
	spec.Cpus, spec.MemoryBytes, spec.DiskBytes = m.Spec.CPUs, memory(m), diskSize(m)
	spec.PidsLimit = cmp.Or(m.Spec.PidsLimit, infrav1.DefaultMachinePidsLimit)
	spec.KubernetesVersion = version
	return &updateRequest{spec: spec, data: secret, id: updateID(m, spec, secret)}, "", nil
}

// updateSecret reads the data of the update live, or returns why it is not complete.
func (r *Reconciler) updateSecret(ctx context.Context, s *scope, version string) (*corev1.Secret, string, error) {
	name, err := r.dataSecretName(ctx, s)
	if err != nil {
		return nil, "", err
	}
	name = bootstrapv1.UpdateSecretName(name)
	missing := fmt.Sprintf("Waiting for Secret %s with the data of the update: see the condition %s of the CapstanConfig", name, bootstrapv1.UpdateDataAvailableCondition)
	secret := &corev1.Secret{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: s.capstan.Namespace, Name: name}, secret); err != nil {
		return nil, missing, client.IgnoreNotFound(err)
	}
	owner := metav1.GetControllerOf(secret)
	if owner == nil || owner.Kind != bootstrapv1.ConfigKind || len(secret.Data[bootstrapKey]) == 0 ||
		secret.Annotations[bootstrapv1.KubernetesVersionAnnotation] != version {
		return nil, missing, nil
	}
	config := &bootstrapv1.CapstanConfig{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: s.capstan.Namespace, Name: owner.Name}, config); err != nil {
		return nil, missing, client.IgnoreNotFound(err)
	}
	_, marked := config.Annotations[clusterv1.UpdateInProgressAnnotation]
	if !marked && !isPooled(s.machine) || secret.Annotations[bootstrapv1.ConfigGenerationAnnotation] != strconv.FormatInt(config.Generation, 10) {
		return nil, missing, nil
	}
	return secret, "", nil
}

// updateID depends on everything that the update sets, and on the attempt.
func updateID(m *infrav1.CapstanMachine, spec *hostpb.MachineSpec, secret *corev1.Secret) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d\n%d\n%d\n%d\n%s\n%s\n%s", spec.GetCpus(), spec.GetMemoryBytes(), spec.GetDiskBytes(), spec.GetPidsLimit(),
		spec.GetKubernetesVersion(), secret.Annotations[bootstrapv1.UpdateIDAnnotation], m.Annotations[infrav1.MachineUpdateAttemptAnnotation]))
	return hex.EncodeToString(sum[:16])
}

// beginUpdate calls the host, unless the machine must be replaced for the change or the host has no room for it. The report is
// nil if the update has not begun.
func (r *Reconciler) beginUpdate(ctx context.Context, s *scope, host *connections.Host, observed *hostpb.Machine, request *updateRequest) (*hostpb.UpdateStatus, error) {
	m := s.capstan
	current := observed.GetSpec()
	if change := inplace.Version(current.GetKubernetesVersion(), request.spec.GetKubernetesVersion()); change.Verdict == inplace.Replace {
		r.refuseUpdate(m, infrav1.UpdateRefusedReason, change.String())
		return nil, nil
	}
	if request.spec.GetDiskBytes() < current.GetDiskBytes() {
		r.refuseUpdate(m, infrav1.UpdateRefusedReason, fmt.Sprintf("disk.size: needs another machine, because its disk has %d bytes and cannot shrink", current.GetDiskBytes()))
		return nil, nil
	}
	if image(m) != current.GetImage() {
		r.refuseUpdate(m, infrav1.UpdateRefusedReason, fmt.Sprintf("image: needs another machine, because this one has the image %s", current.GetImage()))
		return nil, nil
	}
	if why := r.reserve(m, host, current, request.spec); why != "" {
		r.refuseUpdate(m, infrav1.NoCapacityReason, why)
		return nil, nil // Free memory is an event.
	}
	managementCluster, err := connections.ManagementCluster(ctx, r.Client)
	if err != nil {
		host.Release(m.Spec.ID)
		return nil, err
	}
	updated, err := host.UpdateMachine(ctx, &hostpb.UpdateMachineRequest{
		Spec: request.spec, UpdateId: request.id, Data: request.data.Data[bootstrapKey], ManagementCluster: managementCluster,
	})
	if err != nil {
		host.Release(m.Spec.ID)
		return nil, r.updateRefused(m, host, err, request.spec.GetDiskBytes() > current.GetDiskBytes())
	}
	r.recorder.Eventf(m, nil, corev1.EventTypeNormal, "UpdateStarted", "Update", "Host %s updates the machine in place", host.Name())
	return updated.GetStatus().GetUpdate(), nil
}

// reserve promises the additional memory of the update to this machine, so that no other machine gets it. It returns why the
// host has no room, or "".
func (r *Reconciler) reserve(m *infrav1.CapstanMachine, host *connections.Host, current, desired *hostpb.MachineSpec) string {
	r.placing.Lock()
	defer r.placing.Unlock()
	growth := desired.GetMemoryBytes() - current.GetMemoryBytes()
	if growth <= 0 {
		return ""
	}
	r.unplaced.Store(client.ObjectKeyFromObject(m), nil) // Before the comparison: room that appears after it is an event.
	if free := host.FreeMemory(); free < growth {
		return fmt.Sprintf("memory: host %s has %d bytes left, and the machine needs %d more", host.Name(), max(free, 0), growth)
	}
	host.PromiseGrowth(m.Spec.ID, desired.GetMemoryBytes())
	return ""
}

// refusedGrowth is the remedy for a refused growth of the disk. The spec has the larger size already, and the decisions about updates compare
// specs, so a return to the former size counts as a disk that shrinks.
const refusedGrowth = ". The update begins when the host can enlarge the disk. Without that, delete the Machine to replace it: a return to the former disk.size needs another machine too"

// updateRefused shows the refusal of a host. A refusal that another state of the host ends is tried again. grows: the update enlarges the disk.
func (r *Reconciler) updateRefused(m *infrav1.CapstanMachine, host *connections.Host, err error, grows bool) error {
	message := fmt.Sprintf("Host %s refused the update: %s", host.Name(), connections.PublicMessage(err))
	reason := refusal.Of(err).GetReason()
	if grows && (reason == hostpb.Refusal_NO_DISK_SPACE || reason == hostpb.Refusal_UNSUPPORTED) {
		message += refusedGrowth
	}
	switch {
	case reason == hostpb.Refusal_UPDATE_IN_PROGRESS:
		updating(m, infrav1.WaitingForUpdateReason, "Waiting for the previous update of the machine: %s", connections.PublicMessage(err))
		return nil // Its end is an event.
	case reason == hostpb.Refusal_OUT_OF_MEMORY:
		r.refuseUpdate(m, infrav1.NoCapacityReason, message)
		return nil // Free memory is an event.
	case reason == hostpb.Refusal_NO_DISK_SPACE:
		r.refuseUpdate(m, infrav1.NoCapacityReason, message)
	case reason == hostpb.Refusal_UNSUPPORTED:
		r.refuseUpdate(m, infrav1.UpdateRefusedReason, message)
		return nil // A capstand with other capabilities connects again.
	case connections.Code(err) == codes.InvalidArgument:
		r.refuseUpdate(m, infrav1.UpdateRefusedReason, message)
		return nil // Only another spec helps.
	case connections.Code(err) == codes.Unimplemented:
		r.refuseUpdate(m, infrav1.UpdateRefusedReason, fmt.Sprintf("The capstand of host %s does not support updates in place: install a newer version", host.Name()))
		return nil // A newer capstand connects again.
	default:
		updating(m, infrav1.WaitingForUpdateReason, "%s", message)
	}
	return fmt.Errorf("update of the machine on host %s: %s", host.Name(), connections.Message(err))
}

// refuseUpdate shows why an update has not begun, with an event when the reason is new.
func (r *Reconciler) refuseUpdate(m *infrav1.CapstanMachine, reason, message string) {
	if conditions.GetReason(m, infrav1.UpdatingCondition) != reason {
		r.recorder.Eventf(m, nil, corev1.EventTypeWarning, reason, "Update", "%s", message)
	}
	reconciling.SetCondition(m, infrav1.UpdatingCondition, metav1.ConditionFalse, reason, "%s", message)
}

func updating(m *infrav1.CapstanMachine, reason, format string, args ...any) {
	reconciling.SetCondition(m, infrav1.UpdatingCondition, metav1.ConditionTrue, reason, format, args...)
}

// notUpdating shows a machine whose owner requests no update. A machine that was never updated has no condition.
func notUpdating(m *infrav1.CapstanMachine, report *hostpb.UpdateStatus) {
	if report.GetId() == "" && !conditions.Has(m, infrav1.UpdatingCondition) {
		return
	}
	mirrorUpdate(&m.Status.Update, report)
	reconciling.SetCondition(m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.NotUpdatingReason, "")
}

// showUpdate shows the host's report of the update that the specs ask for, with an event when the update ends. before is the report of the
// last reconcile.
func (r *Reconciler) showUpdate(m *infrav1.CapstanMachine, before infrav1.MachineUpdateStatus, request *updateRequest, report *hostpb.UpdateStatus) {
	update := infrav1.MachineUpdateStatus{}
	mirrorUpdate(&update, report)
	update.KubernetesVersion, update.ObservedGeneration = request.spec.GetKubernetesVersion(), m.Generation
	update.ConfigUpdateID = request.data.Annotations[bootstrapv1.UpdateIDAnnotation]
	m.Status.Update = update
	ended := before.ID != update.ID || before.Phase != update.Phase
	switch update.Phase {
	case infrav1.UpdateSucceeded:
		reconciling.SetCondition(m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateSucceededReason, "")
		if ended {
			r.recorder.Eventf(m, nil, corev1.EventTypeNormal, infrav1.UpdateSucceededReason, "Update", "The machine was updated in place to %s", update.KubernetesVersion)
		}
	case infrav1.UpdateFailed, infrav1.UpdateRolledBack:
		message := updateFailure(update)
		reconciling.SetCondition(m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateFailedReason, "%s", message)
		if ended {
			r.recorder.Eventf(m, nil, corev1.EventTypeWarning, infrav1.UpdateFailedReason, "Update", "%s", message)
		}
	default:
		updating(m, infrav1.UpdateRunningReason, "%s", strings.Trim(cmp.Or(update.Step, "The update has not begun")+": "+update.Message, ": "))
	}
}

// updateFailure describes the end of an update and the remedy.
func updateFailure(u infrav1.MachineUpdateStatus) string {
	state := "The update failed"
	if u.Phase == infrav1.UpdateRolledBack {
		state = "The update was rolled back"
	}
	if u.Step != "" {
		state += " in step " + u.Step
	}
	return fmt.Sprintf("%s: %s. Change the spec, try again with another value of the annotation %s, or delete the Machine to replace it",
		state, cmp.Or(u.Message, "no cause was reported"), infrav1.MachineUpdateAttemptAnnotation)
}

var phaseOf = map[hostpb.UpdateStatus_Phase]infrav1.UpdatePhase{
	hostpb.UpdateStatus_PENDING: infrav1.UpdatePending, hostpb.UpdateStatus_RUNNING: infrav1.UpdateRunning,
	hostpb.UpdateStatus_SUCCEEDED: infrav1.UpdateSucceeded, hostpb.UpdateStatus_FAILED: infrav1.UpdateFailed,
	hostpb.UpdateStatus_ROLLED_BACK: infrav1.UpdateRolledBack,
}

// mirrorUpdate copies the report of a host within the limits of the API. What the object has about another update does not belong to it.
func mirrorUpdate(out *infrav1.MachineUpdateStatus, report *hostpb.UpdateStatus) {
	if report.GetId() == "" {
		return
	}
	id := shorten.To(report.GetId(), 128)
	if out.ID != id {
		*out = infrav1.MachineUpdateStatus{ID: id}
	}
	out.Phase = phaseOf[report.GetPhase()]
	out.Step, out.Message = shorten.To(report.GetStep(), 128), shorten.To(report.GetMessage(), 1024)
	out.StartTime, out.CompletionTime = metav1.Time{}, metav1.Time{}
	if t := report.GetStartedAt(); t != nil {
		out.StartTime = metav1.NewTime(t.AsTime()).Rfc3339Copy()
	}
	if t := report.GetCompletedAt(); t != nil {
		out.CompletionTime = metav1.NewTime(t.AsTime()).Rfc3339Copy()
	}
}

// updateStep lets the events of a Machine pass that matter for its CapstanMachine: its spec, the annotations of an update, and
// whether it is up to date.
func updateStep() predicate.Predicate {
	return predicate.Or(predicate.GenerationChangedPredicate{}, reconciling.FilterUpdates(func(before, after client.Object) bool {
		for _, name := range []string{clusterv1.UpdateInProgressAnnotation, clusterv1.PendingAcknowledgeMoveAnnotation, runtimev1.PendingHooksAnnotation, controlplanev1.UpdateHeldAnnotation} {
			was, had := before.GetAnnotations()[name]
			if is, has := after.GetAnnotations()[name]; had != has || was != is {
				return true
			}
		}
		return differences(before) != differences(after)
	}))
}

// differences returns the differences of a Machine from its owner that core reports.
func differences(o client.Object) string {
	m, ok := o.(*clusterv1.Machine)
	if !ok || !conditions.IsFalse(m, clusterv1.MachineUpToDateCondition) {
		return ""
	}
	return cmp.Or(conditions.GetMessage(m, clusterv1.MachineUpToDateCondition), "outdated")
}

// isUpdateData lets the Secrets with the data of updates pass.
func isUpdateData() predicate.Predicate {
	return predicate.NewPredicateFuncs(func(o client.Object) bool {
		_, ok := o.GetAnnotations()[bootstrapv1.UpdateIDAnnotation]
		return ok
	})
}

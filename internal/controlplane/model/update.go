package model

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/inplace"
)

// Update is the state of an update of a Machine in place. Its record is the annotation on the Machine; everything else is read
// from the Machine's objects, so any manager can continue it.
type Update struct {
	// Written: the Machine, its CapstanConfig and its CapstanMachine have the state that the spec demands.
	Written bool
	// begun: all objects carry the annotation, for this or a former state of the spec. The host may act.
	begun bool
	// Phase is the host's report about the present objects; "" before there is one.
	Phase infrav1.UpdatePhase
	// refused is the reason why the host does not begin. It is also set if the data of the update cannot be made.
	refused string
	// rejected: the host has refused the update, and does not begin it later by itself.
	rejected bool
	// unattended: the host does not answer or has lost the machine, or an object of the Machine is missing. Nothing ends the
	// update then, not even its deadline.
	unattended bool
	// unconfirmed: the infrastructure provider has not shown yet that it holds the update. A call to the host can be on the way.
	unconfirmed   bool
	step, message string
}

// NewUpdate returns the state of the update of a Machine; nil without one. config and infraMachine can be nil.
func NewUpdate(machine *clusterv1.Machine, config *bootstrapv1.CapstanConfig, infraMachine *infrav1.CapstanMachine, differences []inplace.Change) *Update {
	if !Updates(machine) {
		return nil
	}
	out := &Update{unattended: config == nil || isUnattended(machine, infraMachine)}
	if config == nil || infraMachine == nil {
		out.begun = true // Perhaps.
		return out
	}
	if _, succeeded := machine.Annotations[controlplanev1.UpdateSucceededAnnotation]; succeeded {
		// The other objects lose their annotations and the report.
		out.begun, out.Written, out.Phase = true, true, infrav1.UpdateSucceeded
		return out
	}
	out.begun = annotated(machine) && annotated(config) && annotated(infraMachine)
	out.Written = out.begun && machine.Spec.Version != "" && len(differences) == 0
	report := infraMachine.Status.Update
	if out.begun && isAbout(report, machine, config, infraMachine) {
		out.Phase, out.step, out.message = report.Phase, report.Step, report.Message
	}
	held := metav1.HasAnnotation(machine.ObjectMeta, controlplanev1.UpdateHeldAnnotation)
	out.unconfirmed = held && !annotations.HasPaused(infraMachine) && conditions.GetReason(infraMachine, infrav1.UpdatingCondition) != infrav1.UpdateHeldReason
	if c := conditions.Get(infraMachine, infrav1.UpdatingCondition); c != nil && (c.Reason == infrav1.UpdateRefusedReason || c.Reason == infrav1.NoCapacityReason) {
		out.refused = c.Message
		// Without the data of the present spec, the refusal is about a former one.
		out.rejected = c.Reason == infrav1.UpdateRefusedReason && c.ObservedGeneration == infraMachine.Generation && hasData(machine, config)
	} else if c := conditions.Get(config, bootstrapv1.UpdateDataAvailableCondition); c != nil && c.Status == metav1.ConditionFalse &&
		c.ObservedGeneration == config.Generation && !hasData(machine, config) {
		out.refused = c.Message
	} else if held {
		out.refused = "The update waits until etcd has a quorum without this machine"
	}
	return out
}

// isUnattended reports whether no host carries out the update of a Machine. An object that cannot be read at the moment is not missing.
func isUnattended(machine *clusterv1.Machine, infraMachine *infrav1.CapstanMachine) bool {
	if infraMachine == nil {
		reason := conditions.GetReason(machine, clusterv1.MachineInfrastructureReadyCondition)
		return reason == clusterv1.MachineInfrastructureDeletedReason || reason == clusterv1.MachineInfrastructureDoesNotExistReason
	}
	running := conditions.Get(infraMachine, infrav1.MachineRunningCondition)
	return running != nil && (running.Status == metav1.ConditionUnknown || running.Reason == infrav1.MachineLostReason)
}

// Updates reports whether an update in place of a Machine was recorded and is not finished.
func Updates(machine *clusterv1.Machine) bool {
	_, ok := machine.Annotations[controlplanev1.UpdateFromAnnotation]
	return ok
}

func annotated(obj metav1.Object) bool {
	_, ok := obj.GetAnnotations()[clusterv1.UpdateInProgressAnnotation]
	return ok
}

// hasData reports whether the data of an update was made for the present objects.
func hasData(machine *clusterv1.Machine, config *bootstrapv1.CapstanConfig) bool {
	data := config.Status.Update
	return data.ID != "" && data.ObservedGeneration == config.Generation && data.KubernetesVersion == machine.Spec.Version
}

// isAbout reports whether a host's report is about the present objects, not about a former update.
func isAbout(report infrav1.MachineUpdateStatus, machine *clusterv1.Machine, config *bootstrapv1.CapstanConfig, infraMachine *infrav1.CapstanMachine) bool {
	return hasData(machine, config) && report.ConfigUpdateID == config.Status.Update.ID && report.KubernetesVersion == machine.Spec.Version && report.ObservedGeneration == infraMachine.Generation
}

// Failed reports whether the update has ended without success.
func (u *Update) Failed() bool {
	return u != nil && (u.Phase == infrav1.UpdateFailed || u.Phase == infrav1.UpdateRolledBack)
}

// Stopped reports whether the update has ended without success, or was refused: the machine runs as before.
func (u *Update) Stopped() bool {
	return u.Failed() || u != nil && u.Phase == "" && u.rejected
}

// defersRemediation reports whether the update will end soon by itself. The deletion of an unhealthy Machine waits for this.
func (u *Update) defersRemediation() bool {
	return u != nil && u.begun && !u.Failed() && !u.waits() && !u.unattended
}

// restarts reports whether the update can restart the services of the machine soon.
func (u *Update) restarts() bool {
	return u != nil && (u.defersRemediation() && u.Phase != infrav1.UpdateSucceeded || u.unconfirmed && u.waits() && !u.unattended)
}

// waits reports whether the host has not begun, and does not begin by itself soon.
func (u *Update) waits() bool { return u.Phase == "" && u.refused != "" }

// running reports whether the host or the machine carries out the update: its objects must not change now.
func (u *Update) running() bool {
	return u.Phase == infrav1.UpdateRunning || u.Phase == infrav1.UpdatePending
}

// String describes the state.
func (u *Update) String() string {
	detail := strings.Trim(u.step+": "+u.message, ": ")
	switch {
	case u.running() && u.unattended:
		return "The update in place is interrupted: the host of the machine does not answer, or has lost it"
	case u.Phase == infrav1.UpdateRolledBack:
		return "The update in place was rolled back: " + cmp.Or(detail, "the host reports no cause")
	case u.Phase == infrav1.UpdateFailed:
		return "The update in place failed: " + cmp.Or(detail, "the host reports no cause")
	case u.Phase == infrav1.UpdateSucceeded:
		return "The update in place is done"
	case u.waits():
		return "The update in place waits: " + u.refused
	case detail != "":
		return "The update in place is running: " + detail
	}
	return "The update in place is running"
}

// VersionOf returns the version that a Machine runs. During an update in place it is the former one: the Machine has the new
// version from the record on, and workers must not be upgraded before its API server has it.
func VersionOf(machine *clusterv1.Machine) string {
	return cmp.Or(machine.Annotations[controlplanev1.UpdateFromAnnotation], machine.Spec.Version)
}

// Parts are the objects of a Machine, and its desired infrastructure.
type Parts struct {
	Config *bootstrapv1.CapstanConfig
	// InfraMachine is nil for a kind of another provider, or when it does not exist.
	InfraMachine *infrav1.CapstanMachine
	// Desired is the spec of the template; nil if the infrastructure machine was created from it.
	Desired *infrav1.CapstanMachineSpec
	// Foreign: the infrastructure machine is no CapstanMachine, or the template is no CapstanMachineTemplate.
	Foreign bool
}

// LeavesVolumes reports whether a machine of the template gets a volume of this one.
func (p Parts) LeavesVolumes() bool {
	if p.Foreign || p.InfraMachine == nil {
		return false
	}
	wanted := p.InfraMachine.Spec.Volumes
	if p.Desired != nil {
		wanted = p.Desired.Volumes
	}
	return slices.ContainsFunc(p.InfraMachine.Spec.Volumes, func(v infrav1.MachineVolume) bool {
		return slices.ContainsFunc(wanted, func(w infrav1.MachineVolume) bool { return w.Name == v.Name })
	})
}

// Differences returns the differences between a Machine and the spec, each with its decision. The paths are those of the
// control plane.
func Differences(controlPlane *controlplanev1.CapstanControlPlane, machine *clusterv1.Machine, p Parts, now time.Time) []inplace.Change {
	var out []inplace.Change
	if c := inplace.Version(VersionOf(machine), WantedVersion(controlPlane)); c.Path != "" {
		out = append(out, below("spec", c)...)
	} else if machine.Spec.Version != WantedVersion(controlPlane) {
		// The spec went back to the version that the machine still runs.
		out = append(out, inplace.Change{Path: "spec.version", Verdict: inplace.InPlace})
	}
	if p.Config != nil {
		out = append(out, below("spec.config", inplace.Config(p.Config.Spec, desiredConfigSpec(controlPlane))...)...)
	}
	switch {
	case p.Foreign:
		out = append(out, replacedBy("spec.machineTemplate.spec.infrastructureRef", "only a CapstanMachine can be updated in place"))
	case p.Desired != nil && p.InfraMachine != nil:
		out = append(out, below("spec.machineTemplate.spec.infrastructureRef: spec.template.spec", inplace.Machine(p.InfraMachine.Spec, *p.Desired)...)...)
	}
	if after := controlPlane.Spec.Rollout.After; !after.IsZero() && !now.Before(after.Time) && machine.CreationTimestamp.Before(&after) {
		out = append(out, replacedBy("spec.rollout.after", "it asks for new machines"))
	}
	if expiring, young := expiry(controlPlane, machine, now); expiring && !young {
		out = append(out, replacedBy("spec.rollout.before.certificatesExpiryDays", "it asks for new machines"))
	}
	return out
}

// desiredConfigSpec returns the spec of the CapstanConfig of a Machine that is not the first one.
func desiredConfigSpec(controlPlane *controlplanev1.CapstanControlPlane) bootstrapv1.CapstanConfigSpec {
	out := *controlPlane.Spec.Config.DeepCopy()
	out.Role = bootstrapv1.RoleControlPlane
	return out
}

// UpdatedConfig returns the spec that the update of a CapstanConfig writes.
func UpdatedConfig(controlPlane *controlplanev1.CapstanControlPlane, current bootstrapv1.CapstanConfigSpec) bootstrapv1.CapstanConfigSpec {
	return inplace.KeepFirstStart(current, desiredConfigSpec(controlPlane))
}

func replacedBy(path, why string) inplace.Change {
	return inplace.Change{Path: path, Verdict: inplace.Replace, Why: why}
}

// below adds a prefix to the paths of changes.
func below(prefix string, changes ...inplace.Change) []inplace.Change {
	for n := range changes {
		changes[n].Path = prefix + "." + changes[n].Path
	}
	return changes
}

// unfinished returns the changes that still have to be written. A change of the version is written once the Machine has the
// version.
func unfinished(machine *clusterv1.Machine, changes []inplace.Change, wanted string) []inplace.Change {
	var out []inplace.Change
	for _, c := range changes {
		if c.Path != "spec.version" || machine.Spec.Version != wanted {
			out = append(out, c)
		}
	}
	return out
}

// ReadUpdate returns the state of the update of a Machine; nil without one.
func ReadUpdate(controlPlane *controlplanev1.CapstanControlPlane, machine *clusterv1.Machine, p Parts, changes []inplace.Change) *Update {
	return NewUpdate(machine, p.Config, p.InfraMachine, unfinished(machine, changes, WantedVersion(controlPlane)))
}

// Updated returns a Machine with a successful update that the provider has not finished; nil when there is none.
func (f Fleet) Updated() *Instance {
	for _, i := range f.active() {
		if i.Update != nil && i.Update.Phase == infrav1.UpdateSucceeded {
			return i
		}
	}
	return nil
}

// updateInPlace decides about updates in place (CP-21): first about the one that was begun, then about outdated Machines that
// can be updated. decided is false when outdated Machines are replaced. One Machine is updated at a time, under the rules of
// a rollout for the other Machines.
func (f Fleet) updateInPlace(active []*Instance, w Target) (p Plan, decided bool) {
	for _, i := range active {
		if i.Update != nil {
			return f.continueUpdate(i, active, w)
		}
	}
	if !w.updates() {
		return Plan{}, false
	}
	var updatable, others []*Instance
	for _, i := range active {
		switch {
		case len(i.Outdated) == 0:
		case len(inplace.Blocking(i.Changes)) == 0:
			updatable = append(updatable, i)
		default:
			others = append(others, i)
		}
	}
	stops := len(others) > 0 && w.inPlace == controlplanev1.InPlaceOnly
	switch {
	case len(updatable) == 0 && !stops:
		return Plan{}, false
	case f.resizesFirst(active, w):
		return f.resize(active, w), true
	case stops:
		return waitFor(needsReplacement(others[0])), true
	case w.held != "":
		return waitFor(w.held), true
	}
	return f.startUpdate(f.victim(updatable, w.domains)), true
}

// resize adds the missing Machines, or drops one of too many: updates in place do not delay this.
func (f Fleet) resize(active []*Instance, w Target) Plan {
	if missing := w.Replicas - len(active); missing > 0 {
		return f.add(missing)
	}
	return f.drop(f.victim(active, w.domains))
}

// resizesFirst reports whether the number of Machines changes before an update in place. A Machine with another encryption is updated before
// others join it.
func (f Fleet) resizesFirst(active []*Instance, w Target) bool {
	return len(active) > w.Replicas || len(active) < w.Replicas && f.unreadable() == ""
}

func (w Target) updates() bool {
	return w.inPlace == controlplanev1.InPlacePrefer || w.inPlace == controlplanev1.InPlaceOnly
}

// continueUpdate decides about an update that was recorded. It may rest for long: it waits for capacity or was refused, it has
// failed, or its host is lost. Only a running one delays the replacement of lost Machines and a scaling, because it ends soon.
func (f Fleet) continueUpdate(i *Instance, active []*Instance, w Target) (Plan, bool) {
	u := i.Update
	switch {
	case u.running() && !u.unattended:
		return waitFor(fmt.Sprintf("Machine %s: %s", i.Name(), u)), true
	case !w.updates():
		return Plan{}, false // The user wants a replacement now.
	case len(inplace.Blocking(i.Changes)) > 0 && w.inPlace == controlplanev1.InPlacePrefer:
		return Plan{}, false
	case f.resizesFirst(active, w):
		return f.resize(active, w), true
	case len(inplace.Blocking(i.Changes)) > 0:
		return waitFor(needsReplacement(i)), true
	case u.Written && u.Failed():
		last := "or set rollout.strategy.inPlace to Never to replace the machine"
		if i.otherEncryption {
			last = "or " + TwoSteps
		}
		return waitFor(fmt.Sprintf("Machine %s: %s. Nothing else is updated until this is solved: change the spec, set the annotation %s of its CapstanMachine to another value to try again, %s",
			i.Name(), u, infrav1.MachineUpdateAttemptAnnotation, last)), true
	case u.Written || u.running(): // A lost host may return and continue.
		return waitFor(fmt.Sprintf("Machine %s: %s", i.Name(), u)), true
	case w.held != "" && i.Machine.Spec.Version != w.version: // With the version, its update has begun before the hold.
		return waitFor(w.held), true
	}
	return f.startUpdate(i), true
}

// startUpdate writes the desired state of a Machine, if everything else works.
func (f Fleet) startUpdate(i *Instance) Plan {
	if why := f.cannotUpdate(i); why != "" {
		return waitFor(why)
	}
	return Plan{Update: i}
}

// cannotUpdate returns the reason why a Machine cannot be updated now; "" if it can. The other Machines must keep a quorum without
// it. A single Machine must be healthy, because its failure could not be distinguished from a failure of the update. After a
// failed update, another change must be possible, because it can be the repair.
func (f Fleet) cannotUpdate(i *Instance) string {
	if len(f.active()) > 1 {
		return cmp.Or(f.unreadable(), f.cannotSpare(i))
	}
	switch {
	case i.Update.Failed():
		return ""
	case f.Unknown != "":
		return f.Unknown
	case !f.healthy(i):
		return f.problem(i)
	}
	return ""
}

// Holds reports whether a host must not begin the update of a Machine that it has let wait: members can have left since, or failed, and etcd
// must keep its quorum while one of them restarts. No other Machine may be leaving.
func (f Fleet) Holds(i *Instance) bool {
	if !f.Stacked || i.Update == nil || !i.Update.begun || !i.Update.waits() {
		return false
	}
	if len(f.Instances) > 1 && (len(f.active()) < len(f.Instances) || f.cannotSpare(i) != "") {
		return true
	}
	votes := f.Votes()
	if memberHealthy(i) && i.Member.voting {
		votes.Healthy--
	}
	return votes.Voting > 1 && !votes.quorum()
}

// needsReplacement describes the changes that stop a rollout under the policy Only.
func needsReplacement(i *Instance) string {
	var reasons []string
	for _, c := range inplace.Blocking(i.Changes) {
		reasons = append(reasons, c.String())
	}
	return fmt.Sprintf("rollout.strategy.inPlace is Only, and Machine %s cannot be updated in place: %s", i.Name(), JoinReasons(reasons))
}

// UpdatingCondition returns the condition Updating of a control plane.
func UpdatingCondition(f Fleet, policy controlplanev1.InPlacePolicy) metav1.Condition {
	out := metav1.Condition{Type: controlplanev1.UpdatingCondition, Status: metav1.ConditionFalse, Reason: controlplanev1.NotUpdatingReason}
	remaining := len(f.Filter(func(i *Instance) bool { return !i.Deleting() && len(i.Outdated) > 0 }))
	for _, i := range f.active() {
		switch {
		case i.Update.Failed():
			out.Status, out.Reason = metav1.ConditionTrue, controlplanev1.UpdateFailedReason
		case i.Update != nil:
			out.Status, out.Reason = metav1.ConditionTrue, controlplanev1.UpdatingReason
		default:
			continue
		}
		out.Message = fmt.Sprintf("Machine %s: %s. %d of %d machines remain", i.Name(), i.Update, remaining, len(f.Instances))
		return out
	}
	if policy != controlplanev1.InPlaceOnly {
		return out
	}
	for _, i := range f.active() {
		if len(i.Outdated) > 0 && len(inplace.Blocking(i.Changes)) > 0 {
			out.Reason, out.Message = controlplanev1.CannotUpdateReason, needsReplacement(i)
			return out
		}
	}
	return out
}

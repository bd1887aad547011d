package machinepool

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/order"
)

// updateInput is the part of the desired state that updates in place need.
type updateInput struct {
	policy infrav1.InPlacePolicy
	// foreign: the MachinePool has another kind of bootstrap configuration than CapstanConfig. Only a CapstanConfig has the data of an update.
	foreign bool
	// config are the parts of the CapstanConfig that belong to the bootstrap data; nil while they are not known.
	config inplace.Fixed
	// id is that of the update data of the CapstanConfig.
	id string
	// spec is that of the machines.
	spec infrav1.CapstanMachineSpec
}

// allowed reports whether the policy allows updates in place.
func (u updateInput) allowed() bool {
	return u.policy == infrav1.InPlacePrefer || u.policy == infrav1.InPlaceOnly
}

// record returns the parts of the CapstanConfig that a machine records; "" while they are not known.
func (u updateInput) record() string {
	if u.config == nil {
		return ""
	}
	return u.config.String()
}

// annotations returns the annotations of a machine that has the desired state. The parts of the CapstanConfig are missing while they
// are not known: an update that keeps the bootstrap data must not erase the record of them.
func (d desired) annotations() map[string]string {
	out := map[string]string{
		infrav1.MachineSpecHashAnnotation:        d.hash,
		infrav1.MachineVersionAnnotation:         d.version,
		infrav1.MachineBootstrapSecretAnnotation: d.secret,
	}
	if record := d.updating.record(); record != "" {
		out[infrav1.MachineConfigAnnotation] = record
	}
	return out
}

// readConfig takes over what the bootstrap provider has made of the CapstanConfig. While the provider cannot render data from the spec, its
// status names the data of a former spec, which nothing describes.
func (d *desired) readConfig(config *bootstrapv1.CapstanConfig) {
	status := config.Status
	rendered := status.ObservedGeneration == config.Generation && conditions.IsTrue(config, bootstrapv1.DataSecretAvailableCondition)
	if rendered && status.DataSecretName == d.secret {
		d.updating.config = inplace.FixedParts(config.Spec)
	}
	if data := status.Update; data.ObservedGeneration == config.Generation && data.KubernetesVersion == d.version {
		d.updating.id = data.ID
	}
}

// isUpdating reports whether an update of the machine was begun and is not finished.
func (m member) isUpdating() bool {
	_, ok := m.capstan.Annotations[clusterv1.UpdateInProgressAnnotation]
	return ok
}

// changes returns the differences of a machine from the desired state, with their decisions. They are not complete while the parts of the
// CapstanConfig are not known.
func (d desired) changes(m member) (out []inplace.Change, complete bool) {
	annotations := m.capstan.Annotations
	version := annotations[infrav1.MachineVersionAnnotation]
	if m.isUpdating() {
		version = cmp.Or(nodeVersion(m.machine), version) // The annotation has the new one.
	}
	if c := inplace.Version(version, d.version); c.Path != "" {
		out = append(out, c)
	}
	out = append(out, inplace.Machine(m.capstan.Spec, d.updating.spec)...)
	if d.misplaced(m) {
		out = append(out, inplace.Change{Path: "failureDomains", Verdict: inplace.Replace, Why: "a machine cannot move to another failure domain"})
	}
	if d.updating.foreign {
		return append(out, inplace.Change{Path: "bootstrap", Verdict: inplace.Replace, Why: "only a CapstanConfig has the data of an update, and spec.template.spec.bootstrap.configRef of the MachinePool names none"}), true
	}
	if annotations[infrav1.MachineBootstrapSecretAnnotation] == d.secret {
		return out, true
	}
	had := inplace.ReadFixed(annotations[infrav1.MachineConfigAnnotation])
	switch {
	case had == nil:
		return append(out, inplace.Change{Path: "bootstrap", Verdict: inplace.Replace, Why: "the machine was made before the pool allowed updates in place"}), true
	case d.updating.config == nil:
		return out, false
	}
	return append(out, had.Changes(d.updating.config)...), true
}

// verdict is the decision whether the differences of a machine can be changed in place.
type verdict int

const (
	// updateImpossible: a difference, or the state of the machine, forbids the update.
	updateImpossible verdict = iota
	// updateUndecided: no known difference forbids the update, but not all are known yet.
	updateUndecided
	// updateUnreported: all differences allow the update, but no report of a host shows that the bootstrap has succeeded.
	updateUnreported
	updatePossible
)

// verdict decides about the machine. why names the differences that forbid an update. complete: all differences are known.
func (m member) verdict(why string, complete bool) verdict {
	switch {
	case why != "", !m.hasRun(), failure(m.capstan) != "":
		return updateImpossible
	case !complete:
		return updateUndecided
	case !conditions.IsTrue(m.capstan, infrav1.BootstrapSucceededCondition):
		return updateUnreported
	}
	return updatePossible
}

// updateState is the state of a machine for the plan of updates.
type updateState struct {
	verdict verdict
	// why names the differences that forbid an update.
	why string
	// drained: its Node was cordoned for the update.
	drained bool
	// begun: the annotation is on the machine. current: for the desired state of now. runs: its host carries out an update, perhaps an
	// earlier one. refused: the update cannot begin now, and none runs. rejected: it also does not begin later by itself.
	// attended: it runs, and its host answers, so that it ends by itself.
	begun, current, runs, refused, rejected, attended bool
	phase                                             infrav1.UpdatePhase
	text                                              string
}

// updateOf describes a machine for the plan.
func (d desired) updateOf(m member) updateState {
	out := updateState{drained: m.isDrained(), begun: m.isUpdating(), current: m.capstan.Annotations[infrav1.MachineSpecHashAnnotation] == d.hash}
	changes, complete := d.changes(m)
	var all []string
	for _, c := range inplace.Blocking(changes) {
		all = append(all, c.String())
	}
	out.why = strings.Join(all, "; ")
	out.verdict = m.verdict(out.why, complete)
	report := m.capstan.Status.Update
	about := report.ObservedGeneration == m.capstan.Generation && report.KubernetesVersion == m.capstan.Annotations[infrav1.MachineVersionAnnotation]
	if out.begun && about && (!out.current || report.ConfigUpdateID != "" && report.ConfigUpdateID == d.updating.id) {
		out.phase = report.Phase
	}
	// While the host carries out an update whose report has not arrived, the report of an earlier one can fit a spec that went back to it.
	if out.phase == infrav1.UpdateSucceeded && !showsSuccess(m.capstan) {
		out.phase = ""
	}
	out.runs = out.begun && runs(m.capstan)
	out.attended = out.runs && !hostIsAway(m.capstan)
	out.refused = out.begun && !out.runs && refused(m.capstan)
	// Without the data of the present spec, the refusal is about a former one.
	out.rejected = out.refused && updatingNow(m.capstan).Reason == infrav1.UpdateRefusedReason && d.updating.id != ""
	out.text = strings.Trim(report.Step+": "+report.Message, ": ")
	if out.phase == "" { // The report is about an earlier update.
		out.text = obstacle(m.capstan)
	}
	return out
}

// runs reports whether the host of a machine carries out an update, perhaps an earlier one. status.update is the last report of the host,
// and it is empty after a move or a restore. Until a condition shows that the host has none either, an update can run. The host of a machine
// that is lost or has failed carries out none.
func runs(m *infrav1.CapstanMachine) bool {
	switch m.Status.Update.Phase {
	case infrav1.UpdateRunning, infrav1.UpdatePending:
		return failure(m) == ""
	case "":
		return failure(m) == "" && updatingNow(m) == nil
	}
	return false
}

// hostIsAway reports whether the host of a machine does not answer.
func hostIsAway(m *infrav1.CapstanMachine) bool {
	c := conditions.Get(m, infrav1.MachineRunningCondition)
	return c != nil && c.Status == metav1.ConditionUnknown
}

// refused reports whether an update was refused, by the host or before a request to it.
func refused(m *infrav1.CapstanMachine) bool {
	c := updatingNow(m)
	return c != nil && (c.Reason == infrav1.NoCapacityReason || c.Reason == infrav1.UpdateRefusedReason)
}

// showsSuccess reports whether the controller of a machine has compared the last report of its host with the present request, and both match.
func showsSuccess(m *infrav1.CapstanMachine) bool {
	c := updatingNow(m)
	return c != nil && c.Reason == infrav1.UpdateSucceededReason
}

// obstacle returns why the host has not begun the update of a machine, or "".
func obstacle(m *infrav1.CapstanMachine) string {
	if c := updatingNow(m); c != nil {
		return c.Message
	}
	return ""
}

// updatingNow returns the condition Updating that a machine has for its present spec, or nil.
func updatingNow(m *infrav1.CapstanMachine) *metav1.Condition {
	if c := conditions.Get(m, infrav1.UpdatingCondition); c != nil && c.ObservedGeneration == m.Generation {
		return c
	}
	return nil
}

func (u updateState) failed() bool {
	return u.phase == infrav1.UpdateFailed || u.phase == infrav1.UpdateRolledBack
}

// busy reports whether the update must not be disturbed.
func (u updateState) busy() bool {
	if !u.begun {
		return false
	}
	return u.runs || u.phase == infrav1.UpdateRunning || u.phase == infrav1.UpdatePending || u.current && u.phase == ""
}

// replace reports whether an outdated machine is replaced. A machine that has never run is always replaced, also after its update was begun:
// nothing is lost, and its host refuses the update. Without a policy that allows updates, one that its host does not carry out yet ends with
// the machine: the host can refuse it for ever.
func (d desired) replace(m member, u updateState) bool {
	switch {
	case u.runs, u.begun && u.phase == infrav1.UpdateSucceeded:
		return false
	case !d.updating.allowed(), !m.hasRun():
		return true
	case u.busy(), u.current && u.failed():
		return false
	}
	return d.updating.policy == infrav1.InPlacePrefer && u.verdict == updateImpossible
}

// updatePlan has the next actions of updates in place.
type updatePlan struct {
	// start, finish and uncordon have the names of machines. The Nodes of the last ones become schedulable again.
	start, finish, uncordon []string
	// why is the reason to start none although machines are outdated, and waits the one that ends by itself.
	why, waits string
}

func (p updatePlan) empty() bool {
	return len(p.start) == 0 && len(p.finish) == 0 && len(p.uncordon) == 0
}

// planUpdates decides which machines are updated. It depends only on its arguments. maxUnavailable machines, and at least one,
// may be missing, unavailable or updating at the same time. Machines that are not available count as updating only: their update can repair
// them, however many they are. A failed update stops further ones.
func planUpdates(want desired, instances []instance) updatePlan {
	out := planStarts(want, instances)
	out.uncordon = toUncordon(instances, out.start)
	return out
}

func planStarts(want desired, instances []instance) updatePlan {
	var out updatePlan
	var candidates []instance
	busy, updating, active, undecided := 0, 0, 0, false
	for _, i := range instances {
		if i.leaving {
			continue
		}
		active++
		u := i.update
		if u.busy() {
			updating++
		}
		if u.busy() || !i.available {
			busy++
		}
		switch {
		case u.begun && u.phase == infrav1.UpdateSucceeded:
			out.finish = append(out.finish, i.name)
		case !i.behind || u.busy() || i.outdated:
		case u.current && u.failed():
			out.why = fmt.Sprintf("the update of machine %s in place ended as %s: %s", i.name, u.phase, u.text)
		case u.verdict == updateUndecided:
			undecided = true
			out.waits = cmp.Or(out.waits, fmt.Sprintf("machine %s waits until the bootstrap provider has rendered the present spec of the CapstanConfig", i.name))
		case u.verdict == updateUnreported: // Perhaps its host is away for long: others do not wait for it.
			out.waits = cmp.Or(out.waits, fmt.Sprintf("machine %s waits until its host reports that its bootstrap has succeeded", i.name))
		case u.verdict == updateImpossible:
			out.why = cmp.Or(out.why, fmt.Sprintf("machine %s cannot be updated in place, and rollingUpdate.inPlace is Only: %s", i.name, cmp.Or(u.why, "it has failed")))
		default:
			candidates = append(candidates, i)
		}
	}
	if out.why != "" || undecided || want.frozen || !want.updating.allowed() {
		return out
	}
	busy += max(0, want.replicas-active)
	slices.SortFunc(candidates, func(a, b instance) int {
		return cmp.Or(order.TrueFirst(!a.available, !b.available), a.created.Compare(b.created), cmp.Compare(a.name, b.name))
	})
	limit := max(1, want.budget.maxUnavailable)
	for _, i := range candidates {
		if i.available {
			busy++
		}
		if updating++; updating > limit || i.available && busy > limit {
			break
		}
		out.start = append(out.start, i.name)
	}
	return out
}

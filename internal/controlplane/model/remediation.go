package model

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/order"
)

// RemediationRecord is the history of a remediation. It is stored on the control plane while the Machine is deleted, then on
// its replacement.
type RemediationRecord struct {
	// Machine is the replaced Machine, Time the time of its replacement.
	Machine string      `json:"machine"`
	Time    metav1.Time `json:"timestamp"`
	// Retries is the number of replacements in a row that failed.
	Retries int32 `json:"retryCount"`
	// Open is the previous remediation if its replacement does not exist yet. On the control plane only.
	Open *RemediationRecord `json:"open,omitempty"`
}

// String returns the stored form; "" for nil.
func (r *RemediationRecord) String() string {
	if r == nil {
		return ""
	}
	data, err := json.Marshal(r)
	if err != nil { // Names, times and numbers can always be encoded.
		return ""
	}
	return string(data)
}

// ReadRemediationRecord returns the record in an annotation of a control plane or Machine; nil when there is none or when it
// cannot be read.
func ReadRemediationRecord(obj client.Object, annotation string) *RemediationRecord {
	out := &RemediationRecord{}
	if err := json.Unmarshal([]byte(obj.GetAnnotations()[annotation]), out); err != nil || out.Machine == "" {
		return nil // A user has changed it: the history starts again.
	}
	return out
}

// Repair is the decision about Machines that a MachineHealthCheck has found unhealthy.
type Repair struct {
	// Machine has to be replaced; nil when none is unhealthy.
	Machine *Instance
	// Act is true if the Machine can be deleted now. Otherwise Reason and Message are its condition.
	Act             bool
	Reason, Message string
	// Again is the time until the next decision, if time alone changes it.
	Again  time.Duration
	Record RemediationRecord
}

// planRemediation makes the decision of PlanRemediation. If the first Machine has to wait, one that is lost can be deleted before it: it
// cannot wait, because the next loss could cost the majority. open is the remediation whose replacement does not exist yet; nil without one.
func planRemediation(f Fleet, spec controlplanev1.RemediationSpec, initialized bool, open *RemediationRecord, now time.Time) Repair {
	var out Repair
	for n, machine := range f.unhealthy() {
		if n > 0 && !f.lost(machine) {
			continue
		}
		r := f.planRepair(machine, spec, initialized, open, now)
		if r.Act {
			return r
		}
		if n == 0 {
			out = r
		} else {
			out.Again = order.Sooner(out.Again, r.Again)
		}
	}
	return out
}

// planRepair decides whether an unhealthy Machine can be deleted now.
func (f Fleet) planRepair(machine *Instance, spec controlplanev1.RemediationSpec, initialized bool, open *RemediationRecord, now time.Time) Repair {
	out := Repair{Machine: machine, Record: RemediationRecord{Machine: machine.Name(), Time: metav1.NewTime(now.UTC().Truncate(time.Second)), Open: open}}
	if open != nil && open.Machine == machine.Name() {
		out.Record.Open = open.Open // It was recorded, and then not done.
	}
	deferred := func(format string, args ...any) Repair {
		out.Reason, out.Message = controlplanev1.RemediationDeferredReason, fmt.Sprintf(format, args...)
		return out
	}
	refused := func(format string, args ...any) Repair {
		out.Reason, out.Message = controlplanev1.CannotBeRemediatedReason, fmt.Sprintf(format, args...)
		return out
	}
	if machine.Update.defersRemediation() {
		return deferred("it is being updated in place, and its update has a deadline of its own")
	}
	if last := ReadRemediationRecord(machine.Machine, controlplanev1.RemediationForAnnotation); last != nil && now.Sub(last.Time.Time) < seconds(spec.MinHealthyPeriodSeconds, controlplanev1.DefaultMinHealthyPeriodSeconds) {
		out.Record.Retries = last.Retries + 1
		if left := seconds(spec.RetryPeriodSeconds, 0) - now.Sub(last.Time.Time); left > 0 {
			out.Again = left
			return deferred("it replaces Machine %s, and retryPeriodSeconds are not over yet", last.Machine)
		}
		if spec.MaxRetry != nil && last.Retries >= *spec.MaxRetry {
			return refused("it replaces Machine %s, and %d replacements have failed already (maxRetry)", last.Machine, last.Retries)
		}
	}
	if !initialized {
		out.Act = true // There is no data yet.
		return out
	}
	if why := f.changing(machine); why != "" {
		return deferred("%s", why)
	}
	if open != nil && f.Find(open.Machine) == nil && !memberDown(machine) {
		// A dead member prevents the creation of the replacement, so it is removed first if the majority allows it.
		return deferred("Machine %s was repaired, and its replacement is not made yet", open.Machine)
	}
	if why := f.cannotRemediate(machine); why != "" {
		return refused("%s", why)
	}
	out.Act = true
	return out
}

// changing returns the change of another Machine. The deletion of an unhealthy Machine waits for its end. The result is "" without a change.
func (f Fleet) changing(unhealthy *Instance) string {
	for n := range f.Instances {
		switch other := &f.Instances[n]; {
		case other.Deleting() && memberDown(unhealthy):
			// Its drain or its member may be waiting for the removal of this one. CannotRemove protects the majority.
		case other.Deleting() && !f.joined(unhealthy) && f.deletedOneServes():
			// It may be waiting for a replacement that joins.
		case f.waitsFor(unhealthy, other):
			// It joins after the removal.
		case other.Deleting():
			return fmt.Sprintf("Machine %s is being deleted", other.Name())
		case other != unhealthy && !f.joined(other) && !collections.IsUnhealthy(other.Machine):
			return fmt.Sprintf("Machine %s is still starting", other.Name())
		}
	}
	return ""
}

// cannotRemediate returns the reason why an unhealthy Machine cannot be deleted. The last Machine can be deleted if another
// one can be created and can still join it.
func (f Fleet) cannotRemediate(i *Instance) string {
	only := len(f.active()) == 1
	switch {
	case only && f.irreplaceable != "":
		return "it is the only control plane machine, and no other one can be created: " + f.irreplaceable
	case only && f.healthy(i), !f.joined(i) && f.deletedOneServes():
		return ""
	case only:
		return "it is the only control plane machine, and another one cannot take over from it: " + f.problem(i)
	}
	serving := false
	for _, other := range f.active() {
		serving = serving || other != i && other.apiServer == metav1.ConditionTrue
	}
	switch {
	case f.Stacked && f.Unknown != "":
		return f.Unknown
	case !serving:
		return "no other Machine has an API server that works"
	case !f.Stacked || i.Member == nil:
		return ""
	}
	return f.CannotRemove(i.Member.Name)
}

// unhealthy returns the unhealthy Machines. The first one is that whose replacement helps most.
func (f Fleet) unhealthy() []*Instance {
	var broken []*Instance
	for _, i := range f.active() {
		if collections.IsUnhealthyAndOwnerRemediated(i.Machine) {
			broken = append(broken, i)
		}
	}
	slices.SortFunc(broken, func(a, b *Instance) int {
		return cmp.Or(
			order.TrueFirst(annotations.HasRemediateMachine(a.Machine), annotations.HasRemediateMachine(b.Machine)),
			order.TrueFirst(!f.joined(a), !f.joined(b)),
			order.TrueFirst(!memberHealthy(a), !memberHealthy(b)),
			order.TrueFirst(a.apiServer != metav1.ConditionTrue, b.apiServer != metav1.ConditionTrue),
			a.Machine.CreationTimestamp.Compare(b.Machine.CreationTimestamp.Time),
			cmp.Compare(a.Name(), b.Name()),
		)
	})
	return broken
}

// lost reports whether the deletion of an unhealthy Machine costs etcd no vote, and with an external etcd no API server.
func (f Fleet) lost(i *Instance) bool {
	if !f.Stacked {
		return i.apiServer == metav1.ConditionFalse
	}
	return !f.joined(i) || memberDown(i)
}

func memberDown(i *Instance) bool { return i.Member != nil && i.Member.health == metav1.ConditionFalse }

func memberHealthy(i *Instance) bool {
	return i.Member != nil && i.Member.health == metav1.ConditionTrue
}

func seconds(given *int32, otherwise int32) time.Duration {
	return time.Duration(ptr.Deref(given, otherwise)) * time.Second
}

// unreplaced returns the recorded remediations that still wait for a replacement.
func (f Fleet) unreplaced(open *RemediationRecord, replicas int) *RemediationRecord {
	for open != nil && f.isOver(open, replicas) {
		open = open.Open
	}
	return open
}

// isOver reports whether a remediation needs no replacement any more: the replacement exists, the number of Machines is
// reached, or the Machine became healthy before its deletion.
func (f Fleet) isOver(repair *RemediationRecord, replicas int) bool {
	replaced := func(i Instance) bool {
		r := ReadRemediationRecord(i.Machine, controlplanev1.RemediationForAnnotation)
		return r != nil && r.Machine == repair.Machine
	}
	switch i := f.Find(repair.Machine); {
	case slices.ContainsFunc(f.Instances, replaced):
		return true
	case i == nil:
		return len(f.active()) >= replicas
	default:
		return !i.Deleting() && !collections.IsUnhealthy(i.Machine)
	}
}

// PlanRemediation selects the unhealthy Machine to replace, and decides whether it can be deleted now (CP-10).
func (cp *ControlPlane) PlanRemediation() Repair {
	return planRemediation(cp.Fleet(), cp.Object.Spec.Remediation, cp.Initialized(), cp.OpenRemediation(), cp.Now)
}

// OpenRemediation returns the newest remediation without a replacement; nil when there is none.
func (cp *ControlPlane) OpenRemediation() *RemediationRecord {
	return cp.Fleet().unreplaced(ReadRemediationRecord(cp.Object, controlplanev1.RemediationInProgressAnnotation), cp.Target().Replicas)
}

// LastRemediation returns the newest recorded remediation.
func (cp *ControlPlane) LastRemediation() controlplanev1.LastRemediationStatus {
	last := ReadRemediationRecord(cp.Object, controlplanev1.RemediationInProgressAnnotation)
	for _, m := range cp.Machines {
		if r := ReadRemediationRecord(m, controlplanev1.RemediationForAnnotation); r != nil && (last == nil || r.Time.After(last.Time.Time)) {
			last = r
		}
	}
	if last == nil {
		return cp.Object.Status.LastRemediation
	}
	return controlplanev1.LastRemediationStatus{Machine: last.Machine, Time: last.Time, RetryCount: ptr.To(last.Retries)}
}

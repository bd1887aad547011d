package controlplane

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// record is the history of a repair: on the control plane while the Machine goes, then on its replacement.
type record struct {
	// Machine that was replaced, and when.
	Machine string      `json:"machine"`
	Time    metav1.Time `json:"timestamp"`
	// Retries says how many replacements in a row have failed.
	Retries int32 `json:"retryCount"`
	// Open is the repair before, when its replacement is not made yet either; on the control plane only.
	Open *record `json:"open,omitempty"`
}

// String is the record as it is written down; "" when there is none.
func (r *record) String() string {
	if r == nil {
		return ""
	}
	data, err := json.Marshal(r)
	if err != nil { // Names, times and numbers can always be written.
		return ""
	}
	return string(data)
}

func readRecord(obj client.Object, annotation string) *record {
	out := &record{}
	if err := json.Unmarshal([]byte(obj.GetAnnotations()[annotation]), out); err != nil || out.Machine == "" {
		return nil // Somebody has changed it: we begin anew.
	}
	return out
}

// repair is what to do about Machines that a MachineHealthCheck has found unhealthy.
type repair struct {
	// machine that is to be replaced; nil when none is unhealthy.
	machine *instance
	// go says that it can be deleted now; reason and message say on the Machine why not.
	act             bool
	reason, message string
	// again is when to look again, if time alone changes the answer.
	again  time.Duration
	record record
}

// planRepair decides which unhealthy Machine goes, and whether it can (CP-10). open is the repair that has no
// replacement yet; nil when there is none.
func planRepair(f fleet, spec controlplanev1.RemediationSpec, initialized bool, open *record, now time.Time) repair {
	machine := f.mostBroken()
	if machine == nil {
		return repair{}
	}
	out := repair{machine: machine, record: record{Machine: machine.name(), Time: metav1.NewTime(now.UTC().Truncate(time.Second)), Open: open}}
	if open != nil && open.Machine == machine.name() {
		out.record.Open = open.Open // It was written down, and then not done.
	}
	deferred := func(format string, args ...any) repair {
		out.reason, out.message = controlplanev1.RemediationDeferredReason, fmt.Sprintf(format, args...)
		return out
	}
	refused := func(format string, args ...any) repair {
		out.reason, out.message = controlplanev1.CannotBeRemediatedReason, fmt.Sprintf(format, args...)
		return out
	}
	if last := readRecord(machine.machine, controlplanev1.RemediationForAnnotation); last != nil && now.Sub(last.Time.Time) < seconds(spec.MinHealthyPeriodSeconds, controlplanev1.DefaultMinHealthyPeriodSeconds) {
		out.record.Retries = last.Retries + 1
		if left := seconds(spec.RetryPeriodSeconds, 0) - now.Sub(last.Time.Time); left > 0 {
			out.again = left
			return deferred("it replaces Machine %s, and retryPeriodSeconds are not over yet", last.Machine)
		}
		if spec.MaxRetry != nil && last.Retries >= *spec.MaxRetry {
			return refused("it replaces Machine %s, and %d replacements have failed already (maxRetry)", last.Machine, last.Retries)
		}
	}
	if !initialized {
		out.act = true // There is nothing to lose yet.
		return out
	}
	for n := range f.instances {
		switch other := &f.instances[n]; {
		case other.deleting() && memberDown(machine) && waitsForHook(other.machine):
			// Its member may be waiting for this one to go.
		case other.deleting():
			return deferred("Machine %s is being deleted", other.name())
		case other != machine && !f.joined(other) && !collections.IsUnhealthy(other.machine):
			return deferred("Machine %s is still starting", other.name())
		}
	}
	if open != nil && f.find(open.Machine) == nil && !memberDown(machine) {
		// A dead member would keep the replacement from being made: it goes before that, if the majority allows it.
		return deferred("Machine %s was repaired, and its replacement is not made yet", open.Machine)
	}
	if why := f.cannotRepair(machine); why != "" {
		return refused("%s", why)
	}
	out.act = true
	return out
}

// cannotRepair says why an unhealthy Machine cannot go. The last Machine can if it still works so far that
// another one can join it.
func (f fleet) cannotRepair(i *instance) string {
	if len(f.active()) == 1 {
		if f.healthy(i) {
			return ""
		}
		return "it is the only control plane machine, and another one cannot take over from it: " + f.problem(i)
	}
	serving := false
	for _, other := range f.active() {
		serving = serving || other != i && other.apiServer == metav1.ConditionTrue
	}
	switch {
	case f.stacked && f.unknown != "":
		return f.unknown
	case !serving:
		return "no other Machine has an API server that works"
	case !f.stacked || i.member == nil:
		return ""
	}
	return f.unsafe(i.member.name)
}

// mostBroken is the unhealthy Machine whose repair helps most; nil when none waits for us.
func (f fleet) mostBroken() *instance {
	var broken []*instance
	for _, i := range f.active() {
		if collections.IsUnhealthyAndOwnerRemediated(i.machine) {
			broken = append(broken, i)
		}
	}
	if len(broken) == 0 {
		return nil
	}
	return slices.MinFunc(broken, func(a, b *instance) int {
		return cmp.Or(
			first(annotations.HasRemediateMachine(a.machine), annotations.HasRemediateMachine(b.machine)),
			first(!f.joined(a), !f.joined(b)),
			first(!memberHealthy(a), !memberHealthy(b)),
			first(a.apiServer != metav1.ConditionTrue, b.apiServer != metav1.ConditionTrue),
			a.machine.CreationTimestamp.Compare(b.machine.CreationTimestamp.Time),
			cmp.Compare(a.name(), b.name()),
		)
	})
}

func memberDown(i *instance) bool { return i.member != nil && i.member.health == metav1.ConditionFalse }

func memberHealthy(i *instance) bool {
	return i.member != nil && i.member.health == metav1.ConditionTrue
}

func seconds(given *int32, otherwise int32) time.Duration {
	return time.Duration(ptr.Deref(given, otherwise)) * time.Second
}

// reconcileRemediation deletes the Machine that needs it most. The next one is made as whenever one is
// missing. acted says that nothing else is to be done now; again is when to look again.
func (r *Reconciler) reconcileRemediation(ctx context.Context, s *scope) (acted bool, again time.Duration, err error) {
	if err := r.forgetHealed(ctx, s); err != nil {
		return false, 0, err
	}
	if err := r.forgetReplaced(ctx, s); err != nil {
		return false, 0, err
	}
	p := s.planRepair()
	if p.machine == nil {
		return false, 0, nil
	}
	s.remediating = append(s.remediating, cmp.Or(p.message, "it is replaced"))
	if !p.act {
		return false, p.again, r.setMachineConditions(ctx, p.machine.machine, ownerRemediated(p.reason, p.message))
	}
	if current, err := r.readLive(ctx, s); err != nil || !current {
		return true, 0, err
	}
	if p = s.planRepair(); !p.act {
		return true, p.again, nil
	}
	if err := r.remediate(ctx, s, p); err != nil {
		s.remediating = append(s.remediating, advise(err))
		return true, 0, err
	}
	return true, 0, nil
}

func (s *scope) planRepair() repair {
	return planRepair(s.fleet(), s.controlPlane.Spec.Remediation, s.initialized(), s.openRepair(), now())
}

// remediate writes down what it does before it does it: its replacement has to know.
func (r *Reconciler) remediate(ctx context.Context, s *scope, p repair) error {
	if err := r.annotate(ctx, s, controlplanev1.RemediationInProgressAnnotation, p.record.String()); err != nil {
		return err
	}
	machine := p.machine.machine
	if err := r.setMachineConditions(ctx, machine, ownerRemediated(controlplanev1.RemediationMachineDeletingReason, "Machine is deleting")); err != nil {
		return err
	}
	live := &clusterv1.Machine{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(machine), live); err != nil {
		return client.IgnoreNotFound(err)
	}
	machine.ResourceVersion = live.ResourceVersion
	if err := r.deleteMachine(ctx, s, machine, "Remediate"); err != nil {
		return err
	}
	r.event(s, corev1.EventTypeWarning, "Remediated", "Remediate", "Replaces the unhealthy Machine %s", machine.Name)
	return nil
}

func ownerRemediated(reason, message string) metav1.Condition {
	return metav1.Condition{Type: clusterv1.MachineOwnerRemediatedCondition, Status: metav1.ConditionFalse, Reason: reason, Message: message}
}

// forgetHealed takes the wish for a repair back from Machines that have become healthy.
func (r *Reconciler) forgetHealed(ctx context.Context, s *scope) error {
	for _, m := range s.machines {
		if !m.DeletionTimestamp.IsZero() || !conditions.IsTrue(m, clusterv1.MachineHealthCheckSucceededCondition) || !conditions.IsFalse(m, clusterv1.MachineOwnerRemediatedCondition) {
			continue
		}
		if err := r.removeMachineCondition(ctx, m, clusterv1.MachineOwnerRemediatedCondition); err != nil {
			return err
		}
	}
	return nil
}

// openRepair is the newest repair whose replacement is not made yet; nil when there is none.
func (s *scope) openRepair() *record {
	return s.fleet().unreplaced(readRecord(s.controlPlane, controlplanev1.RemediationInProgressAnnotation), s.wish().replicas)
}

// unreplaced is what of the repairs that are written down still waits for a replacement.
func (f fleet) unreplaced(open *record, replicas int) *record {
	for open != nil && f.isOver(open, replicas) {
		open = open.Open
	}
	return open
}

// isOver says that a repair needs no replacement any more: it has one, there are as many Machines as are wanted, or
// the Machine has healed before it was deleted.
func (f fleet) isOver(repair *record, replicas int) bool {
	replaced := func(i instance) bool {
		r := readRecord(i.machine, controlplanev1.RemediationForAnnotation)
		return r != nil && r.Machine == repair.Machine
	}
	switch i := f.find(repair.Machine); {
	case slices.ContainsFunc(f.instances, replaced):
		return true
	case i == nil:
		return len(f.active()) >= replicas
	default:
		return !i.deleting() && !collections.IsUnhealthy(i.machine)
	}
}

// finishRemediation: the replacement has been made, and knows what it replaces.
func (r *Reconciler) finishRemediation(ctx context.Context, s *scope) error {
	return r.annotate(ctx, s, controlplanev1.RemediationInProgressAnnotation, s.openRepair().String())
}

// forgetReplaced ends repairs that need no replacement, or whose end was not written down.
func (r *Reconciler) forgetReplaced(ctx context.Context, s *scope) error {
	same := func() bool {
		return s.openRepair().String() == readRecord(s.controlPlane, controlplanev1.RemediationInProgressAnnotation).String()
	}
	if same() {
		return nil
	}
	if current, err := r.readLive(ctx, s); err != nil || !current || same() {
		return err
	}
	return r.finishRemediation(ctx, s)
}

// annotate writes an annotation of the control plane; "" removes it.
func (r *Reconciler) annotate(ctx context.Context, s *scope, name, value string) error {
	if s.controlPlane.Annotations[name] == value {
		return nil
	}
	before := s.controlPlane.DeepCopy()
	if value == "" {
		delete(s.controlPlane.Annotations, name)
	} else {
		metav1.SetMetaDataAnnotation(&s.controlPlane.ObjectMeta, name, value)
	}
	// The answer goes into a copy: it has an older status than we have.
	return client.IgnoreNotFound(r.Client.Patch(ctx, s.controlPlane.DeepCopy(), client.MergeFrom(before)))
}

// lastRemediation is the newest repair that is written down anywhere.
func lastRemediation(s *scope) controlplanev1.LastRemediationStatus {
	last := readRecord(s.controlPlane, controlplanev1.RemediationInProgressAnnotation)
	for _, m := range s.machines {
		if r := readRecord(m, controlplanev1.RemediationForAnnotation); r != nil && (last == nil || r.Time.After(last.Time.Time)) {
			last = r
		}
	}
	if last == nil {
		return s.controlPlane.Status.LastRemediation
	}
	return controlplanev1.LastRemediationStatus{Machine: last.Machine, Time: last.Time, RetryCount: ptr.To(last.Retries)}
}

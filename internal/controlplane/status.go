package controlplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/blang/semver/v4"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/kubeconfig"
	"capstan.dev/capstan/internal/manager"
)

// healthTimeout limits the question how an initialized control plane is.
const healthTimeout = 3 * time.Second

// health asks the API server how it and its etcd are; see readyz.
func health(ctx context.Context, config *rest.Config) (ready bool, failed []string, err error) {
	c, err := kubeconfig.Client(config, healthTimeout)
	if err != nil {
		return false, nil, err
	}
	return readyz(ctx, c, config.Host)
}

// reply is what the API server says of itself and of etcd, when it was asked.
type reply struct {
	ready  bool
	failed []string
	err    error
}

// errRefused is why an API server is not asked.
var errRefused = errors.New("the API server cannot be asked, because the kubeconfig is refused: see KubeconfigAvailable")

// problem is why the cluster cannot be used through its endpoint; "" when it can.
func (a *reply) problem() string {
	switch {
	case a == nil || a.err == nil && a.ready:
		return ""
	case errors.Is(a.err, errRefused):
		return a.err.Error()
	case a.err != nil:
		return "the API server does not answer through the endpoint"
	}
	return "the API server's checks fail: " + strings.Join(a.failed, ", ")
}

// failing are the checks that fail of etcd, or of everything else.
func (a *reply) failing(etcd bool) []string {
	if a == nil || a.ready || a.err != nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(a.failed), func(check string) bool { return strings.HasPrefix(check, "etcd") != etcd })
}

// setHealth says how etcd and the API servers are, once somebody could be asked.
func setHealth(s *scope) {
	if s.answer == nil {
		return
	}
	f := s.fleet()
	for _, c := range []metav1.Condition{etcdHealth(f, s.answer), componentsHealth(f, s.answer)} {
		has := conditions.Get(s.controlPlane, c.Type)
		if c.Status == metav1.ConditionUnknown && s.blink && has != nil {
			continue // What was known a moment ago stands.
		}
		conditions.Set(s.controlPlane, c)
	}
}

// majorityAdvice names no action: a restore destroys the Machines that are there, and most come back by themselves.
const majorityAdvice = "docs/control-plane.md describes how to act when the majority is lost"

// etcdHealth is what is known of etcd as a whole. The members' own word counts; the API server's alone when
// there is none, because etcd is external or the machines do not tell.
func etcdHealth(f fleet, a *reply) metav1.Condition {
	condition := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return metav1.Condition{Type: controlplanev1.EtcdClusterHealthyCondition, Status: status, Reason: reason, Message: message}
	}
	if !f.stacked || f.unknown != "" {
		switch failing := a.failing(true); {
		case len(failing) > 0 && f.stacked:
			return condition(metav1.ConditionFalse, controlplanev1.QuorumLostReason, "the API server cannot use etcd ("+strings.Join(failing, ", ")+"): no majority of the members works. "+majorityAdvice)
		case len(failing) > 0:
			return condition(metav1.ConditionFalse, controlplanev1.NotHealthyReason, "the API server's checks fail: "+strings.Join(failing, ", "))
		case a.err != nil && f.lostMachines() != "":
			return condition(metav1.ConditionFalse, controlplanev1.QuorumLostReason, f.lostMachines()+". "+majorityAdvice)
		case a.err != nil:
			return condition(metav1.ConditionUnknown, controlplanev1.WaitingForConnectionReason, a.problem())
		case f.stacked:
			return condition(metav1.ConditionUnknown, controlplanev1.HealthUnknownReason, f.unknown)
		}
		return condition(metav1.ConditionTrue, controlplanev1.HealthyReason, "")
	}
	v, problems := f.votes(), f.unhealthyMembers()
	for _, m := range f.strays {
		if !m.left {
			problems = append(problems, fmt.Sprintf("the etcd member %s belongs to no Machine", m.name))
		}
	}
	switch {
	case !v.quorum():
		return condition(metav1.ConditionFalse, controlplanev1.QuorumLostReason, fmt.Sprintf("%d of %d voting members work, %d are needed. %s: %s", v.healthy, v.voting, v.voting/2+1, majorityAdvice, join(problems)))
	case len(problems) > 0:
		return condition(metav1.ConditionFalse, controlplanev1.NotHealthyReason, join(problems))
	}
	return condition(metav1.ConditionTrue, controlplanev1.HealthyReason, "")
}

// componentsHealth is what is known of the API servers.
func componentsHealth(f fleet, a *reply) metav1.Condition {
	condition := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return metav1.Condition{Type: controlplanev1.ControlPlaneComponentsHealthyCondition, Status: status, Reason: reason, Message: message}
	}
	if a.err != nil {
		return condition(metav1.ConditionUnknown, controlplanev1.WaitingForConnectionReason, a.problem())
	}
	var problems []string
	if failing := a.failing(false); len(failing) > 0 {
		problems = append(problems, "the API server's checks fail: "+strings.Join(failing, ", "))
	}
	for _, i := range f.active() {
		if f.joined(i) && i.apiServer == metav1.ConditionFalse {
			problems = append(problems, fmt.Sprintf("the API server of Machine %s does not answer", i.name()))
		}
	}
	if len(problems) > 0 {
		return condition(metav1.ConditionFalse, controlplanev1.NotHealthyReason, join(problems))
	}
	return condition(metav1.ConditionTrue, controlplanev1.HealthyReason, "")
}

// setStatus sets all of the status that follows from the Machines and from what the steps have found.
func setStatus(s *scope) {
	cp := s.controlPlane
	cp.Status.ObservedGeneration = cp.Generation
	cp.Status.Selector = collections.ControlPlaneSelectorForCluster(s.cluster.Name).String()
	cp.Status.Versions = versions(s.machines)
	cp.Status.Version = "" // deprecated, and still read (CP-05)
	if len(cp.Status.Versions) > 0 {
		cp.Status.Version = cp.Status.Versions[0].Version // as above
	}
	cp.Status.Replicas = ptr.To(int32(len(s.machines)))
	cp.Status.ReadyReplicas = count(s.machines, clusterv1.ReadyCondition)
	cp.Status.AvailableReplicas = count(s.machines, clusterv1.AvailableCondition)
	cp.Status.UpToDateReplicas = count(s.machines, clusterv1.MachineUpToDateCondition)

	cp.Status.LastRemediation = lastRemediation(s)

	setHealth(s)
	setInitialized(s)
	setScaling(s)
	setRollingOut(s)
	setMachines(s, controlPlaneMachinesReady, clusterv1.ReadyCondition)
	setMachines(s, controlPlaneMachinesUpToDate, clusterv1.MachineUpToDateCondition)
	setUnchanged(s)
	setRemediating(s)
	setDeleting(s)
	setAvailable(s)
	// Flux, Argo CD and the contract v1beta1 wait for Ready: the control plane serves, and is as the spec wants it.
	if err := manager.SetReady(cp, clusterv1.AvailableCondition, controlPlaneMachinesReady, controlPlaneMachinesUpToDate); err != nil {
		setCondition(cp, clusterv1.ReadyCondition, metav1.ConditionUnknown, clusterv1.InternalErrorReason, err.Error())
	}
}

const (
	controlPlaneMachinesReady    = clusterv1.MachinesReadyCondition
	controlPlaneMachinesUpToDate = clusterv1.MachinesUpToDateCondition
)

// versions of the Machines from old to new, with how many have each (CP-05). A Machine has its version
// from the moment it is made: MachineSets wait for it.
func versions(machines collections.Machines) []clusterv1.StatusVersion {
	counts := map[string]int32{}
	for _, m := range machines {
		if m.Spec.Version != "" {
			counts[m.Spec.Version]++
		}
	}
	var out []clusterv1.StatusVersion
	for version, n := range counts {
		out = append(out, clusterv1.StatusVersion{Version: version, Replicas: n})
	}
	sort.Slice(out, func(i, j int) bool {
		a, errA := semver.ParseTolerant(out[i].Version)
		b, errB := semver.ParseTolerant(out[j].Version)
		if errA != nil || errB != nil || a.EQ(b) {
			return out[i].Version < out[j].Version
		}
		return a.LT(b)
	})
	return out
}

func count(machines collections.Machines, condition string) *int32 {
	return ptr.To(int32(len(machines.Filter(func(m *clusterv1.Machine) bool { return conditions.IsTrue(m, condition) }))))
}

func setInitialized(s *scope) {
	if s.initialized() {
		setCondition(s.controlPlane, controlplanev1.InitializedCondition, metav1.ConditionTrue, "Initialized", "")
		return
	}
	reason, message := controlplanev1.WaitingForAPIServerReason, "the API server has not answered through the endpoint yet"
	if len(s.machines) == 0 {
		reason, message = "NotInitialized", s.blocked
	}
	setCondition(s.controlPlane, controlplanev1.InitializedCondition, metav1.ConditionFalse, reason, message)
}

func setScaling(s *scope) {
	desired, current := int(ptr.Deref(s.controlPlane.Spec.Replicas, 1)), len(s.machines)
	if !s.controlPlane.DeletionTimestamp.IsZero() {
		desired = 0
	}
	scaling := func(kind string, active bool, reason, notReason, direction string, obstacles []string) {
		if !active {
			setCondition(s.controlPlane, kind, metav1.ConditionFalse, notReason, "")
			return
		}
		setCondition(s.controlPlane, kind, metav1.ConditionTrue, reason, blockedBy(obstacles, fmt.Sprintf("Scaling %s from %d to %d replicas", direction, current, desired)))
	}
	scaling(clusterv1.ScalingUpCondition, current < desired, clusterv1.ScalingUpReason, clusterv1.NotScalingUpReason, "up", obstacles(s))
	scaling(clusterv1.ScalingDownCondition, current > desired, clusterv1.ScalingDownReason, clusterv1.NotScalingDownReason, "down", append(obstacles(s), s.stuck()...))
}

// obstacles are what has to happen before the next step.
func obstacles(s *scope) []string {
	out := slices.Clone(s.departing)
	if s.blocked != "" {
		out = append(out, s.blocked)
	}
	return out
}

func blockedBy(obstacles []string, message string) string {
	if len(obstacles) > 0 {
		return message + " is blocked because:\n* " + strings.Join(obstacles, "\n* ")
	}
	return message
}

func setRollingOut(s *scope) {
	var reasons []string
	n := 0
	for _, m := range s.machines {
		if len(s.outdated[m.Name]) > 0 {
			n++
			reasons = append(reasons, s.outdated[m.Name]...)
		}
	}
	if n == 0 {
		setCondition(s.controlPlane, clusterv1.RollingOutCondition, metav1.ConditionFalse, clusterv1.NotRollingOutReason, inVain(s.controlPlane, s.machines.UnsortedList(), now()))
		return
	}
	sort.Strings(reasons)
	message := fmt.Sprintf("Rolling out %d not up-to-date replicas\n* %s", n, strings.Join(slices.Compact(reasons), "\n* "))
	if waits := obstacles(s); len(waits) > 0 {
		message += "\nThe next step waits: " + join(waits)
	}
	setCondition(s.controlPlane, clusterv1.RollingOutCondition, metav1.ConditionTrue, clusterv1.RollingOutReason, message)
}

func setRemediating(s *scope) {
	messages := slices.Clone(s.remediating)
	if open := readRecord(s.controlPlane, controlplanev1.RemediationInProgressAnnotation); open != nil && len(messages) == 0 {
		messages = append(messages, fmt.Sprintf("Machine %s is being replaced", open.Machine))
	}
	if len(messages) == 0 {
		setCondition(s.controlPlane, clusterv1.RemediatingCondition, metav1.ConditionFalse, clusterv1.NotRemediatingReason, "")
		return
	}
	setCondition(s.controlPlane, clusterv1.RemediatingCondition, metav1.ConditionTrue, clusterv1.RemediatingReason, "* "+strings.Join(messages, "\n* "))
}

// setMachines sums up a condition of the Machines.
func setMachines(s *scope, target, source string) {
	if len(s.machines) == 0 {
		setCondition(s.controlPlane, target, metav1.ConditionTrue, "NoReplicas", "")
		return
	}
	aggregate, err := conditions.NewAggregateCondition(s.machines.UnsortedList(), source, conditions.TargetConditionType(target))
	if err != nil {
		setCondition(s.controlPlane, target, metav1.ConditionUnknown, clusterv1.InternalErrorReason, err.Error())
		return
	}
	conditions.Set(s.controlPlane, *aggregate)
}

// setUnchanged says what could not be brought to the Machines in place.
func setUnchanged(s *scope) {
	if len(s.unchanged) > 0 {
		setCondition(s.controlPlane, controlPlaneMachinesUpToDate, metav1.ConditionFalse, controlplanev1.CannotChangeMachinesReason, "* "+strings.Join(shorten(s.unchanged), "\n* "))
	}
}

func setDeleting(s *scope) {
	if s.controlPlane.DeletionTimestamp.IsZero() {
		setCondition(s.controlPlane, clusterv1.DeletingCondition, metav1.ConditionFalse, clusterv1.NotDeletingReason, "")
		return
	}
	setCondition(s.controlPlane, clusterv1.DeletingCondition, metav1.ConditionTrue, s.deletingReason, s.deletingMessage)
}

// setAvailable says whether the control plane can serve: it did once, its certificates are there, and the
// API server answers through the endpoint and can use etcd. One machine of three that is lost changes nothing.
func setAvailable(s *scope) {
	var problems []string
	cp := s.controlPlane
	if !cp.DeletionTimestamp.IsZero() {
		problems = append(problems, "Control plane is being deleted")
	}
	if !s.initialized() {
		problems = append(problems, "Control plane not yet initialized")
	}
	if s.blocked != "" && len(s.machines) == 0 {
		problems = append(problems, s.blocked)
	}
	for _, kind := range []string{controlplanev1.CertificatesAvailableCondition, controlplanev1.KubeconfigAvailableCondition} {
		if c := conditions.Get(cp, kind); c != nil && c.Status != metav1.ConditionTrue {
			problems = append(problems, c.Type+": "+c.Message)
		}
	}
	if problem := s.answer.problem(); problem != "" {
		problems = append(problems, problem)
	}
	if len(problems) == 0 {
		setCondition(cp, clusterv1.AvailableCondition, metav1.ConditionTrue, clusterv1.AvailableReason, "")
		return
	}
	reason := clusterv1.NotAvailableReason
	if invalid(s) != "" {
		reason = controlplanev1.InvalidConfigurationReason
	}
	setCondition(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, reason, "* "+strings.Join(problems, "\n* "))
}

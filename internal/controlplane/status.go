package controlplane

import (
	"fmt"
	"slices"
	"sort"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
)

// setHealth sets the conditions of etcd and of the API servers after a request to the API server.
func setHealth(s *scope) {
	if s.Readiness == nil {
		return
	}
	f := s.Fleet()
	for _, c := range []metav1.Condition{model.EtcdHealth(f, s.Readiness, s.Initialized()), model.ComponentsHealth(f, s.Readiness)} {
		has := conditions.Get(s.Object, c.Type)
		if c.Status == metav1.ConditionUnknown && s.Interrupted && has != nil {
			continue // The last known state remains.
		}
		conditions.Set(s.Object, c)
	}
	measureQuorum(s)
}

// setStatus sets the status from the Machines and the results of the steps.
func setStatus(s *scope, found *result) {
	cp := s.Object
	cp.Status.Selector = collections.ControlPlaneSelectorForCluster(s.Cluster.Name).String()
	cp.Status.Versions = model.Versions(s.Machines)
	cp.Status.Version = "" // The field is deprecated, and clients still read it (CP-05).
	if len(cp.Status.Versions) > 0 {
		cp.Status.Version = cp.Status.Versions[0].Version
	}
	cp.Status.Replicas = ptr.To(int32(len(s.Machines)))
	cp.Status.ReadyReplicas = model.Count(s.Machines, clusterv1.ReadyCondition)
	cp.Status.AvailableReplicas = model.Count(s.Machines, clusterv1.AvailableCondition)
	cp.Status.UpToDateReplicas = model.Count(s.Machines, clusterv1.MachineUpToDateCondition)

	cp.Status.LastRemediation = s.LastRemediation()

	setHealth(s)
	setInitialized(s, found)
	setScaling(s, found)
	setMachines(s, clusterv1.MachinesReadyCondition, clusterv1.ReadyCondition)
	setMachines(s, clusterv1.MachinesUpToDateCondition, clusterv1.MachineUpToDateCondition)
	setRefused(s, found)
	if s.Outdated != nil || len(s.Machines) == 0 || !cp.DeletionTimestamp.IsZero() {
		setProgress(s, found)
	} // Otherwise a step failed before the Machines were compared with the spec: the last known state remains.
	setDeleting(s, found)
	setAvailable(s, found)
	// Flux, Argo CD and the contract v1beta1 wait for Ready: the control plane serves and matches the spec.
	if err := reconciling.SetReady(cp, clusterv1.AvailableCondition, clusterv1.MachinesReadyCondition, clusterv1.MachinesUpToDateCondition); err != nil {
		reconciling.SetCondition(cp, clusterv1.ReadyCondition, metav1.ConditionUnknown, clusterv1.InternalErrorReason, "%s", err)
	}
}

// setProgress sets the conditions about the changes of Machines.
func setProgress(s *scope, found *result) {
	setRollingOut(s, found)
	updating := model.UpdatingCondition(s.CompleteFleet(), s.Object.Spec.Rollout.Strategy.InPlace)
	reconciling.SetCondition(s.Object, updating.Type, updating.Status, updating.Reason, "%s", updating.Message)
	setRemediating(s, found)
}

func setInitialized(s *scope, found *result) {
	if s.Initialized() {
		reconciling.SetCondition(s.Object, controlplanev1.InitializedCondition, metav1.ConditionTrue, controlplanev1.InitializedReason, "")
		return
	}
	reason, message := controlplanev1.WaitingForAPIServerReason, "the API server has not answered through the endpoint yet"
	if len(s.Machines) == 0 {
		reason, message = controlplanev1.NotInitializedReason, found.blocked
	}
	reconciling.SetCondition(s.Object, controlplanev1.InitializedCondition, metav1.ConditionFalse, reason, "%s", message)
}

func setScaling(s *scope, found *result) {
	desired, current := int(ptr.Deref(s.Object.Spec.Replicas, 1)), len(s.Machines)
	if !s.Object.DeletionTimestamp.IsZero() {
		desired = 0
	}
	scaling := func(kind string, active bool, reason, notReason, direction string, obstacles []string) {
		if !active {
			reconciling.SetCondition(s.Object, kind, metav1.ConditionFalse, notReason, "")
			return
		}
		reconciling.SetCondition(s.Object, kind, metav1.ConditionTrue, reason, "%s", blockedBy(obstacles, fmt.Sprintf("Scaling %s from %d to %d replicas", direction, current, desired)))
	}
	scaling(clusterv1.ScalingUpCondition, current < desired, clusterv1.ScalingUpReason, clusterv1.NotScalingUpReason, "up", obstacles(found))
	scaling(clusterv1.ScalingDownCondition, current > desired, clusterv1.ScalingDownReason, clusterv1.NotScalingDownReason, "down", append(obstacles(found), s.StuckMachines()...))
}

// obstacles returns the reasons why the next step waits.
func obstacles(found *result) []string {
	out := slices.Clone(found.departing)
	if found.blocked != "" {
		out = append(out, found.blocked)
	}
	return out
}

func blockedBy(obstacles []string, message string) string {
	if len(obstacles) > 0 {
		return message + " is blocked because:\n* " + strings.Join(obstacles, "\n* ")
	}
	return message
}

func setRollingOut(s *scope, found *result) {
	var reasons []string
	n := 0
	for _, m := range s.Machines {
		if len(s.Outdated[m.Name]) > 0 {
			n++
			reasons = append(reasons, s.Outdated[m.Name]...)
		}
	}
	if n == 0 {
		reconciling.SetCondition(s.Object, clusterv1.RollingOutCondition, metav1.ConditionFalse, clusterv1.NotRollingOutReason, "%s", model.FutileRollouts(s.Object, s.Machines.UnsortedList(), s.Now))
		return
	}
	sort.Strings(reasons)
	message := fmt.Sprintf("Rolling out %d not up-to-date replicas\n* %s", n, strings.Join(slices.Compact(reasons), "\n* "))
	if waits := obstacles(found); len(waits) > 0 {
		message += "\nThe next step waits: " + model.JoinReasons(waits)
	}
	reconciling.SetCondition(s.Object, clusterv1.RollingOutCondition, metav1.ConditionTrue, clusterv1.RollingOutReason, "%s", message)
}

func setRemediating(s *scope, found *result) {
	messages := slices.Clone(found.remediating)
	if open := model.ReadRemediationRecord(s.Object, controlplanev1.RemediationInProgressAnnotation); open != nil && len(messages) == 0 {
		messages = append(messages, fmt.Sprintf("Machine %s is being replaced", open.Machine))
	}
	if len(messages) == 0 {
		reconciling.SetCondition(s.Object, clusterv1.RemediatingCondition, metav1.ConditionFalse, clusterv1.NotRemediatingReason, "")
		return
	}
	reconciling.SetCondition(s.Object, clusterv1.RemediatingCondition, metav1.ConditionTrue, clusterv1.RemediatingReason, "* %s", strings.Join(messages, "\n* "))
}

// setMachines aggregates a condition of the Machines.
func setMachines(s *scope, target, source string) {
	if len(s.Machines) == 0 {
		reconciling.SetCondition(s.Object, target, metav1.ConditionTrue, clusterv1.NoReplicasReason, "")
		return
	}
	aggregate, err := conditions.NewAggregateCondition(s.Machines.UnsortedList(), source, conditions.TargetConditionType(target))
	if err != nil {
		reconciling.SetCondition(s.Object, target, metav1.ConditionUnknown, clusterv1.InternalErrorReason, "%s", err)
		return
	}
	conditions.Set(s.Object, *aggregate)
}

// setRefused reports the in-place changes that Machines refused.
func setRefused(s *scope, found *result) {
	if len(found.refused) > 0 {
		reconciling.SetCondition(s.Object, clusterv1.MachinesUpToDateCondition, metav1.ConditionFalse, controlplanev1.CannotChangeMachinesReason, "* %s", strings.Join(model.Shorten(found.refused), "\n* "))
	}
}

func setDeleting(s *scope, found *result) {
	if s.Object.DeletionTimestamp.IsZero() {
		reconciling.SetCondition(s.Object, clusterv1.DeletingCondition, metav1.ConditionFalse, clusterv1.NotDeletingReason, "")
		return
	}
	reconciling.SetCondition(s.Object, clusterv1.DeletingCondition, metav1.ConditionTrue, found.deletingReason, "%s", found.deletingMessage)
}

// setAvailable reports whether the control plane serves: it is initialized, its certificates exist, the API server answers
// through the endpoint and can use etcd, and no invalid setting prevents the replacement of a machine. The loss of one machine of three
// does not change it.
func setAvailable(s *scope, found *result) {
	var problems []string
	cp := s.Object
	if !cp.DeletionTimestamp.IsZero() {
		problems = append(problems, "Control plane is being deleted")
	}
	if !s.Initialized() {
		problems = append(problems, "Control plane not yet initialized")
	}
	wrong := invalid(s)
	if wrong != "" {
		problems = append(problems, wrong)
	} else if found.blocked != "" && len(s.Machines) == 0 {
		problems = append(problems, found.blocked)
	}
	for _, kind := range []string{controlplanev1.CertificatesAvailableCondition, controlplanev1.KubeconfigAvailableCondition} {
		if c := conditions.Get(cp, kind); c != nil && c.Status != metav1.ConditionTrue {
			problems = append(problems, c.Type+": "+c.Message)
		}
	}
	if problem := s.Readiness.Problem(); problem != "" {
		problems = append(problems, problem)
	}
	switch message := strings.Join(problems, "\n* "); {
	case wrong != "":
		reconciling.SetCondition(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, controlplanev1.InvalidConfigurationReason, "* %s", message)
	case len(problems) > 0:
		reconciling.SetCondition(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, clusterv1.NotAvailableReason, "* %s", message)
	case s.Readiness != nil:
		reconciling.SetCondition(cp, clusterv1.AvailableCondition, metav1.ConditionTrue, clusterv1.AvailableReason, "")
	case !conditions.Has(cp, clusterv1.AvailableCondition):
		reconciling.SetCondition(cp, clusterv1.AvailableCondition, metav1.ConditionUnknown, controlplanev1.WaitingForConnectionReason, "no request was sent to the API server yet")
	} // Otherwise a step failed before the request to the API server: the last known state remains.
}

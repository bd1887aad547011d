package model

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// Readiness is the answer of the API server's /readyz.
type Readiness struct {
	Ready  bool
	Failed []string
	Err    error
}

// ErrRefused means that no request was sent to the API server.
var ErrRefused = errors.New("the API server cannot be checked, because the kubeconfig is refused: see KubeconfigAvailable")

// Refused reports whether no request was sent. Then nothing is known about the API server: it is not silent.
func (a *Readiness) Refused() bool { return a != nil && errors.Is(a.Err, ErrRefused) }

// Problem returns the reason why the cluster cannot be used through its endpoint; "" when it can.
func (a *Readiness) Problem() string {
	switch {
	case a == nil || a.Err == nil && a.Ready:
		return ""
	case a.Refused():
		return a.Err.Error()
	case a.Err != nil:
		return "the API server does not answer through the endpoint"
	}
	return "the API server's checks fail: " + strings.Join(a.Failed, ", ")
}

// failing returns the failed checks of etcd, or all others.
func (a *Readiness) failing(etcd bool) []string {
	if a == nil || a.Ready || a.Err != nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(a.Failed), func(check string) bool { return strings.HasPrefix(check, "etcd") != etcd })
}

// UsesEtcd reports whether the API server answers and its etcd has a majority.
func (a *Readiness) UsesEtcd() bool { return a != nil && a.Err == nil && len(a.failing(true)) == 0 }

// majorityAdvice recommends no restore: a restore destroys the existing Machines, and most of them come back without it.
const majorityAdvice = "docs/control-plane.md describes how to act when the majority is lost"

// EtcdHealth returns the condition EtcdClusterHealthy. The reports of the members count. Without reports, for an external
// etcd or silent machines, the checks of the API server count. started is false until the API server has answered: before, and without
// voting members, there is no majority to lose.
func EtcdHealth(f Fleet, a *Readiness, started bool) metav1.Condition {
	condition := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return metav1.Condition{Type: controlplanev1.EtcdClusterHealthyCondition, Status: status, Reason: reason, Message: message}
	}
	if !f.Stacked || f.Unknown != "" {
		switch failing := a.failing(true); {
		case len(failing) > 0 && f.Stacked && !started:
			return condition(metav1.ConditionUnknown, controlplanev1.HealthUnknownReason, "the API server cannot use etcd yet ("+strings.Join(failing, ", ")+")")
		case len(failing) > 0 && f.Stacked:
			return condition(metav1.ConditionFalse, controlplanev1.QuorumLostReason, "the API server cannot use etcd ("+strings.Join(failing, ", ")+"): no majority of the members works. "+majorityAdvice)
		case len(failing) > 0:
			return condition(metav1.ConditionFalse, controlplanev1.NotHealthyReason, "the API server's checks fail: "+strings.Join(failing, ", "))
		case a.Err != nil && f.lostMachines() != "":
			return condition(metav1.ConditionFalse, controlplanev1.QuorumLostReason, f.lostMachines()+". "+majorityAdvice)
		case a.Err != nil:
			return condition(metav1.ConditionUnknown, controlplanev1.WaitingForConnectionReason, a.Problem())
		case f.Stacked:
			return condition(metav1.ConditionUnknown, controlplanev1.HealthUnknownReason, f.Unknown)
		}
		return condition(metav1.ConditionTrue, controlplanev1.HealthyReason, "")
	}
	v, problems := f.Votes(), f.unhealthyMembers()
	for _, m := range f.Unassigned {
		if !m.Left {
			problems = append(problems, fmt.Sprintf("the etcd member %s belongs to no Machine", m.Name))
		}
	}
	switch {
	case v.Voting == 0:
		return condition(metav1.ConditionUnknown, controlplanev1.HealthUnknownReason, "etcd has no voting member")
	case !v.quorum():
		return condition(metav1.ConditionFalse, controlplanev1.QuorumLostReason, fmt.Sprintf("%d of %d voting members work, %d are needed. %s: %s", v.Healthy, v.Voting, v.Voting/2+1, majorityAdvice, JoinReasons(problems)))
	case len(problems) > 0:
		return condition(metav1.ConditionFalse, controlplanev1.NotHealthyReason, JoinReasons(problems))
	}
	return condition(metav1.ConditionTrue, controlplanev1.HealthyReason, "")
}

// ComponentsHealth returns the condition ControlPlaneComponentsHealthy.
func ComponentsHealth(f Fleet, a *Readiness) metav1.Condition {
	condition := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return metav1.Condition{Type: controlplanev1.ControlPlaneComponentsHealthyCondition, Status: status, Reason: reason, Message: message}
	}
	if a.Err != nil {
		return condition(metav1.ConditionUnknown, controlplanev1.WaitingForConnectionReason, a.Problem())
	}
	var problems []string
	if failing := a.failing(false); len(failing) > 0 {
		problems = append(problems, "the API server's checks fail: "+strings.Join(failing, ", "))
	}
	for _, i := range f.active() {
		if f.joined(i) && i.apiServer == metav1.ConditionFalse {
			problems = append(problems, fmt.Sprintf("the API server of Machine %s does not answer", i.Name()))
		}
	}
	if len(problems) > 0 {
		return condition(metav1.ConditionFalse, controlplanev1.NotHealthyReason, JoinReasons(problems))
	}
	return condition(metav1.ConditionTrue, controlplanev1.HealthyReason, "")
}

// MachineHealth returns the conditions of a Machine's components. An API server whose Lease is new to this manager has no
// condition until the Lease is renewed.
func MachineHealth(i *Instance, f Fleet) []metav1.Condition {
	var out []metav1.Condition
	if i.apiServer != metav1.ConditionUnknown || f.Unknown != "" {
		out = append(out, apiServerHealthy(i, f))
	}
	if f.Stacked {
		out = append(out, memberCondition(i, f))
	}
	return out
}

// UpToDate returns the condition UpToDate of a Machine (CP-18). reasons are the differences from the spec, one a line of the
// message; without any the Machine is up to date.
func UpToDate(reasons []string) metav1.Condition {
	if len(reasons) == 0 {
		return metav1.Condition{Type: clusterv1.MachineUpToDateCondition, Status: metav1.ConditionTrue, Reason: clusterv1.MachineUpToDateReason}
	}
	return metav1.Condition{
		Type: clusterv1.MachineUpToDateCondition, Status: metav1.ConditionFalse, Reason: clusterv1.MachineNotUpToDateReason,
		Message: "* " + strings.Join(reasons, "\n* "),
	}
}

func healthCondition(kind string, status metav1.ConditionStatus, message string) metav1.Condition {
	switch status {
	case metav1.ConditionTrue:
		return metav1.Condition{Type: kind, Status: status, Reason: controlplanev1.HealthyReason}
	case metav1.ConditionFalse:
		return metav1.Condition{Type: kind, Status: status, Reason: controlplanev1.NotHealthyReason, Message: message}
	}
	return metav1.Condition{Type: kind, Status: metav1.ConditionUnknown, Reason: controlplanev1.HealthUnknownReason, Message: message}
}

func apiServerHealthy(i *Instance, f Fleet) metav1.Condition {
	message := "The API server has not renewed its Lease"
	if i.apiServer == metav1.ConditionUnknown {
		message = f.Unknown
	}
	return healthCondition(controlplanev1.MachineAPIServerHealthyCondition, i.apiServer, message)
}

func memberCondition(i *Instance, f Fleet) metav1.Condition {
	kind := controlplanev1.MachineEtcdMemberHealthyCondition
	switch {
	case f.Unknown != "":
		return healthCondition(kind, metav1.ConditionUnknown, f.Unknown)
	case i.Member == nil:
		return healthCondition(kind, metav1.ConditionFalse, "The Machine has no etcd member yet")
	case !i.Member.voting:
		return healthCondition(kind, metav1.ConditionFalse, "The etcd member has no vote: "+i.Member.detail)
	}
	return healthCondition(kind, i.Member.health, i.Member.detail)
}

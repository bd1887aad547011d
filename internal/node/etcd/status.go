package etcd

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

const (
	// unreachableAfter is the delay after which the condition of a silent member changes. A quorum counts the member as
	// unhealthy from the first missing answer.
	unreachableAfter = 4 * time.Second
	// The status contains a new size only after a change by this amount and by this fraction.
	sizeStep = 1 << 20
	sizePart = 20
)

var errNotProbed = errors.New("it has not started")

// status returns the fields and conditions of an EtcdMember that the leader's agent owns. It does not contain those of
// the machine's own agent.
func (v view) status(o etcdv1.EtcdMember) etcdv1.EtcdMemberStatus {
	old := o.Status
	m, found := v.member(o)
	if !found {
		return v.statusWithout(o)
	}
	status := etcdv1.EtcdMemberStatus{
		MemberID: hexID(m.ID), Learner: ptr.To(m.Learner), Leader: ptr.To(m.ID == v.self),
		Version: old.Version, DBSizeBytes: old.DBSizeBytes, DBInUseBytes: old.DBInUseBytes, Alarms: m.Alarms,
	}
	if m.Err == nil {
		status.Version = m.Version
		status.DBSizeBytes = rounded(old.DBSizeBytes, m.Size)
		status.DBInUseBytes = rounded(old.DBInUseBytes, m.InUse)
	}
	status.Conditions = v.conditions(old.Conditions, joined(m), v.health(m, old))
	if o.Spec.Leave && m.Started() && !m.Learner {
		d := v.departure(m)
		leaving := metav1.Condition{Type: etcdv1.LeavingCondition, Status: metav1.ConditionFalse, Reason: d.reason, Message: d.message}
		if d.reason == etcdv1.ApprovedReason {
			leaving.Status = metav1.ConditionTrue
		}
		status.Conditions = append(status.Conditions, v.conditions(old.Conditions, leaving)...)
	}
	return status
}

// statusWithout returns the status of an object without a member.
func (v view) statusWithout(o etcdv1.EtcdMember) etcdv1.EtcdMemberStatus {
	status := etcdv1.EtcdMemberStatus{MemberID: o.Status.MemberID}
	c := metav1.Condition{Type: etcdv1.JoinedCondition, Status: metav1.ConditionFalse}
	switch {
	case o.Spec.Leave:
		c.Reason, c.Message = etcdv1.LeftReason, "The member was removed and does not return"
	case o.Status.MemberID != "":
		c.Reason = etcdv1.NotStartedReason
		c.Message = "The member was removed from etcd, but spec.leave is not set: its machine must be replaced, unless it is joining again"
	default:
		c.Reason, c.Message = etcdv1.NotStartedReason, "The machine has not requested membership yet"
	}
	health := metav1.Condition{
		Type: etcdv1.HealthyCondition, Status: metav1.ConditionUnknown, Reason: etcdv1.NotProbedReason, Message: "etcd does not have this member",
	}
	status.Conditions = v.conditions(o.Status.Conditions, c, health)
	return status
}

func joined(m Member) metav1.Condition {
	c := metav1.Condition{Type: etcdv1.JoinedCondition, Status: metav1.ConditionFalse}
	switch {
	case !m.Started():
		c.Reason, c.Message = etcdv1.NotStartedReason, "The member was added and has not started yet"
	case m.Learner:
		c.Reason, c.Message = etcdv1.LearnerReason, "The member receives the data and has no vote yet"
	default:
		c.Status, c.Reason = metav1.ConditionTrue, etcdv1.VotingReason
	}
	return c
}

func (v view) health(m Member, old etcdv1.EtcdMemberStatus) metav1.Condition {
	c := metav1.Condition{Type: etcdv1.HealthyCondition, Status: metav1.ConditionFalse}
	switch {
	case !m.Started():
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, etcdv1.NotProbedReason, "The member has not started yet"
	case m.Err != nil:
		before := apimeta.FindStatusCondition(old.Conditions, etcdv1.HealthyCondition)
		if before != nil && (v.now.Sub(v.failing[m.ID]) < unreachableAfter || before.Reason == etcdv1.UnreachableReason) {
			return *before // The message is kept as well, because the errors of a silent member differ at each attempt.
		}
		c.Reason, c.Message = etcdv1.UnreachableReason, "The member does not answer: "+m.Err.Error()
	case len(m.Alarms) > 0:
		c.Reason, c.Message = etcdv1.AlarmReason, "The member has raised "+strings.Join(m.Alarms, ", ")
	case m.Leader != v.self:
		c.Reason, c.Message = etcdv1.NoLeaderReason, "The member answers, but does not follow the leader"
	default:
		c.Status, c.Reason = metav1.ConditionTrue, etcdv1.HealthyReason
	}
	return c
}

// confirmedBy returns an error unless the members that v reports as healthy answered later and follow the same leader. A busy member cannot
// answer.
func (v view) confirmedBy(later []Member, busy Member) error {
	for i, m := range v.members {
		o, _ := v.object(m)
		switch {
		case m.ID == busy.ID || v.health(m, o.Status).Status != metav1.ConditionTrue:
		case later[i].Err != nil:
			return fmt.Errorf("expected an answer of the member %s, found: %w", m.Name, later[i].Err)
		case later[i].Leader != v.self:
			return fmt.Errorf("expected the member %s to follow the leader %s, found the leader %s", m.Name, hexID(v.self), hexID(later[i].Leader))
		}
	}
	return nil
}

// conditions sets the transition time of each condition.
func (v view) conditions(old []metav1.Condition, conditions ...metav1.Condition) []metav1.Condition {
	for i := range conditions {
		c := &conditions[i]
		c.LastTransitionTime = metav1.NewTime(v.now.Truncate(time.Second))
		if before := apimeta.FindStatusCondition(old, c.Type); before != nil && before.Status == c.Status {
			c.LastTransitionTime = before.LastTransitionTime
		}
	}
	return conditions
}

// rounded returns the size rounded up to a mebibyte, or the old size if the difference is small.
func rounded(old *int64, size int64) *int64 {
	if old != nil && max(size-*old, *old-size) < max(sizeStep, *old/sizePart) {
		return old
	}
	return ptr.To((size + sizeStep - 1) / sizeStep * sizeStep)
}

// differs reports whether the fields of the leader's agent have changed.
func differs(have, want etcdv1.EtcdMemberStatus) bool {
	own := etcdv1.EtcdMemberStatus{
		MemberID: have.MemberID, Learner: have.Learner, Leader: have.Leader, Version: have.Version,
		DBSizeBytes: have.DBSizeBytes, DBInUseBytes: have.DBInUseBytes, Alarms: have.Alarms,
	}
	for _, c := range have.Conditions {
		if c.Type != etcdv1.ServingCondition {
			own.Conditions = append(own.Conditions, c)
		}
	}
	for _, s := range []*etcdv1.EtcdMemberStatus{&own, &want} {
		s.Conditions = slices.Clone(s.Conditions)
		for i := range s.Conditions {
			s.Conditions[i].LastTransitionTime = metav1.NewTime(s.Conditions[i].LastTransitionTime.UTC())
		}
		slices.SortFunc(s.Conditions, func(a, b metav1.Condition) int { return strings.Compare(a.Type, b.Type) })
		if len(s.Alarms) == 0 {
			s.Alarms = nil
		}
	}
	return !reflect.DeepEqual(own, want)
}

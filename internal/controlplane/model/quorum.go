package model

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Votes in etcd. A member of unknown health counts as unhealthy.
type Votes struct{ Voting, Healthy int }

// quorum reports whether a majority of the voting members works.
func (v Votes) quorum() bool { return v.Voting > 0 && v.Healthy >= v.Voting/2+1 }

// Votes counts the present members, except the named ones.
func (f Fleet) Votes(without ...string) Votes {
	var out Votes
	for _, m := range f.Members() {
		if !m.voting || slices.Contains(without, m.Name) {
			continue
		}
		out.Voting++
		if m.health == metav1.ConditionTrue {
			out.Healthy++
		}
	}
	return out
}

// CannotRemove returns the reason why members cannot be removed from etcd now; "" when they can. A majority has to agree on
// the removal, and the remaining members need a majority afterwards, also while an update in place restarts one of them.
func (f Fleet) CannotRemove(names ...string) string {
	if !f.Stacked {
		return ""
	}
	if f.Unknown != "" {
		return f.Unknown
	}
	for _, m := range f.Members() {
		if m.Leave && !slices.Contains(names, m.Name) && !f.inTheWay(m, names) {
			return fmt.Sprintf("the etcd member %s is leaving; one leaves at a time", m.Name)
		}
	}
	now, after := f.Votes(), f.Votes(names...)
	switch {
	case !now.quorum():
		return fmt.Sprintf("etcd has no quorum: %d of %d voting members are healthy", now.Healthy, now.Voting)
	case after.Voting == 0:
		return "it is the last voting member of etcd: its removal would delete the cluster's data"
	case !after.quorum():
		return fmt.Sprintf("etcd would lose its quorum: of the %d other voting members %d are healthy, %d are needed", after.Voting, after.Healthy, after.Voting/2+1)
	}
	restarting := f.Filter(func(i *Instance) bool {
		return memberHealthy(i) && i.Member.voting && i.Update.restarts() && !slices.Contains(names, i.Member.Name)
	})
	if len(restarting) > 0 && f.haveVotes(names) && !(Votes{after.Voting, after.Healthy - len(restarting)}).quorum() {
		return fmt.Sprintf("etcd would lose its quorum if the update in place of Machine %s restarts its etcd member: the update has to end first", restarting[0].Name())
	}
	return ""
}

// haveVotes reports whether one of the named members may take part in decisions of etcd. The removal of a dead member or a learner
// leaves as many votes as before.
func (f Fleet) haveVotes(names []string) bool {
	return slices.ContainsFunc(f.Members(), func(m Member) bool {
		return slices.Contains(names, m.Name) && m.voting && m.health != metav1.ConditionFalse
	})
}

// inTheWay reports whether the named members are dead, and a healthy leaving member may wait for their removal. The dead
// members leave first, because otherwise the quorum would be lost.
func (f Fleet) inTheWay(leaving Member, names []string) bool {
	for _, m := range f.Members() {
		if slices.Contains(names, m.Name) && m.health != metav1.ConditionFalse {
			return false
		}
	}
	return leaving.health == metav1.ConditionTrue
}

// unhealthyMembers describes the voting members that are not known to work, except the named ones.
func (f Fleet) unhealthyMembers(but ...string) []string {
	var out []string
	for _, m := range f.Members() {
		if m.voting && m.health != metav1.ConditionTrue && !slices.Contains(but, m.Name) {
			out = append(out, fmt.Sprintf("the etcd member %s is not healthy: %s", m.Name, m.detail))
		}
	}
	return out
}

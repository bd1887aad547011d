package controlplane

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// votes of etcd. Unknown health counts as not healthy.
type votes struct{ voting, healthy int }

// quorum says whether a majority of the voting members works.
func (v votes) quorum() bool { return v.voting > 0 && v.healthy >= v.voting/2+1 }

// votes of the members that are there, without those named.
func (f fleet) votes(without ...string) votes {
	var out votes
	for _, m := range f.members() {
		if !m.voting || slices.Contains(without, m.name) {
			continue
		}
		out.voting++
		if m.health == metav1.ConditionTrue {
			out.healthy++
		}
	}
	return out
}

// unsafe says why members cannot be removed from etcd now; "" when they can. Their removal is a
// decision that a majority of all has to agree on, and the others need a majority afterwards.
func (f fleet) unsafe(names ...string) string {
	if !f.stacked {
		return ""
	}
	if f.unknown != "" {
		return f.unknown
	}
	for _, m := range f.members() {
		if m.leave && !slices.Contains(names, m.name) && !f.inTheWay(m, names) {
			return fmt.Sprintf("the etcd member %s is leaving; one leaves at a time", m.name)
		}
	}
	now, after := f.votes(), f.votes(names...)
	switch {
	case !now.quorum():
		return fmt.Sprintf("etcd has no quorum: %d of %d voting members are healthy", now.healthy, now.voting)
	case after.voting == 0:
		return "it is the last voting member of etcd: the cluster's data would be gone"
	case !after.quorum():
		return fmt.Sprintf("etcd would lose its quorum: of the %d other voting members %d are healthy, %d are needed", after.voting, after.healthy, after.voting/2+1)
	}
	return ""
}

// inTheWay says that those named are dead members that one which is leaving may be waiting for: they go
// first, as they are what its leave would cost the quorum.
func (f fleet) inTheWay(leaving member, names []string) bool {
	for _, m := range f.members() {
		if slices.Contains(names, m.name) && m.health != metav1.ConditionFalse {
			return false
		}
	}
	return leaving.health == metav1.ConditionTrue
}

// unhealthyMembers says which voting members, but for those named, are not known to work.
func (f fleet) unhealthyMembers(but ...string) []string {
	var out []string
	for _, m := range f.members() {
		if m.voting && m.health != metav1.ConditionTrue && !slices.Contains(but, m.name) {
			out = append(out, fmt.Sprintf("the etcd member %s is not healthy: %s", m.name, m.what))
		}
	}
	return out
}

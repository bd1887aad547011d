package etcd

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/order"
)

const (
	// unstartedTimeout is the longest time until a member without an EtcdMember starts. Announced members have as long as
	// their machine, because the control plane provider decides when to replace it.
	unstartedTimeout = 5 * time.Minute
	// promoteAfter is the longest time until the machine of a learner asks for its vote.
	promoteAfter = 5 * time.Second
	// stopTimeout is the longest time until a healthy machine that may leave has stopped its API server.
	stopTimeout = 20 * time.Second

	// A file is defragmented when at least defragWaste bytes and more than half of it are free, at most once per
	// defragEvery, because etcd serves no requests meanwhile.
	defragWaste = 128 << 20
	defragEvery = time.Hour
	// The alarm of a member that ran out of space is disarmed when a fifth of the quota is free.
	spaceRegained = 0.8
	// compactEvery is the period of compactions while there is no space, because the API server cannot compact then.
	compactEvery = time.Minute

	alarmNoSpace = "NOSPACE"
)

// view is the input of decisions.
type view struct {
	now time.Time
	// self is the leader, whose agent decides.
	self    uint64
	members []Member
	// former are members that etcd does not have any more, with the alarm NOSPACE: a removal and a restore keep it.
	former  []Member
	objects map[string]etcdv1.EtcdMember
	memory
}

// memory contains the observations of a leader's agent since the member leads.
type memory struct {
	// unstarted contains the times since when members without a start are known.
	unstarted map[uint64]time.Time
	// approved contains the times since when machines may leave.
	approved map[string]time.Time
	// learning contains the times since when learners answer.
	learning map[uint64]time.Time
	// failing contains the times since when members do not answer.
	failing     map[uint64]time.Time
	defragments map[uint64]time.Time
	// compacted is the time of the last compaction for space, compactedRevision its revision.
	compacted         time.Time
	compactedRevision int64
	led               time.Time
	// busySince is the time since when a change is in progress.
	busySince time.Time
}

type actionKind string

const (
	actNone       actionKind = ""
	actRemove     actionKind = "remove member"
	actMoveLeader actionKind = "move leadership"
	actPromote    actionKind = "promote learner"
	actCompact    actionKind = "compact history"
	actDefragment actionKind = "defragment"
	actDisarm     actionKind = "disarm alarm"
)

// action is a change to a member. To move the leadership, it contains the new leader.
type action struct {
	kind   actionKind
	member Member
	why    string
}

// healthy returns whether a member counts for a quorum: it answers, and follows the same leader.
func (v view) healthy(m Member) bool {
	return m.Started() && m.Err == nil && m.Leader == v.self && !slices.Contains(m.Alarms, "CORRUPT")
}

// object returns the object of a member, by its name, or by its address if it has no name yet. A machine may have the
// address of a former member.
func (v view) object(m Member) (etcdv1.EtcdMember, bool) {
	if m.Started() {
		o, found := v.objects[m.Name]
		return o, found
	}
	var best etcdv1.EtcdMember
	for _, o := range v.objects {
		if !slices.Contains(m.PeerURLs, o.Spec.PeerURL) {
			continue
		}
		if best.Name == "" || cmp.Or(order.TrueFirst(!o.Spec.Leave, !best.Spec.Leave), strings.Compare(o.Name, best.Name)) < 0 {
			best = o
		}
	}
	return best, best.Name != ""
}

// member returns the member of an object.
func (v view) member(o etcdv1.EtcdMember) (Member, bool) {
	for _, m := range v.members {
		if mine, found := v.object(m); found && mine.Name == o.Name {
			return m, true
		}
	}
	return Member{}, false
}

func (v view) leaving(m Member) bool {
	o, found := v.object(m)
	return found && o.Spec.Leave
}

// quorumWithout returns whether the voters except one have a quorum of healthy members, and an explanation.
func (v view) quorumWithout(leaver Member) (bool, string) {
	voters, healthy := 0, 0
	var sick []string
	for _, m := range v.members {
		if m.Learner || m.ID == leaver.ID {
			continue
		}
		voters++
		if v.healthy(m) {
			healthy++
		} else {
			sick = append(sick, m.Name)
		}
	}
	if voters == 0 {
		return false, "it is the last voting member"
	}
	if healthy >= voters/2+1 {
		return true, ""
	}
	return false, fmt.Sprintf("without it %d of %d voting members would be healthy, and %d are needed; not healthy: %s",
		healthy, voters, voters/2+1, strings.Join(sick, ", "))
}

// departure is the progress of a voting member whose object has leave set.
type departure struct {
	reason  string // of the condition Leaving
	message string
	// now is true if the member can be removed at once.
	now bool
	// heir leads next if the leaver is the leader.
	heir Member
}

// leavers returns the voters that must leave, in order: members that do not answer, then members that were approved, then
// members that do not lead.
func (v view) leavers() []Member {
	var out []Member
	for _, m := range v.members {
		if m.Started() && !m.Learner && v.leaving(m) {
			out = append(out, m)
		}
	}
	announced := func(m Member) bool {
		return apimeta.IsStatusConditionTrue(v.objects[m.Name].Status.Conditions, etcdv1.LeavingCondition)
	}
	slices.SortFunc(out, func(a, b Member) int {
		return cmp.Or(order.TrueFirst(!v.healthy(a), !v.healthy(b)), order.TrueFirst(announced(a), announced(b)),
			order.TrueFirst(a.ID != v.self, b.ID != v.self), strings.Compare(a.Name, b.Name))
	})
	return out
}

// departure returns the progress of a voter that must leave. Voters leave one at a time.
func (v view) departure(m Member) departure {
	if next := v.leavers()[0]; next.ID != m.ID {
		return departure{reason: etcdv1.QuorumAtRiskReason, message: "Members leave one at a time, and " + next.Name + " is the next"}
	}
	if ok, why := v.quorumWithout(m); !ok {
		return departure{reason: etcdv1.QuorumAtRiskReason, message: "The member waits: " + why}
	}
	if m.ID == v.self {
		heir, found := v.heir()
		if !found {
			return departure{reason: etcdv1.QuorumAtRiskReason, message: "The member leads, and no healthy member remains that could lead"}
		}
		return departure{reason: etcdv1.MovingLeadershipReason, message: "The member leads: " + heir.Name + " must lead first", heir: heir}
	}
	since, approved := v.approved[m.Name]
	stopped := apimeta.IsStatusConditionFalse(v.objects[m.Name].Status.Conditions, etcdv1.ServingCondition)
	return departure{
		reason: etcdv1.ApprovedReason, message: "The other members have a quorum without this member",
		now: stopped || !v.healthy(m) || approved && v.now.Sub(since) >= stopTimeout,
	}
}

// heir returns the next leader when the leader leaves: the first healthy voter, by name, that stays.
func (v view) heir() (Member, bool) {
	var best Member
	for _, m := range v.members {
		if m.ID != v.self && !m.Learner && v.healthy(m) && !v.leaving(m) && (best.ID == 0 || m.Name < best.Name) {
			best = m
		}
	}
	return best, best.ID != 0
}

// decide returns the next action. It uses only the answers of the last check.
func decide(v view) action {
	for _, rule := range []func(view) action{removeUnstarted, removeLeaver, promote, mendSpace, defragment} {
		if a := rule(v); a.kind != actNone {
			return a
		}
	}
	return action{}
}

// removeUnstarted removes members that never started: those that must leave, and those without an EtcdMember. None of them
// has data or a vote that counts.
func removeUnstarted(v view) action {
	for _, m := range v.members {
		if m.Started() {
			continue
		}
		if v.leaving(m) {
			return action{actRemove, m, "it must leave and never started"}
		}
		if _, announced := v.object(m); !announced && v.now.Sub(v.unstarted[m.ID]) >= unstartedTimeout {
			return action{actRemove, m, "it never started, and no EtcdMember announces it"}
		}
	}
	return action{}
}

// removeLeaver removes one member that must leave, learners first, because they have no vote.
func removeLeaver(v view) action {
	for _, m := range v.members {
		if m.Started() && m.Learner && v.leaving(m) {
			return action{actRemove, m, "it must leave"}
		}
	}
	leavers := v.leavers()
	if len(leavers) == 0 {
		return action{}
	}
	switch d := v.departure(leavers[0]); {
	case d.now:
		return action{actRemove, leavers[0], "it must leave"}
	case d.heir.ID != 0:
		return action{actMoveLeader, d.heir, "the leader must leave"}
	}
	return action{}
}

// promote gives a learner its vote; etcd refuses while the learner is behind. Machines ask for their vote themselves, so
// this is for machines that ended in between.
func promote(v view) action {
	for _, m := range v.members {
		since, learning := v.learning[m.ID]
		if learning && v.now.Sub(since) >= promoteAfter && !v.leaving(m) {
			return action{actPromote, m, "its machine does not request its vote"}
		}
	}
	return action{}
}

// mendSpace repairs members that ran out of space: it compacts the history, defragments, and then disarms the alarm. One
// defragmentation follows each compaction of a new revision, even if the size in use has not changed: etcd counts the pages
// that a compaction frees only after the next write, and it refuses writes. The alarm of a member that does not answer
// or does not exist any more is disarmed without a repair, because it stops the writes of all others: each member that has no space raises an alarm of its own with the next write.
func mendSpace(v view) action {
	if len(v.former) > 0 {
		return action{actDisarm, v.former[0], "etcd does not have this member"}
	}
	for _, m := range v.members {
		since, silent := v.failing[m.ID]
		switch {
		case !slices.Contains(m.Alarms, alarmNoSpace):
		case silent && v.now.Sub(since) >= unreachableAfter:
			return action{actDisarm, m, "it does not answer"}
		case m.Err != nil || m.Quota == 0:
		case m.Revision > v.compactedRevision && v.now.Sub(v.compacted) >= compactEvery:
			return action{actCompact, m, "it has no space"}
		case v.defragments[m.ID].Before(v.compacted):
			return action{actDefragment, m, "it has no space"}
		case m.Size <= int64(spaceRegained*float64(m.Quota)):
			return action{actDisarm, m, "it has space again"}
		}
	}
	return action{}
}

// defragment defragments one database file at a time, the leader's last, and only while all members are healthy voters.
func defragment(v view) action {
	var leader action
	for _, m := range v.members {
		if m.Learner || !v.healthy(m) {
			return action{}
		}
	}
	for _, m := range v.members {
		waste := m.Size - m.InUse
		if waste < defragWaste || waste*2 <= m.Size || v.now.Sub(v.defragments[m.ID]) < defragEvery {
			continue
		}
		a := action{actDefragment, m, fmt.Sprintf("%d MiB of %d are free", waste>>20, m.Size>>20)}
		if m.ID != v.self {
			return a
		}
		leader = a
	}
	return leader
}

package model

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/conditions"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/inplace"
)

// sickAfter is the time after which an unhealthy member is given up by a plan. A restarted etcd is back within seconds.
const sickAfter = time.Minute

// Fleet is the input of plans: the Machines of a control plane, and the state of their components.
type Fleet struct {
	// Instances are sorted from old to new.
	Instances []Instance
	// Unassigned are the etcd members without a Machine whose name in the workload cluster is known.
	Unassigned []Member
	// Stacked: etcd runs on the Machines. False for an external etcd.
	Stacked bool
	// Unknown is the reason why the current state of etcd is not known; "" when it is known. The health of every member is
	// Unknown in the first case.
	Unknown string
	// irreplaceable is the reason why no Machine can be created; "" when one can.
	irreplaceable string
}

// Instance is one Machine of a control plane and its components.
type Instance struct {
	Machine *clusterv1.Machine
	// Outdated lists the reasons why the spec demands another Machine.
	Outdated []string
	// Changes are the differences from the spec with the decisions about updates in place. They are known if the policy
	// allows updates, or if one was begun.
	Changes []inplace.Change
	// Update is the unfinished update in place of the Machine; nil without one.
	Update *Update
	// otherEncryption: the API server of the Machine may not read the data that one with the present spec writes.
	otherEncryption bool
	// names of the Machine in the workload cluster. Empty until the Machine reports a Node or a host name.
	names []string
	// Member is the etcd member of the Machine; nil when there is none, or when etcd is external.
	Member *Member
	// apiServer is the health of the API server of the Machine.
	apiServer metav1.ConditionStatus
	// hasServed: the API server has worked before, or the workload cluster cannot be reached.
	hasServed bool
}

// Member of etcd.
type Member struct {
	Name string
	// voting members count for the quorum. Learners and members that have not started do not.
	voting bool
	// started: etcd accepted the member, and it has run. Learners and voting members have started.
	started bool
	// Leave: the member was asked to leave. Left: it has left.
	Leave, Left bool
	health      metav1.ConditionStatus
	// unhealthyForLong: the member has been unhealthy for longer than a restart takes.
	unhealthyForLong bool
	// detail describes the state of the member for people.
	detail string
	// CertificatesExpire is the expiry of the first certificate of its Machine; zero when it is not known.
	CertificatesExpire time.Time
}

func newMember(m *etcdv1.EtcdMember, known bool, now time.Time) Member {
	out := Member{Name: m.Name, Leave: m.Spec.Leave, health: metav1.ConditionUnknown}
	if at := m.Status.CertificatesExpire; at != nil && canBeStored(at.Time) { // It becomes an annotation of the Machine, which core parses.
		out.CertificatesExpire = at.Time
	}
	joined, healthy := conditions.Get(m, etcdv1.JoinedCondition), conditions.Get(m, etcdv1.HealthyCondition)
	out.voting = joined != nil && joined.Status == metav1.ConditionTrue
	out.started = out.voting || joined != nil && joined.Reason == etcdv1.LearnerReason
	out.Left = joined != nil && joined.Status == metav1.ConditionFalse && joined.Reason == etcdv1.LeftReason
	switch {
	case joined == nil:
		out.detail = etcdv1.NotStartedReason
	case !out.voting:
		out.detail = cmp.Or(joined.Message, joined.Reason)
	case healthy != nil:
		out.detail = cmp.Or(healthy.Message, healthy.Reason)
	}
	if known && healthy != nil {
		out.health = healthy.Status
		out.unhealthyForLong = healthy.Status != metav1.ConditionTrue && now.Sub(healthy.LastTransitionTime.Time) >= sickAfter
	}
	return out
}

// namesOf returns the possible names of the Machine's Node and etcd member.
func namesOf(m *clusterv1.Machine) []string {
	var out []string
	if m.Status.NodeRef.IsDefined() {
		out = append(out, m.Status.NodeRef.Name)
	}
	for _, a := range m.Status.Addresses {
		if a.Type == clusterv1.MachineHostName && !slices.Contains(out, a.Address) {
			out = append(out, a.Address)
		}
	}
	return out
}

// newFleet combines Machines and the state of the workload cluster.
func newFleet(machines collections.Machines, outdated map[string][]string, stacked bool, w *Workload, now time.Time) Fleet {
	f := Fleet{Stacked: stacked, Unknown: w.unknown(stacked, now)}
	claimed := map[string]bool{}
	for _, m := range machines.SortedByCreationTimestamp() {
		names := namesOf(m)
		i := Instance{Machine: m, Outdated: outdated[m.Name], names: names, apiServer: w.apiServer(names, now), hasServed: w.served(names)}
		for _, name := range i.names {
			if found, ok := w.Members[name]; ok && stacked {
				known := newMember(&found, f.Unknown == "", now)
				i.Member, claimed[name] = &known, true
				break
			}
		}
		f.Instances = append(f.Instances, i)
	}
	for _, m := range w.sortedMembers() {
		if !claimed[m.Name] && stacked {
			f.Unassigned = append(f.Unassigned, newMember(&m, f.Unknown == "", now))
		}
	}
	return f
}

// Name returns the name of the Machine. Its Node and its etcd member can have another one.
func (i *Instance) Name() string { return i.Machine.Name }

// Deleting reports whether the deletion of the Machine was requested. It can still run and have a vote in etcd.
func (i *Instance) Deleting() bool { return !i.Machine.DeletionTimestamp.IsZero() }

// joined reports whether the Machine has a vote in etcd; with an external etcd, whether its API server has served.
func (f Fleet) joined(i *Instance) bool {
	if !f.Stacked {
		return i.hasServed
	}
	return i.Member != nil && i.Member.voting
}

// waitsFor reports whether a Machine cannot join etcd before a dead member has left: etcd accepts no member while one is dead.
func (f Fleet) waitsFor(dead, i *Instance) bool {
	return f.Stacked && memberDown(dead) && (i.Member == nil || !i.Member.started && !i.Member.Left)
}

// unidentified reports whether the Machine may run under a name that is not known. A member without a Machine may be its
// member.
func (i *Instance) unidentified() bool {
	return len(i.names) == 0 && i.Machine.Spec.Bootstrap.DataSecretName != nil
}

// healthy reports whether every component of the Machine is known to work.
func (f Fleet) healthy(i *Instance) bool {
	return f.joined(i) && i.apiServer == metav1.ConditionTrue && (!f.Stacked || i.Member.health == metav1.ConditionTrue)
}

// settling reports whether a Machine is up to date and not Available yet: it has not been Ready for minReadySeconds (CP-18).
func (i *Instance) settling() bool {
	return ptr.Deref(i.Machine.Spec.MinReadySeconds, 0) > 0 && len(i.Outdated) == 0 && !conditions.IsTrue(i.Machine, clusterv1.AvailableCondition)
}

// isUnhealthy reports whether a Machine is unhealthy by its components or by a MachineHealthCheck.
func (f Fleet) isUnhealthy(i *Instance) bool {
	return !f.healthy(i) || conditions.IsFalse(i.Machine, clusterv1.MachineHealthCheckSucceededCondition)
}

// problem describes the problem of an unhealthy Machine.
func (f Fleet) problem(i *Instance) string {
	switch {
	case f.Unknown != "":
		return f.Unknown
	case f.Stacked && i.Member == nil:
		return fmt.Sprintf("Machine %s has not joined etcd yet", i.Name())
	case f.Stacked && !i.Member.voting:
		return fmt.Sprintf("Machine %s has not joined etcd yet: %s", i.Name(), i.Member.detail)
	case f.Stacked && i.Member.health != metav1.ConditionTrue:
		return fmt.Sprintf("the etcd member of Machine %s is not healthy: %s", i.Name(), i.Member.detail)
	case i.apiServer == metav1.ConditionUnknown:
		return fmt.Sprintf("it is not known yet whether the API server of Machine %s works", i.Name())
	}
	return fmt.Sprintf("the API server of Machine %s does not answer", i.Name())
}

// active returns the Machines that are not being deleted.
func (f Fleet) active() []*Instance { return f.Filter(func(i *Instance) bool { return !i.Deleting() }) }

// deletedOneServes reports whether a Machine that is being deleted has a vote in etcd and works. It stays until another Machine has a
// vote. With an external etcd it does not wait for that.
func (f Fleet) deletedOneServes() bool {
	return f.Stacked && len(f.Filter(func(i *Instance) bool { return i.Deleting() && f.healthy(i) })) > 0
}

// Filter returns the Machines for which keep is true, in the order of the fleet: the oldest first. They are pointers into the
// fleet.
func (f Fleet) Filter(keep func(*Instance) bool) []*Instance {
	var out []*Instance
	for n := range f.Instances {
		if keep(&f.Instances[n]) {
			out = append(out, &f.Instances[n])
		}
	}
	return out
}

// Find returns the Machine with this name; nil when the fleet has none.
func (f Fleet) Find(name string) *Instance {
	for n := range f.Instances {
		if f.Instances[n].Name() == name {
			return &f.Instances[n]
		}
	}
	return nil
}

// Members returns all members that have not left, with and without a Machine.
func (f Fleet) Members() []Member {
	var out []Member
	for _, i := range f.Instances {
		if i.Member != nil && !i.Member.Left {
			out = append(out, *i.Member)
		}
	}
	for _, m := range f.Unassigned {
		if !m.Left {
			out = append(out, m)
		}
	}
	return out
}

// Orphans returns the members that cannot belong to a Machine. It is empty while a Machine runs under a name that is not
// known.
func (f Fleet) Orphans() []Member {
	for n := range f.Instances {
		if f.Instances[n].unidentified() {
			return nil
		}
	}
	return f.Unassigned
}

// JoinReasons joins reasons to one message, separated by semicolons.
func JoinReasons(parts []string) string { return strings.Join(parts, "; ") }

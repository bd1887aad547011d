package controlplane

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
)

// sickAfter is how long a member has to be unhealthy before a plan gives it up: an etcd that is started
// again is back within seconds.
const sickAfter = time.Minute

// fleet is what plans are made from: the Machines of a control plane, and what is known about what runs
// on them. It is data alone, so that every decision is a pure function.
type fleet struct {
	// instances are the Machines, oldest first.
	instances []instance
	// strays are members of etcd that belong to no Machine that is known by a name.
	strays []member
	// stacked says that etcd runs on the Machines; it does not when it is external.
	stacked bool
	// unknown is why nothing that is of now is known of etcd; "" when it is known. All members' health is
	// Unknown then.
	unknown string
}

// instance is one Machine of a control plane and what runs on it.
type instance struct {
	machine *clusterv1.Machine
	// outdated says why the spec would make another Machine now.
	outdated []string
	// names under which the workload cluster may know the Machine; none until the Machine is known to be
	// somewhere.
	names []string
	// member of etcd on the Machine; nil when there is none, or etcd is external.
	member *member
	// apiServer says whether the API server on the Machine works.
	apiServer metav1.ConditionStatus
	// served says that it has worked before, or that nobody can tell.
	served bool
}

// member of etcd.
type member struct {
	name string
	// voting members count for the quorum; learners and members that have not started do not.
	voting bool
	// leave was asked for, and left says that it is done.
	leave, left bool
	health      metav1.ConditionStatus
	// sick says that the member has been unhealthy for longer than a restart takes.
	sick bool
	// what says in words how the member is.
	what string
	// certificatesExpire is when the first certificate of its Machine does; zero when not known.
	certificatesExpire time.Time
}

func newMember(m *etcdv1.EtcdMember, known bool, now time.Time) member {
	out := member{name: m.Name, leave: m.Spec.Leave, health: metav1.ConditionUnknown}
	if m.Status.CertificatesExpire != nil {
		out.certificatesExpire = m.Status.CertificatesExpire.Time
	}
	joined, healthy := conditions.Get(m, etcdv1.JoinedCondition), conditions.Get(m, etcdv1.HealthyCondition)
	out.voting = joined != nil && joined.Status == metav1.ConditionTrue
	out.left = joined != nil && joined.Status == metav1.ConditionFalse && joined.Reason == etcdv1.LeftReason
	switch {
	case joined == nil:
		out.what = etcdv1.NotStartedReason
	case !out.voting:
		out.what = cmp.Or(joined.Message, joined.Reason)
	case healthy != nil:
		out.what = cmp.Or(healthy.Message, healthy.Reason)
	}
	if known && healthy != nil {
		out.health = healthy.Status
		out.sick = healthy.Status != metav1.ConditionTrue && now.Sub(healthy.LastTransitionTime.Time) >= sickAfter
	}
	return out
}

// namesOf are the names that a Machine's Node and its member of etcd can have.
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

// newFleet puts together what is known.
func newFleet(machines collections.Machines, outdated map[string][]string, stacked bool, w *workload, now time.Time) fleet {
	f := fleet{stacked: stacked, unknown: w.unknown(stacked, now)}
	claimed := map[string]bool{}
	for _, m := range machines.SortedByCreationTimestamp() {
		names := namesOf(m)
		i := instance{machine: m, outdated: outdated[m.Name], names: names, apiServer: w.apiServer(names, now), served: w.served(names)}
		for _, name := range i.names {
			if found, ok := w.members[name]; ok && stacked {
				known := newMember(&found, f.unknown == "", now)
				i.member, claimed[name] = &known, true
				break
			}
		}
		f.instances = append(f.instances, i)
	}
	for _, m := range w.sortedMembers() {
		if !claimed[m.Name] && stacked {
			f.strays = append(f.strays, newMember(&m, f.unknown == "", now))
		}
	}
	return f
}

func (i *instance) name() string   { return i.machine.Name }
func (i *instance) deleting() bool { return !i.machine.DeletionTimestamp.IsZero() }

// joined says that the Machine has a vote in etcd; with an external etcd, that its API server has been seen.
func (f fleet) joined(i *instance) bool {
	if !f.stacked {
		return i.served
	}
	return i.member != nil && i.member.voting
}

// unidentified says that the Machine may run somewhere without a name that we know, so that a stray
// may be its member.
func (i *instance) unidentified() bool {
	return len(i.names) == 0 && i.machine.Spec.Bootstrap.DataSecretName != nil
}

// healthy says that everything on the Machine is known to work.
func (f fleet) healthy(i *instance) bool {
	return f.joined(i) && i.apiServer == metav1.ConditionTrue && (!f.stacked || i.member.health == metav1.ConditionTrue)
}

// settling says that a Machine is up to date and not Available yet: it has not been Ready for minReadySeconds (CP-18).
func (i *instance) settling() bool {
	return ptr.Deref(i.machine.Spec.MinReadySeconds, 0) > 0 && len(i.outdated) == 0 && !conditions.IsTrue(i.machine, clusterv1.AvailableCondition)
}

// ailing says that a Machine is not healthy, or that a MachineHealthCheck says so.
func (f fleet) ailing(i *instance) bool {
	return !f.healthy(i) || conditions.IsFalse(i.machine, clusterv1.MachineHealthCheckSucceededCondition)
}

// problem says in words what is wrong with a Machine that is not healthy.
func (f fleet) problem(i *instance) string {
	switch {
	case f.unknown != "":
		return f.unknown
	case f.stacked && i.member == nil:
		return fmt.Sprintf("Machine %s has not joined etcd yet", i.name())
	case f.stacked && !i.member.voting:
		return fmt.Sprintf("Machine %s has not joined etcd yet: %s", i.name(), i.member.what)
	case f.stacked && i.member.health != metav1.ConditionTrue:
		return fmt.Sprintf("the etcd member of Machine %s is not healthy: %s", i.name(), i.member.what)
	case i.apiServer == metav1.ConditionUnknown:
		return fmt.Sprintf("it is not known yet whether the API server of Machine %s works", i.name())
	}
	return fmt.Sprintf("the API server of Machine %s does not answer", i.name())
}

// active are the Machines that are not being deleted.
func (f fleet) active() []*instance { return f.filter(func(i *instance) bool { return !i.deleting() }) }

func (f fleet) filter(keep func(*instance) bool) []*instance {
	var out []*instance
	for n := range f.instances {
		if keep(&f.instances[n]) {
			out = append(out, &f.instances[n])
		}
	}
	return out
}

func (f fleet) find(name string) *instance {
	for n := range f.instances {
		if f.instances[n].name() == name {
			return &f.instances[n]
		}
	}
	return nil
}

// members are all that have not left, with or without a Machine.
func (f fleet) members() []member {
	var out []member
	for _, i := range f.instances {
		if i.member != nil && !i.member.left {
			out = append(out, *i.member)
		}
	}
	for _, m := range f.strays {
		if !m.left {
			out = append(out, m)
		}
	}
	return out
}

// orphans are the members that no Machine can have. While a Machine runs under a name that we do not know
// there are none.
func (f fleet) orphans() []member {
	for n := range f.instances {
		if f.instances[n].unidentified() {
			return nil
		}
	}
	return f.strays
}

func join(parts []string) string { return strings.Join(parts, "; ") }

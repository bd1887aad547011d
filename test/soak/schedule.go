//go:build e2e

package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Limits for a host with two processors.
const (
	maxClusters      = 2
	maxControlPlanes = 4 // in all clusters
	maxWorkers       = 2 // in one cluster
	maxClaims        = 60
	claimsAtOnce     = 20
	maxFaults        = 4
)

// operationKind is the kind of a user's operation.
type operationKind string

const (
	createCluster      operationKind = "create a cluster"
	deleteCluster      operationKind = "delete a cluster"
	scaleWorkers       operationKind = "scale workers"
	scaleControlPlane  operationKind = "scale a control plane"
	rolloutWorkers     operationKind = "roll out workers"
	rolloutControl     operationKind = "roll out a control plane"
	createClaims       operationKind = "create claims"
	deleteClaims       operationKind = "delete claims"
	deleteMachineOfSet operationKind = "delete a Machine"
)

// operation is one operation of a user. Fields that its kind does not use are empty.
type operation struct {
	Kind    operationKind
	Cluster string
	Pool    bool // the workers of a new cluster are a MachinePool
	First   int  // number of the first claim
	Count   int  // machines or claims
	Pick    int  // which Machine, modulo the number of candidates
}

func (o operation) String() string {
	switch o.Kind {
	case createClaims, deleteClaims:
		return fmt.Sprintf("%s %d to %d", o.Kind, o.First, o.First+o.Count-1)
	case createCluster:
		return fmt.Sprintf("%s %s, machine pool: %v, workers: %d", o.Kind, o.Cluster, o.Pool, o.Count)
	case scaleWorkers, scaleControlPlane:
		return fmt.Sprintf("%s of %s to %d", o.Kind, o.Cluster, o.Count)
	}
	return fmt.Sprintf("%s of %s", o.Kind, o.Cluster)
}

// faultKind is the kind of a fault.
type faultKind string

const (
	killFault faultKind = "SIGKILL"
	stopFault faultKind = "SIGSTOP" // SIGSTOP, and SIGCONT when its time is over
	cutFault  faultKind = "cut off" // all packets of a machine are dropped for a time
	wipeFault faultKind = "removed" // firewall rules or a link are deleted
)

// target is a class of victims. The classes are the same in every run. Their victims change during a run.
type target string

const (
	targetDaemon   target = "plane"
	targetMachine  target = "machine"
	targetService  target = "service"
	targetBalancer target = "balancer"
	targetRules    target = "firewall rules"
	targetLink     target = "link of a machine"
)

// planeTargets are the components of the management plane, by their names in its status.
var planeTargets = []target{"etcd", "kube-apiserver", "kube-controller-manager", "capi-core-manager", "manager", "capstand"}

// fault is one injection.
type fault struct {
	Kind   faultKind
	Target target
	Pick   int           // which victim, modulo the number of candidates
	After  time.Duration // after the previous fault
	For    time.Duration // of SIGSTOP and of a cut
}

func (f fault) String() string {
	if f.For > 0 {
		return fmt.Sprintf("%s %s for %v", f.Kind, f.Target, f.For)
	}
	return fmt.Sprintf("%s %s", f.Kind, f.Target)
}

// weightedFaults contains the weights of the faults.
var weightedFaults = func() []choice[fault] {
	all := []choice[fault]{
		{3, fault{Kind: killFault, Target: targetMachine}},
		{6, fault{Kind: killFault, Target: targetService}},
		{2, fault{Kind: killFault, Target: targetBalancer}},
		{1, fault{Kind: killFault, Target: targetDaemon}},
		{3, fault{Kind: stopFault, Target: targetService}},
		{1, fault{Kind: stopFault, Target: targetMachine}},
		{1, fault{Kind: stopFault, Target: targetBalancer}},
		{3, fault{Kind: cutFault, Target: targetMachine}},
		{2, fault{Kind: wipeFault, Target: targetRules}},
		{1, fault{Kind: wipeFault, Target: targetLink}},
	}
	for _, t := range planeTargets {
		all = append(all, choice[fault]{2, fault{Kind: killFault, Target: t}}, choice[fault]{1, fault{Kind: stopFault, Target: t}})
	}
	return all
}()

// step is an operation and the faults that are injected during it.
type step struct {
	Number    int
	Operation operation
	Faults    []fault
}

// wantedCluster is the desired state of a cluster after the operations so far.
type wantedCluster struct {
	Name          string
	Pool          bool
	ControlPlanes int
	Workers       int
	Operations    int
}

// schedule creates the steps of a seed. It uses only the desired state and never the observed state, so that a seed has
// the same sequence on every host.
type schedule struct {
	random   *rand.Rand
	steps    int
	named    int
	clusters []wantedCluster
	claims   []int // numbers of the claims that exist, in the order of their creation
	claimed  int
}

func newSchedule(seed uint64) *schedule {
	return &schedule{random: rand.New(rand.NewPCG(seed, 0))}
}

// next chooses the next step.
func (s *schedule) next() step {
	s.steps++
	op := pick(s.random, s.operations())
	s.apply(op)
	out := step{Number: s.steps, Operation: op}
	for range 1 + s.random.IntN(maxFaults) {
		f := pick(s.random, weightedFaults)
		f.Pick = s.random.IntN(1 << 16)
		f.After = time.Duration(s.random.IntN(10_000)) * time.Millisecond
		if f.Kind == stopFault || f.Kind == cutFault {
			f.For = time.Duration(2_000+s.random.IntN(18_000)) * time.Millisecond
		}
		out.Faults = append(out.Faults, f)
	}
	return out
}

// operations lists the possible operations.
func (s *schedule) operations() []choice[operation] {
	if len(s.clusters) == 0 {
		return []choice[operation]{{1, s.newCluster()}}
	}
	var out []choice[operation]
	if len(s.clusters) < maxClusters {
		out = append(out, choice[operation]{4, s.newCluster()})
	}
	for _, c := range s.clusters {
		out = append(out, s.operationsOn(c)...)
	}
	if room := maxClaims - len(s.claims); room > 0 {
		out = append(out, choice[operation]{2, operation{Kind: createClaims, First: s.claimed, Count: 1 + s.random.IntN(min(room, claimsAtOnce))}})
	}
	if len(s.claims) > 0 {
		out = append(out, choice[operation]{2, operation{Kind: deleteClaims, First: s.claims[0], Count: 1 + s.random.IntN(len(s.claims))}})
	}
	return out
}

func (s *schedule) newCluster() operation {
	return operation{Kind: createCluster, Cluster: fmt.Sprintf("soak-%d", s.named), Pool: s.random.IntN(2) == 0, Count: 1}
}

func (s *schedule) operationsOn(c wantedCluster) []choice[operation] {
	on := func(kind operationKind, n int) operation {
		return operation{Kind: kind, Cluster: c.Name, Count: n, Pick: s.random.IntN(1 << 16)}
	}
	out := []choice[operation]{
		{3, on(scaleWorkers, (c.Workers+1+s.random.IntN(maxWorkers))%(maxWorkers+1))},
		{1, on(rolloutControl, 0)},
	}
	if c.Workers > 0 {
		out = append(out, choice[operation]{2, on(rolloutWorkers, 0)}, choice[operation]{1, on(deleteMachineOfSet, 0)})
	}
	if c.ControlPlanes == 3 {
		out = append(out, choice[operation]{3, on(scaleControlPlane, 1)})
	} else if s.controlPlanes()+2 <= maxControlPlanes {
		out = append(out, choice[operation]{2, on(scaleControlPlane, 3)})
	}
	if c.Operations >= 3 {
		out = append(out, choice[operation]{4, on(deleteCluster, 0)})
	}
	return out
}

func (s *schedule) controlPlanes() (n int) {
	for _, c := range s.clusters {
		n += c.ControlPlanes
	}
	return n
}

// apply changes the desired state.
func (s *schedule) apply(op operation) {
	i := slices.IndexFunc(s.clusters, func(c wantedCluster) bool { return c.Name == op.Cluster })
	if i >= 0 {
		s.clusters[i].Operations++
	}
	switch op.Kind {
	case createCluster:
		s.named++
		s.clusters = append(s.clusters, wantedCluster{Name: op.Cluster, Pool: op.Pool, ControlPlanes: 1, Workers: op.Count})
	case deleteCluster:
		s.clusters = slices.Delete(s.clusters, i, i+1)
	case scaleWorkers:
		s.clusters[i].Workers = op.Count
	case scaleControlPlane:
		s.clusters[i].ControlPlanes = op.Count
	case createClaims:
		for n := range op.Count {
			s.claims = append(s.claims, op.First+n)
		}
		s.claimed += op.Count
	case deleteClaims:
		s.claims = s.claims[op.Count:]
	}
}

// choice is a value and its weight.
type choice[T any] struct {
	weight int
	value  T
}

// pick chooses a value by the weights.
func pick[T any](random *rand.Rand, all []choice[T]) T {
	total := 0
	for _, c := range all {
		total += c.weight
	}
	n := random.IntN(total)
	for _, c := range all {
		if n -= c.weight; n < 0 {
			return c.value
		}
	}
	panic("unreachable: the weights are positive")
}

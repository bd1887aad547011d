package controlplane

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	v1beta1conditions "sigs.k8s.io/cluster-api/util/conditions/deprecated/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// namesOfMachines returns the names of the Machines, the oldest first.
func namesOfMachines(t *testing.T, w *simulation) []string {
	t.Helper()
	machines := machinesOf(t, w.cluster)
	slices.SortFunc(machines, func(a, b clusterv1.Machine) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	var out []string
	for _, m := range machines {
		out = append(out, m.Name)
	}
	return out
}

func scaleTo(w *simulation, cp *controlplanev1.CapstanControlPlane, n int32) {
	w.t.Helper()
	w.cluster.Change(cp, func() { cp.Spec.Replicas = &n })
}

func deleteMachine(t *testing.T, w *simulation, name string) {
	t.Helper()
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: name}}
	if err := env.Client.Delete(context.Background(), m); err != nil {
		t.Fatal(err)
	}
}

// TestScaleUpAndDown (CP-03, CP-04): 1, 3, 5, 3, 1 replicas. Machines are created at the same time and removed one by one. The
// simulation checks that etcd always has a quorum.
func TestScaleUpAndDown(t *testing.T) {
	w, cp, _ := connected(t, nil)
	w.until("one", w.settled(cp, 1))
	first := namesOfMachines(t, w)[0]
	scaleTo(w, cp, 3)
	// The simulation makes no step meanwhile, so no machine joins.
	expect.True(t, "both Machines are created at the same time", func() bool { return len(machinesOf(t, w.cluster)) == 3 })
	if w.voting() != 1 {
		t.Errorf("%d members vote, want 1: the other Machines must be created before the first of them joins", w.voting())
	}
	w.until("three", w.settled(cp, 3))
	scaleTo(w, cp, 5)
	w.until("five", w.settled(cp, 5))
	scaleTo(w, cp, 3)
	w.until("three again", w.settled(cp, 3))
	scaleTo(w, cp, 1)
	w.until("one again", w.settled(cp, 1))
	if len(w.made) != 5 || w.most != 5 {
		t.Errorf("%d Machines were created, at most %d existed", len(w.made), w.most)
	}
	if namesOfMachines(t, w)[0] == first {
		t.Error("the oldest Machine was not removed first")
	}
}

// otherTemplate makes the control plane use another infrastructure template.
func otherTemplate(w *simulation, cp *controlplanev1.CapstanControlPlane, name string) {
	w.t.Helper()
	w.cluster.MachineTemplate(name)
	w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name = name })
}

// TestRollOut: each cause of a rollout replaces all Machines, one at a time. A new Machine joins before an old one is removed.
func TestRollOut(t *testing.T) {
	w, cp, _ := connected(t, nil)
	for _, c := range []struct {
		what     string
		replicas int
		change   func()
	}{
		{"another template", 3, func() { otherTemplate(w, cp, "other") }},
		{"another config", 1, func() { w.cluster.Change(cp, func() { cp.Spec.Config.PreCommands = []string{"true"} }) }},
		{"CP-05 a version", 1, func() { w.cluster.Change(cp, func() { cp.Spec.Version = "v1.36.4" }) }},
		{"CP-20 rollout.after", 1, func() {
			time.Sleep(time.Second) // Creation times have whole seconds.
			w.cluster.Change(cp, func() { cp.Spec.Rollout.After = metav1.NewTime(time.Now()) })
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			w.t = t
			scaleTo(w, cp, int32(c.replicas))
			w.until("the replicas", w.settled(cp, c.replicas))
			before := namesOfMachines(t, w)
			w.most, w.fewest = 0, 1000
			c.change()
			w.until("the rollout begins", func() bool {
				return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionTrue, "")
			})
			w.until("all Machines are replaced", func() bool {
				for _, name := range namesOfMachines(t, w) {
					if slices.Contains(before, name) {
						return false
					}
				}
				return w.settled(cp, c.replicas)()
			})
			if w.most != c.replicas+1 || w.fewest != c.replicas {
				t.Errorf("at most %d Machines, at least %d voting members", w.most, w.fewest)
			}
		})
	}
	w.t = t
	if len(cp.Status.Versions) != 1 || cp.Status.Versions[0].Version != "v1.36.4" {
		t.Errorf("CP-05: %v", cp.Status.Versions)
	}
}

// TestThreeMachines (CP-10) runs its parts one after another on a control plane of three Machines.
func TestThreeMachines(t *testing.T) {
	w, cp, _ := connected(t, nil)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *simulation, *controlplanev1.CapstanControlPlane)
	}{
		{"no surge", rollOutWithoutSurge},
		{"an orphan", orphan},
		{"a repaired Machine", repair},
		{"a death during a departure", dieDuringDeparture},
		{"the spec changes during a rollout", changeMind},
		{"a drain", drainFirst},
		{"a lost quorum", loseQuorum},
	} {
		if !t.Run(part.name, func(t *testing.T) {
			w.t = t
			scaleTo(w, cp, 3)
			w.until("three", w.settled(cp, 3))
			w.forget()
			part.run(t, w, cp)
		}) {
			t.FailNow()
		}
	}
	w.t = t
}

// rollOutWithoutSurge: an old Machine is removed before a new one is created.
func rollOutWithoutSurge(t *testing.T, w *simulation, cp *controlplanev1.CapstanControlPlane) {
	usual := cp.Spec.Rollout.Strategy
	w.cluster.Change(cp, func() {
		cp.Spec.Rollout.Strategy = controlplanev1.RolloutStrategy{Type: controlplanev1.RollingUpdateStrategyType, RollingUpdate: controlplanev1.RollingUpdate{MaxSurge: ptr.To(intstr.FromInt32(0))}}
	})
	otherTemplate(w, cp, "no-surge")
	w.until("all Machines are replaced", func() bool { return len(w.made) == 6 && w.settled(cp, 3)() })
	if w.most != 3 {
		t.Errorf("at most %d Machines existed", w.most)
	}
	w.cluster.Change(cp, func() { cp.Spec.Rollout.Strategy = usual })
}

// TestRollOutWithVolumes: a Machine that gets volumes is created before the old one goes. From then on, the old one goes first, although
// the spec permits a surge. The only Machine cannot, and the condition has the remedy.
func TestRollOutWithVolumes(t *testing.T) {
	w, cp, _ := connected(t, nil)
	rollTo := func(name string, volumes ...string) {
		template := &infrav1.CapstanMachineTemplate{ObjectMeta: w.cluster.Meta(name)}
		for _, v := range volumes {
			template.Spec.Template.Spec.Volumes = append(template.Spec.Template.Spec.Volumes, infrav1.MachineVolume{Name: v, Path: "/srv/" + v, SizeGiB: 1})
		}
		w.cluster.Create(template)
		w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name = name })
	}
	rollTo("gets-volumes", "data", "logs")
	w.until("a Machine with volumes", func() bool { return len(w.made) == 2 && w.settled(cp, 1)() })
	rollTo("keeps-one", "data")
	w.until("the condition has the remedy", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionTrue, "Set spec.replicas to 3")
	})
	w.most = 0
	scaleTo(w, cp, 3)
	w.until("three of the last template", func() bool { return len(w.made) == 5 && w.settled(cp, 3)() })
	rollTo("keeps-it", "data")
	w.until("three others", func() bool { return len(w.made) == 8 && w.settled(cp, 3)() })
	if w.most != 3 {
		t.Errorf("at most %d Machines existed", w.most)
	}
}

// changeMind: the spec changes several times during a rollout, once to a spec whose Machines never start. All Machines follow
// the last spec in the end, and no other object remains.
func changeMind(t *testing.T, w *simulation, cp *controlplanev1.CapstanControlPlane) {
	w.fewest = 3
	otherTemplate(w, cp, "second")
	w.until("the first new Machine", func() bool { return len(w.made) == 4 })
	otherTemplate(w, cp, "third")
	w.until("a Machine of the third template", func() bool { return len(w.made) == 5 })

	// Machines of this template never start.
	w.cluster.MachineTemplate("broken")
	before := maps.Clone(w.made)
	w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name = "broken" })
	var hung string
	w.until("a Machine that does not start", func() bool {
		for _, m := range machinesOf(t, w.cluster) {
			infra := &infrav1.CapstanMachine{}
			if before[m.Name] || env.Client.Get(context.Background(), client.ObjectKeyFromObject(&m), infra) != nil {
				continue
			}
			if infra.Annotations[clusterv1.TemplateClonedFromNameAnnotation] == "broken" {
				w.broken[m.Name], hung = true, m.Name
			}
		}
		return hung != ""
	})
	w.until("a condition names the Machine that the rollout waits for", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionTrue, "waits: Machine "+hung+" has not joined etcd")
	})
	w.still("no member leaves", func() bool { return w.voting() >= 3 })
	otherTemplate(w, cp, "last")
	w.until("all Machines follow the last spec", w.settled(cp, 3))
	if w.most > 4 || w.fewest < 3 {
		t.Errorf("at most %d Machines, at least %d voting members", w.most, w.fewest)
	}
	for _, m := range machinesOf(t, w.cluster) {
		infra := &infrav1.CapstanMachine{}
		if err := env.Client.Get(context.Background(), client.ObjectKeyFromObject(&m), infra); err != nil || infra.Annotations[clusterv1.TemplateClonedFromNameAnnotation] != "last" {
			t.Errorf("Machine %s has the template %s, %v", m.Name, infra.Annotations[clusterv1.TemplateClonedFromNameAnnotation], err)
		}
	}
}

// TestDeletedMachines: after `kubectl delete machine`, the member leaves etcd first, and another Machine is created. This also holds
// for the only Machine, for all Machines at once, and with a hook of another controller.
func TestDeletedMachines(t *testing.T) {
	w, cp, _ := connected(t, nil)
	w.until("one", w.settled(cp, 1))
	deleteMachine(t, w, namesOfMachines(t, w)[0])
	w.until("another Machine has replaced it", func() bool { return len(w.made) == 2 && w.settled(cp, 1)() })
	if w.fewest != 1 {
		t.Errorf("the fewest voting members were %d", w.fewest)
	}

	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	victim := machinesOf(t, w.cluster)[1]
	other := clusterv1.PreTerminateDeleteHookAnnotationPrefix + "/other"
	w.cluster.Change(&victim, func() { victim.Annotations[other] = "" })
	deleteMachine(t, w, victim.Name)
	w.until("the deletion waits for the other hook", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionFalse, "") && w.cluster.Get(&victim) == nil && model.WaitsForHook(&victim)
	})
	w.still("its member stays", func() bool { return w.voting() == 3 })
	w.cluster.Change(&victim, func() { delete(victim.Annotations, other) })
	w.until("replaced", func() bool { return len(w.made) == 5 && w.settled(cp, 3)() })

	for _, name := range namesOfMachines(t, w) {
		deleteMachine(t, w, name)
	}
	w.until("all are replaced", func() bool { return len(w.made) == 8 && w.settled(cp, 3)() })
}

// drainFirst: the member stays in etcd while its Machine is drained.
func drainFirst(t *testing.T, w *simulation, cp *controlplanev1.CapstanControlPlane) {
	oldest := namesOfMachines(t, w)[0]
	w.stubborn[oldest] = true
	scaleTo(w, cp, 1)
	w.until("deleted", func() bool {
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: oldest}}
		return w.cluster.Get(m) == nil && !m.DeletionTimestamp.IsZero()
	})
	w.still("three vote", func() bool { return w.voting() == 3 && len(machinesOf(t, w.cluster)) == 3 })
	w.stubborn = map[string]bool{}
	w.until("one", w.settled(cp, 1))
}

// orphan: a member without a Machine is removed from etcd, unless that would cost the quorum.
func orphan(t *testing.T, w *simulation, cp *controlplanev1.CapstanControlPlane) {
	w.fewest = 3
	lost := machinesOf(t, w.cluster)[0]
	w.dead[lost.Name] = true
	w.cluster.Change(&lost, func() { lost.Finalizers, lost.Annotations = nil, nil })
	deleteMachine(t, w, lost.Name)
	w.until("the Machine is replaced, and its member has left", func() bool { return w.member(lost.Name) == nil && w.settled(cp, 3)() })
	if w.fewest != 2 {
		t.Errorf("the fewest voting members were %d", w.fewest)
	}
}

// repair (CP-10): a lost machine is replaced when a MachineHealthCheck marks it.
func repair(t *testing.T, w *simulation, cp *controlplanev1.CapstanControlPlane) {
	killed := machinesOf(t, w.cluster)[1]
	w.dead[killed.Name] = true
	w.until("a condition reports the failure", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.EtcdClusterHealthyCondition, metav1.ConditionFalse, killed.Name)
	})
	if !testcluster.Has(cp, controlplanev1.AvailableCondition, metav1.ConditionTrue, "") {
		t.Error("the control plane is not Available with two of three machines")
	}
	w.still("nothing is replaced without a mark", func() bool { return len(w.made) == 3 })
	unhealthy(w, &killed)
	w.until("replaced", func() bool { return len(w.made) == 4 && w.settled(cp, 3)() })
	if cp.Status.LastRemediation.Machine != killed.Name || !testcluster.Has(cp, clusterv1.RemediatingCondition, metav1.ConditionFalse, "") {
		t.Errorf("last %v, conditions %v", cp.Status.LastRemediation, cp.Status.Conditions)
	}
	if _, open := cp.Annotations[controlplanev1.RemediationInProgressAnnotation]; open {
		t.Error("the repair has not ended")
	}
	w.untilEvent("Remediated", killed.Name+": no Node for 5m")
}

// untilEvent waits for an event whose note contains a text.
func (w *simulation) untilEvent(reason, text string) {
	w.t.Helper()
	w.until("an event "+reason+": "+text, func() bool {
		list := &eventsv1.EventList{}
		if err := env.Client.List(context.Background(), list, client.InNamespace(w.cluster.Namespace)); err != nil {
			return false
		}
		return slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool { return e.Reason == reason && strings.Contains(e.Note, text) })
	})
}

func unhealthy(w *simulation, m *clusterv1.Machine) {
	w.t.Helper()
	w.cluster.ChangeStatus(m, func() {
		conditions.Set(m, metav1.Condition{Type: clusterv1.MachineHealthCheckSucceededCondition, Status: metav1.ConditionFalse, Reason: "Test", Message: "no Node for 5m"})
		conditions.Set(m, metav1.Condition{Type: clusterv1.MachineOwnerRemediatedCondition, Status: metav1.ConditionFalse, Reason: clusterv1.MachineOwnerRemediatedWaitingForRemediationReason})
		v1beta1conditions.MarkFalse(m, clusterv1.MachineOwnerRemediatedV1Beta1Condition, clusterv1.WaitingForRemediationV1Beta1Reason, clusterv1.ConditionSeverityWarning, "")
	})
}

// TestRepairRetries: replacements that fail too are counted, up to the limit. A healthy replacement resets the count.
func TestRepairRetries(t *testing.T) {
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Replicas = ptr.To[int32](3)
		cp.Spec.Remediation.MaxRetry = ptr.To[int32](1)
	})
	w.until("three", w.settled(cp, 3))
	replace := func(n int) clusterv1.Machine {
		known := maps.Clone(w.made)
		var out clusterv1.Machine
		w.until("a replacement", func() bool {
			for _, m := range machinesOf(t, w.cluster) {
				if !known[m.Name] {
					w.broken[m.Name], out = true, m
				}
			}
			return len(w.made) == n
		})
		return out
	}
	killed := machinesOf(t, w.cluster)[0]
	w.dead[killed.Name] = true
	w.until("a condition reports the failure", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.EtcdClusterHealthyCondition, metav1.ConditionFalse, killed.Name)
	})
	unhealthy(w, &killed)
	second := replace(4)
	unhealthy(w, &second)
	third := replace(5)
	unhealthy(w, &third)
	w.until("the repair has stopped", func() bool {
		return w.cluster.Get(&third) == nil && conditions.GetReason(&third, clusterv1.MachineOwnerRemediatedCondition) == controlplanev1.CannotBeRemediatedReason &&
			w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.RemediatingCondition, metav1.ConditionTrue, "Machine "+third.Name+": it replaces Machine "+second.Name) &&
			testcluster.Has(cp, clusterv1.RemediatingCondition, metav1.ConditionTrue, "maxRetry")
	})
	w.still("no further Machine is created", func() bool { return len(w.made) == 5 })
	w.broken = map[string]bool{}
	w.cluster.ChangeStatus(&third, func() {
		conditions.Set(&third, metav1.Condition{Type: clusterv1.MachineHealthCheckSucceededCondition, Status: metav1.ConditionTrue, Reason: "Test"})
	})
	w.until("the Machine is healthy again", func() bool {
		return w.cluster.Get(&third) == nil && !conditions.Has(&third, clusterv1.MachineOwnerRemediatedCondition) &&
			!v1beta1conditions.Has(&third, clusterv1.MachineOwnerRemediatedV1Beta1Condition) && w.settled(cp, 3)()
	})
}

// dieDuringDeparture: a machine is lost while the member of another one is leaving. The leaving member stays, because the
// quorum would be lost. The lost machine is removed first.
func dieDuringDeparture(t *testing.T, w *simulation, cp *controlplanev1.CapstanControlPlane) {
	names := namesOfMachines(t, w)
	leaving, dead := names[0], clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: names[1]}}
	w.careful[leaving] = true // The agent keeps it, because another member has failed.
	deleteMachine(t, w, leaving)
	w.until("it is asked to leave", func() bool { m := w.member(leaving); return m != nil && m.Spec.Leave })
	w.dead[dead.Name] = true
	w.until("a condition names the lost member", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.EtcdClusterHealthyCondition, metav1.ConditionFalse, dead.Name)
	})
	unhealthy(w, &dead)
	w.until("the lost member has left", func() bool { return w.member(dead.Name) == nil })
	if m := w.member(leaving); m == nil || !conditions.IsTrue(m, etcdv1.JoinedCondition) {
		t.Fatal("the leaving member left before the lost one")
	}
	w.careful = map[string]bool{}
	w.until("both Machines are replaced", func() bool { return len(w.made) == 5 && w.settled(cp, 3)() })
}

// loseQuorum: a condition reports the lost quorum, and no other Machine is removed.
func loseQuorum(t *testing.T, w *simulation, cp *controlplanev1.CapstanControlPlane) {
	names := namesOfMachines(t, w)
	// The agent still reports members; later it stops.
	for _, name := range names[:2] {
		w.dead[name] = true
		m := w.member(name)
		w.set(m, metav1.Condition{Type: etcdv1.HealthyCondition, Status: metav1.ConditionFalse, Reason: "Unreachable"})
	}
	w.until("a condition reports it", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.EtcdClusterHealthyCondition, metav1.ConditionFalse, "1 of 3 voting members work") &&
			conditions.GetReason(cp, controlplanev1.EtcdClusterHealthyCondition) == controlplanev1.QuorumLostReason
	})
	w.untilEvent(controlplanev1.QuorumLostReason, "1 of 3 voting members work")
	for i := range names {
		m := clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: names[i]}}
		unhealthy(w, &m)
	}
	otherTemplate(w, cp, "other")
	scaleTo(w, cp, 1)
	deleteMachine(t, w, names[2])
	w.still("no member is asked to leave, and no Machine is created", func() bool {
		for _, m := range w.members() {
			if m.Spec.Leave {
				return false
			}
		}
		return len(machinesOf(t, w.cluster)) == 3
	})
}

// TestInPlace (CP-07, CP-17, CP-18): fields that need no other Machine change in place, and removed labels and annotations are removed.
func TestInPlace(t *testing.T) {
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.MachineTemplate.ObjectMeta = clusterv1.ObjectMeta{Labels: map[string]string{"team": "a"}, Annotations: map[string]string{"note": "a"}}
		cp.Spec.MachineTemplate.Spec.Taints = []clusterv1.MachineTaint{{Key: "old", Effect: corev1.TaintEffectNoSchedule, Propagation: clusterv1.MachineTaintPropagationAlways}}
	})
	w.until("one", w.settled(cp, 1))
	machine := machinesOf(t, w.cluster)[0]
	infra := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: machine.Namespace, Name: machine.Name}}
	config := &bootstrapv1.CapstanConfig{ObjectMeta: infra.ObjectMeta}
	everywhere := func(holds func(client.Object) bool) func() bool {
		return func() bool {
			for _, obj := range []client.Object{&machine, infra, config} {
				if w.cluster.Get(obj) != nil || !holds(obj) {
					return false
				}
			}
			return true
		}
	}
	w.until("all objects have the labels and annotations", everywhere(func(obj client.Object) bool {
		return obj.GetLabels()["team"] == "a" && obj.GetAnnotations()["note"] == "a" && obj.GetLabels()[clusterv1.ClusterNameLabel] == "demo"
	}))
	w.cluster.Change(&machine, func() { machine.Labels["somebody"] = "else"; machine.Labels["team"] = "spoilt" })
	w.until("a changed label is corrected", func() bool { return w.cluster.Get(&machine) == nil && machine.Labels["team"] == "a" })
	w.cluster.Change(cp, func() {
		cp.Spec.MachineTemplate.ObjectMeta = clusterv1.ObjectMeta{Labels: map[string]string{"group": "b"}}
		cp.Spec.MachineTemplate.Spec.Taints = []clusterv1.MachineTaint{{Key: "new", Effect: corev1.TaintEffectNoSchedule, Propagation: clusterv1.MachineTaintPropagationAlways}}
		cp.Spec.MachineTemplate.Spec.Deletion = controlplanev1.MachineDeletionSpec{NodeDrainTimeoutSeconds: ptr.To[int32](11), NodeVolumeDetachTimeoutSeconds: ptr.To[int32](12), NodeDeletionTimeoutSeconds: ptr.To[int32](13)}
		cp.Spec.MachineTemplate.Spec.ReadinessGates = []clusterv1.MachineReadinessGate{{ConditionType: "Special"}}
		cp.Spec.MachineTemplate.Spec.MinReadySeconds = ptr.To[int32](14)
	})
	w.until("new labels are set and old ones are removed", everywhere(func(obj client.Object) bool {
		_, label := obj.GetLabels()["team"]
		_, annotation := obj.GetAnnotations()["note"]
		return obj.GetLabels()["group"] == "b" && !label && !annotation
	}))
	w.until("the Machine's own fields", func() bool {
		d := machine.Spec.Deletion
		return w.cluster.Get(&machine) == nil && len(machine.Spec.Taints) == 1 && machine.Spec.Taints[0].Key == "new" &&
			*d.NodeDrainTimeoutSeconds == 11 && *d.NodeVolumeDetachTimeoutSeconds == 12 && *d.NodeDeletionTimeoutSeconds == 13 &&
			ptr.Deref(machine.Spec.MinReadySeconds, 0) == 14 && len(machine.Spec.ReadinessGates) == 3 && machine.Labels["somebody"] == "else"
	})
	w.still("there is no rollout", func() bool { return len(w.made) == 1 && w.settled(cp, 1)() })
	w.stubborn[machine.Name] = true
	deleteMachine(t, w, machine.Name)
	w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.Spec.Deletion.NodeDrainTimeoutSeconds = ptr.To[int32](21) })
	w.until("a new timeout is set on a Machine that is drained", func() bool {
		return w.cluster.Get(&machine) == nil && ptr.Deref(machine.Spec.Deletion.NodeDrainTimeoutSeconds, 0) == 21
	})
	w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.Spec.Deletion = controlplanev1.MachineDeletionSpec{} })
	w.until("removed timeouts are removed, or have the default of Cluster API", func() bool {
		err, d := w.cluster.Get(&machine), &machine.Spec.Deletion
		return err == nil && d.NodeDrainTimeoutSeconds == nil && d.NodeVolumeDetachTimeoutSeconds == nil && ptr.Deref(d.NodeDeletionTimeoutSeconds, 0) == 10
	})
	w.until("another Machine joins before the only one is removed", func() bool { return len(w.made) == 2 })
}

// TestMoved: a move loses the status. Capstan still treats the cluster as one with data.
func TestMoved(t *testing.T) {
	w, cp, endpoint := connected(t, nil)
	w.until("one", w.settled(cp, 1))
	endpoint.Close()
	w.cluster.ChangeStatus(cp, func() { cp.Status = controlplanev1.CapstanControlPlaneStatus{} })
	otherTemplate(w, cp, "other")
	w.still("the Machine stays", func() bool {
		m := machinesOf(t, w.cluster)
		return len(m) == 1 && m[0].DeletionTimestamp.IsZero()
	})
	w.cluster.Becomes(t, cp, "initialized", func() bool {
		return ptr.Deref(cp.Status.Initialization.ControlPlaneInitialized, false)
	})
}

// TestBadFirstMachine: before the cluster has data, a corrected spec replaces the first Machine.
func TestBadFirstMachine(t *testing.T) {
	w, cp := func() (*simulation, *controlplanev1.CapstanControlPlane) {
		cluster := testcluster.New(t, env, nil)
		return newSimulation(t, cluster), cluster.ControlPlane(nil)
	}()
	w.cluster.SetInfraEndpoint(somewhere)
	w.until("the first", func() bool { return len(w.made) == 1 })
	first := machinesOf(t, w.cluster)[0]
	otherTemplate(w, cp, "other")
	w.until("another first Machine with the reserved name", func() bool {
		machines := machinesOf(t, w.cluster)
		return len(w.made) == 1 && len(machines) == 1 && machines[0].UID != first.UID && machines[0].Name == first.Name
	})
	config := &bootstrapv1.CapstanConfig{}
	config.Namespace, config.Name = w.cluster.Namespace, machinesOf(t, w.cluster)[0].Name
	if err := w.cluster.Get(config); err != nil || config.Spec.Role != bootstrapv1.RoleInit {
		t.Errorf("role %s, %v", config.Spec.Role, err)
	}
}

// TestSpread (CP-16): the first three Machines are in three failure domains, and so are their replacements.
func TestSpread(t *testing.T) {
	w, cp, _ := connected(t, nil) // The first Machine has no failure domain.
	w.cluster.ChangeStatus(w.cluster.Cluster, func() {
		w.cluster.Status.FailureDomains = []clusterv1.FailureDomain{{Name: "a", ControlPlane: ptr.To(true)}, {Name: "b", ControlPlane: ptr.To(true)}, {Name: "c", ControlPlane: ptr.To(true)}, {Name: "no", ControlPlane: ptr.To(false)}}
	})
	spread := func(what string) {
		t.Helper()
		in := map[string]int{}
		for _, m := range machinesOf(t, w.cluster) {
			in[model.FailureDomainOf(&m)]++
		}
		if fmt.Sprint(in) != "map[a:1 b:1 c:1]" {
			t.Errorf("%s: Machines are in %v", what, in)
		}
	}
	// The infrastructure has chosen domain a for it.
	first := machinesOf(t, w.cluster)[0]
	w.cluster.ChangeStatus(&first, func() { first.Status.FailureDomain = "a" })
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	spread("the first three")
	otherTemplate(w, cp, "other")
	w.until("all Machines are replaced", func() bool { return len(w.made) == 6 && w.settled(cp, 3)() })
	spread("after a rollout")
	// The next rollout corrects an uneven spread.
	for _, m := range machinesOf(t, w.cluster) {
		w.cluster.ChangeStatus(&m, func() { m.Status.FailureDomain = "a" })
	}
	otherTemplate(w, cp, "third")
	w.until("all Machines are replaced", func() bool { return len(w.made) == 9 && w.settled(cp, 3)() })
	spread("after a skew")
}

// TestDomainOf (CP-16): the infrastructure provider chooses among the hosts of a machine that some hosts cannot run.
func TestDomainOf(t *testing.T) {
	s := &scope{ControlPlane: &model.ControlPlane{Object: &controlplanev1.CapstanControlPlane{}, Cluster: &clusterv1.Cluster{}, Workload: model.NotAsked()}}
	s.Cluster.Status.FailureDomains = []clusterv1.FailureDomain{{Name: "a", ControlPlane: ptr.To(true)}}
	selects := map[string]any{"hostSelector": map[string]any{"matchLabels": map[string]any{"disk": "ssd"}}}
	for _, c := range []struct {
		group, kind string
		spec        map[string]any
		want        string
	}{
		{infrav1.GroupVersion.Group, infrav1.MachineKind, map[string]any{"cpus": int64(1)}, "a"},
		{infrav1.GroupVersion.Group, infrav1.MachineKind, selects, ""},
		{infrav1.GroupVersion.Group, "OtherMachine", selects, "a"},
		{"other.example.com", infrav1.MachineKind, selects, "a"},
	} {
		infraMachine := &unstructured.Unstructured{Object: map[string]any{"apiVersion": c.group + "/v1beta2", "kind": c.kind, "spec": c.spec}}
		if got := newMachine(s, infraMachine).Spec.FailureDomain; got != c.want {
			t.Errorf("%s of %s with %v: got the failure domain %q, want %q", c.kind, c.group, c.spec, got, c.want)
		}
	}
}

// TestDomainsFirst (CP-16, IC-11): the first Machine is created after the failure domains are known. This holds for each source
// of the endpoint.
func TestDomainsFirst(t *testing.T) {
	for name, endpoint := range map[string]func(*testcluster.Cluster, *infrav1.CapstanCluster){
		"of the infrastructure": func(cluster *testcluster.Cluster, infra *infrav1.CapstanCluster) {
			cluster.Change(infra, func() { infra.Spec.ControlPlaneEndpoint = somewhere })
		},
		"preset": func(cluster *testcluster.Cluster, _ *infrav1.CapstanCluster) {
			cluster.Change(cluster.Cluster, func() { cluster.Spec.ControlPlaneEndpoint = somewhere })
		},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := testcluster.New(t, env, nil)
			infra := &infrav1.CapstanCluster{ObjectMeta: cluster.Meta("demo")}
			endpoint(cluster, infra)
			cp := cluster.ControlPlane(nil)
			cluster.Becomes(t, cp, "the first Machine waits, and all other objects exist", func() bool {
				return testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, "does not show failure domains yet") && cluster.Secret("demo-kubeconfig") != nil
			})
			if n := len(machinesOf(t, cluster)); n != 0 {
				t.Fatalf("%d Machines", n)
			}
			cluster.ChangeStatus(infra, func() {
				infra.Status.FailureDomains = []clusterv1.FailureDomain{{Name: "x", ControlPlane: ptr.To(false)}, {Name: "y", ControlPlane: ptr.To(true)}}
			})
			expect.True(t, "the Machine is in domain y", func() bool {
				m := machinesOf(t, cluster)
				return len(m) == 1 && m[0].Spec.FailureDomain == "y"
			})
		})
	}
}

// TestInfraMachineOfFormerTemplate: after a refused Machine and a change of the template, the next attempt uses the new template. It keeps
// the infrastructure machine of a Machine that the cache does not show yet.
func TestInfraMachineOfFormerTemplate(t *testing.T) {
	owner := metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "Machine", Name: "a", UID: "1", Controller: ptr.To(true)}
	for name, test := range map[string]struct {
		template string
		owners   []metav1.OwnerReference
		refused  bool
		kept     string
	}{
		"the same template":            {template: "new", kept: "new"},
		"a former template":            {template: "former", refused: true},
		"a former template, a Machine": {template: "former", owners: []metav1.OwnerReference{owner}, kept: "former"},
	} {
		s := &scope{ControlPlane: &model.ControlPlane{Object: &controlplanev1.CapstanControlPlane{}}}
		s.Object.Spec.MachineTemplate.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: infrav1.MachineTemplateKind, Name: "new"}
		made := func(template string, owners ...metav1.OwnerReference) *unstructured.Unstructured {
			out := &unstructured.Unstructured{}
			out.SetGroupVersionKind(infrav1.GroupVersion.WithKind(infrav1.MachineKind))
			out.SetNamespace("ns")
			out.SetName("a")
			out.SetOwnerReferences(owners)
			out.SetAnnotations(map[string]string{clusterv1.TemplateClonedFromNameAnnotation: template})
			return out
		}
		c := fake.NewClientBuilder().WithScheme(env.Scheme).WithObjects(made(test.template, test.owners...)).Build()
		r := newReconciler(c, nil, reconciling.Options{}).machines
		if err := r.createInfraMachine(t.Context(), s, made("new")); (err != nil) != test.refused {
			t.Errorf("%s: %v", name, err)
		}
		stored := &infrav1.CapstanMachine{}
		err := c.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: "a"}, stored)
		if client.IgnoreNotFound(err) != nil || stored.Annotations[clusterv1.TemplateClonedFromNameAnnotation] != test.kept {
			t.Errorf("%s: the annotations are %v, %v", name, stored.Annotations, err)
		}
	}
}

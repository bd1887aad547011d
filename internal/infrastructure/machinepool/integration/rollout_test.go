package integration

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hollow"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

func (w *world) versions() map[string]int {
	out := map[string]int{}
	for _, m := range w.capstanMachines() {
		out[w.node(m.Name).Status.NodeInfo.KubeletVersion]++
	}
	return out
}

// A new version, another Secret of bootstrap data and another machine spec replace the machines within maxSurge and maxUnavailable.
// New content of the same Secret does not.
func TestRollingUpdate(t *testing.T) {
	w := newWorld(t)
	w.addPool(3, func(mp *clusterv1.MachinePool, _ *infrav1.CapstanMachinePool) {
		mp.Spec.Template.Spec.Version = oldVersion
	})
	w.settled(3)
	w.Expect(w.versions()).To(Equal(map[string]int{oldVersion: 3}))
	first := w.machineNames()

	stop := w.watchBudget()
	w.update(func(mp *clusterv1.MachinePool) { mp.Spec.Template.Spec.Version = newVersion })
	w.condition(clusterv1.RollingOutCondition, metav1.ConditionTrue, clusterv1.RollingOutReason)
	w.settled(3)
	fewest, most := stop()
	w.Expect(fewest).To(BeNumerically(">=", 3), "maxUnavailable 0")
	w.Expect(most).To(BeNumerically("<=", 4), "maxSurge 1")
	w.Expect(w.versions()).To(Equal(map[string]int{newVersion: 3}))
	second := w.machineNames()
	w.Expect(slices.ContainsFunc(second, func(n string) bool { return slices.Contains(first, n) })).To(BeFalse())

	// The token in the data was renewed. This replaces no machine.
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: *w.mp.Spec.Template.Spec.Bootstrap.DataSecretName}}
	w.Expect(testenv.Change(ctx, env.Client, secret, func(s *corev1.Secret) {
		s.Data["value"] = []byte("#cloud-config\n# another token\n")
	})).To(Succeed())
	w.Consistently(w.machineNames).Should(Equal(second))

	// This changes in place and replaces no machine.
	w.Expect(w.updatePool(func(p *infrav1.CapstanMachinePool) { p.Spec.MachineTemplate.ObjectMeta.Labels["team"] = "two" })).To(Succeed())
	w.Eventually(func(g Gomega) {
		for _, m := range w.capstanMachines() {
			g.Expect(m.Labels).To(HaveKeyWithValue("team", "two"))
		}
	}).Should(Succeed())
	w.Expect(w.updatePool(func(p *infrav1.CapstanMachinePool) { p.Spec.MachineTemplate.ObjectMeta.Labels = nil })).To(Succeed())
	w.Eventually(func(g Gomega) {
		for _, m := range w.capstanMachines() {
			g.Expect(m.Labels).NotTo(HaveKey("team"))
			g.Expect(m.Labels).To(HaveKeyWithValue(clusterv1.ClusterNameLabel, w.cluster.Name))
		}
	}).Should(Succeed())
	w.Expect(w.machineNames()).To(Equal(second))

	w.addSecret(w.pool.Name + "-2")
	stop = w.watchBudget()
	w.update(func(mp *clusterv1.MachinePool) {
		mp.Spec.Template.Spec.Bootstrap.DataSecretName = ptr.To(w.pool.Name + "-2")
	})
	w.condition(clusterv1.RollingOutCondition, metav1.ConditionTrue, clusterv1.RollingOutReason)
	w.settled(3)
	fewest, _ = stop()
	w.Expect(fewest).To(BeNumerically(">=", 3))
	for _, m := range w.capstanMachines() {
		w.Expect(m.Annotations).To(HaveKeyWithValue(infrav1.MachineBootstrapSecretAnnotation, w.pool.Name+"-2"))
	}
}

// Without a surge, the pool never has more machines than replicas.
func TestRollingUpdateInPlace(t *testing.T) {
	w := newWorld(t)
	w.addPool(3, func(_ *clusterv1.MachinePool, p *infrav1.CapstanMachinePool) {
		p.Spec.RollingUpdate = infrav1.MachinePoolRollingUpdate{MaxSurge: ptr.To(intstr.FromInt32(0)), MaxUnavailable: ptr.To(intstr.FromString("34%"))}
	})
	w.settled(3)
	w.restored()
	stop := w.watchBudget()
	w.Expect(w.updatePool(func(p *infrav1.CapstanMachinePool) { p.Spec.MachineTemplate.Spec.CPUs = 1 })).To(Succeed())
	w.condition(clusterv1.RollingOutCondition, metav1.ConditionTrue, clusterv1.RollingOutReason)
	w.settled(3)
	fewest, most := stop()
	w.Expect(fewest).To(BeNumerically(">=", 2))
	w.Expect(most).To(BeNumerically("<=", 3))
	for _, m := range w.capstanMachines() {
		w.Expect(m.Spec.CPUs).To(BeEquivalentTo(1))
	}
}

// Machines with volumes are replaced without the surge that the pool asks for: each successor has the volume of a predecessor.
func TestRollingUpdateWithVolumes(t *testing.T) {
	w := newWorld(t)
	w.addPool(2, func(_ *clusterv1.MachinePool, p *infrav1.CapstanMachinePool) {
		p.Spec.MachineTemplate.Spec.Volumes = []infrav1.MachineVolume{{Name: "data", Path: "/srv/data", SizeGiB: 1}}
		p.Spec.RollingUpdate = infrav1.MachinePoolRollingUpdate{MaxSurge: ptr.To(intstr.FromInt32(1)), MaxUnavailable: ptr.To(intstr.FromInt32(0))}
	})
	w.settled(2)
	before, first := w.volumes(), w.machineNames()
	w.Expect(before).To(HaveLen(2))
	stop := w.watchBudget()
	w.Expect(w.updatePool(func(p *infrav1.CapstanMachinePool) { p.Spec.MachineTemplate.Spec.CPUs = 1 })).To(Succeed())
	w.condition(clusterv1.RollingOutCondition, metav1.ConditionTrue, clusterv1.RollingOutReason)
	w.settled(2)
	fewest, most := stop()
	w.Expect(fewest).To(BeNumerically(">=", 1))
	w.Expect(most).To(BeNumerically("<=", 2))
	after := w.volumes()
	w.Expect(slices.Collect(maps.Keys(after))).To(ConsistOf(slices.Collect(maps.Keys(before))), "no volume is new")
	w.Expect(slices.Collect(maps.Values(after))).To(ConsistOf(w.machineNames()))
	for _, name := range first {
		w.Expect(w.machineNames()).NotTo(ContainElement(name))
	}
}

// volumes returns the machine of each CapstanVolume by its ID.
func (w *world) volumes() map[string]string {
	w.t.Helper()
	list := &infrav1.CapstanVolumeList{}
	w.Expect(env.Client.List(ctx, list, client.InNamespace(w.namespace))).To(Succeed())
	out := map[string]string{}
	for _, v := range list.Items {
		out[v.Spec.ID] = v.Spec.MachineName
	}
	return out
}

// restored (ALL-11): core and the pool restore lost owner references of a machine, and the pool restores its own finalizer.
func (w *world) restored() {
	w.t.Helper()
	m := w.capstanMachines()[0]
	w.get(w.pool)
	refs, finalizers := m.OwnerReferences, w.pool.Finalizers
	w.Expect(refs).To(HaveLen(2))
	w.Expect(testenv.Change(ctx, env.Client, &m, func(m *infrav1.CapstanMachine) { m.OwnerReferences = nil })).To(Succeed())
	w.Expect(testenv.Change(ctx, env.Client, w.pool, func(p *infrav1.CapstanMachinePool) { p.Finalizers = nil })).To(Succeed())
	w.Eventually(func() []metav1.OwnerReference { w.get(&m); return m.OwnerReferences }).Should(ConsistOf(refs))
	w.Eventually(func() []string { w.get(w.pool); return w.pool.Finalizers }).Should(Equal(finalizers))
	w.replaced()
}

// replaced: the manifest of the pool replaces the live object. The fields of the controller remain.
func (w *world) replaced() {
	w.t.Helper()
	w.Eventually(func() error {
		w.get(w.pool)
		manifest := &infrav1.CapstanMachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: w.pool.Name, ResourceVersion: w.pool.ResourceVersion}}
		manifest.Spec.MachineTemplate, manifest.Spec.RollingUpdate = w.pool.Spec.MachineTemplate, w.pool.Spec.RollingUpdate
		return env.Client.Update(ctx, manifest)
	}).Should(Succeed())
	before := w.pool.DeepCopy()
	w.get(w.pool)
	w.Expect(w.pool.Spec).To(Equal(before.Spec))
	w.Expect(w.pool.Spec.ProviderIDList).To(HaveLen(3))
	w.Expect(w.pool.Finalizers).To(Equal(before.Finalizers))
	w.Expect(w.pool.OwnerReferences).To(Equal(before.OwnerReferences))
}

// A change of the spec and a change of replicas during an update both complete.
func TestRollingUpdateIsInterruptedByAnother(t *testing.T) {
	w := newWorld(t)
	w.addPool(3, nil)
	w.settled(3)
	stop := w.watchBudget()
	for i, version := range []string{oldVersion, newVersion, oldVersion} {
		w.update(func(mp *clusterv1.MachinePool) { mp.Spec.Template.Spec.Version = version })
		w.Eventually(func() int { return len(w.capstanMachines()) }).Should(BeNumerically(">", 3), "it has begun")
		w.scale(int32(3 + i))
	}
	w.settled(5)
	fewest, _ := stop()
	w.Expect(fewest).To(BeNumerically(">=", 3))
	w.Expect(w.versions()).To(Equal(map[string]int{oldVersion: 5}))
}

// minReadySeconds: a ready Node counts only after this time. Core ignores the field for Machines of pools.
func TestMinReadySeconds(t *testing.T) {
	w := newWorld(t)
	w.addPool(1, func(mp *clusterv1.MachinePool, _ *infrav1.CapstanMachinePool) {
		mp.Spec.Template.Spec.MinReadySeconds = ptr.To[int32](4)
	})
	w.settled(1)
	ready := conditions.Get(ptr.To(w.machines()[0]), clusterv1.ReadyCondition).LastTransitionTime
	available := conditions.Get(w.pool, clusterv1.ReadyCondition).LastTransitionTime
	// Both times are whole seconds.
	w.Expect(available.Sub(ready.Time)).To(BeNumerically(">=", 3*time.Second))
}

// The Node is drained before its machine is removed. A pod with a disruption budget delays this, and no other machine is removed
// instead.
func TestScaleDownDrains(t *testing.T) {
	w := newWorld(t)
	w.addPool(2, nil)
	w.settled(2)
	victim := w.machineNames()[0]
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "held", Labels: map[string]string{"app": "held"}},
		Spec:       corev1.PodSpec{NodeName: victim, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	w.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "default"}})
	w.create(pod)
	w.Eventually(func() corev1.PodPhase { w.get(pod); return pod.Status.Phase }).Should(Equal(corev1.PodRunning))
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "held"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr.To(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: pod.Labels}},
	}
	w.create(budget)
	w.allow(budget, 0)
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: victim}}
	w.mark(machine)
	// No event shows that the provider's cache contains the mark, because another watch delivers the replicas.
	w.Consistently(w.machineNames).Should(HaveLen(2))

	w.scale(1)
	w.Eventually(func() bool { w.get(machine); return machine.DeletionTimestamp.IsZero() }).Should(BeFalse())
	w.Eventually(func() bool { return w.node(victim).Spec.Unschedulable }).Should(BeTrue(), "core cordons the Node")
	w.Consistently(func() int {
		w.get(w.pool)
		w.Expect(w.pool.Spec.ProviderIDList).To(HaveLen(2), "it is there until it is gone, or core would delete its Node")
		n := 0
		for _, m := range w.machines() {
			if !m.DeletionTimestamp.IsZero() {
				n++
			}
		}
		return n
	}).Should(Equal(1))
	w.condition(clusterv1.ScalingDownCondition, metav1.ConditionTrue, clusterv1.ScalingDownReason)

	w.allow(budget, 1)
	w.settled(1)
	w.Expect(w.machineNames()).NotTo(ContainElement(victim))
	w.Expect(client.IgnoreNotFound(env.Client.Get(ctx, client.ObjectKeyFromObject(pod), pod))).To(Succeed())
}

// allow sets the status of the budget as the disruption controller does.
func (w *world) allow(b *policyv1.PodDisruptionBudget, n int32) {
	w.t.Helper()
	w.Expect(testenv.ChangeStatus(ctx, env.Client, b, func(b *policyv1.PodDisruptionBudget) {
		b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: b.Generation, DisruptionsAllowed: n, CurrentHealthy: 1 + n, DesiredHealthy: 1, ExpectedPods: 1 + n}
	})).To(Succeed())
}

// The pool replaces machines that a MachineHealthCheck has marked, within the budget. Core's pool controller does not.
func TestRemediation(t *testing.T) {
	w := newWorld(t)
	w.addPool(3, nil)
	w.settled(3)
	w.create(&clusterv1.MachineHealthCheck{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "mhc"},
		Spec: clusterv1.MachineHealthCheckSpec{
			ClusterName: w.cluster.Name,
			Selector:    metav1.LabelSelector{MatchLabels: map[string]string{clusterv1.MachinePoolNameLabel: w.mp.Name}},
			Checks: clusterv1.MachineHealthCheckChecks{UnhealthyNodeConditions: []clusterv1.UnhealthyNodeCondition{
				{Type: "Broken", Status: corev1.ConditionTrue, TimeoutSeconds: ptr.To[int32](0)},
			}},
		},
	})
	sick := w.machineNames()[:2]
	for _, name := range sick {
		w.Expect(testenv.ChangeStatus(ctx, env.Client, w.node(name), func(n *corev1.Node) {
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: "Broken", Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Now().Add(-time.Minute))})
		})).To(Succeed())
	}
	stop := w.watchBudget()
	for _, name := range sick {
		w.Eventually(w.machineNames).ShouldNot(ContainElement(name))
	}
	w.settled(3)
	_, most := stop()
	w.Expect(most).To(BeNumerically("<=", 4))
}

// The machines of a lost host cannot be removed. They are still replaced on other hosts, several at a time, although the budget
// allows only one.
func TestDeadHost(t *testing.T) {
	w := newWorld(t, "one", "two")
	w.addPool(4, nil)
	w.settled(4)
	dead := w.hosts[1].Name
	w.die[1]()
	w.Eventually(func() bool {
		w.get(w.hosts[1])
		return conditions.IsTrue(w.hosts[1], clusterv1.ReadyCondition)
	}).Should(BeFalse())
	lost := 0
	for _, m := range w.capstanMachines() {
		if m.Spec.HostName == dead {
			lost++
			w.Expect(env.Client.Delete(ctx, &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: m.Name}})).To(Succeed())
		}
	}
	w.Expect(lost).To(BeNumerically(">", 1), "machines are spread over the hosts")
	w.Eventually(func(g Gomega) {
		w.get(w.pool)
		g.Expect(w.pool.Status.AvailableReplicas).To(HaveValue(BeEquivalentTo(4)))
		g.Expect(w.machineNames()).To(HaveLen(4+lost), "those of the dead host are still there")
	}).Should(Succeed())
	w.Expect(testenv.Change(ctx, env.Client, w.hosts[1], func(h *infrav1.CapstanHost) {
		metav1.SetMetaDataAnnotation(&h.ObjectMeta, infrav1.HostAbandonedAnnotation, "")
	})).To(Succeed())
	w.settled(4)
}

// MP-06 ALL-08: a paused pool, or a pool of a paused cluster, changes nothing.
func TestPaused(t *testing.T) {
	w := newWorld(t)
	w.addPool(1, nil)
	w.settled(1)
	w.Expect(w.updatePool(func(p *infrav1.CapstanMachinePool) { p.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} })).To(Succeed())
	w.condition(clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	w.scale(3)
	w.Consistently(func() int { return len(w.capstanMachines()) }).Should(Equal(1))
	w.Expect(w.updatePool(func(p *infrav1.CapstanMachinePool) { p.Annotations = nil })).To(Succeed())
	w.settled(3)

	w.get(w.cluster)
	before := w.cluster.DeepCopy()
	w.cluster.Spec.Paused = ptr.To(true)
	w.Expect(env.Client.Patch(ctx, w.cluster, client.MergeFrom(before))).To(Succeed())
	w.condition(clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	w.scale(0)
	w.Expect(env.Client.Delete(ctx, w.pool)).To(Succeed())
	w.Eventually(func() bool { w.get(w.pool); return testenv.PausedDeletion(w.pool) }).Should(BeTrue(), "the deletion was seen")
	w.Consistently(func() (kept int) {
		for _, m := range w.machines() {
			if m.DeletionTimestamp.IsZero() {
				kept++
			}
		}
		return kept
	}).Should(Equal(3), "deletion waits too")
	before = w.cluster.DeepCopy()
	w.cluster.Spec.Paused = ptr.To(false)
	w.Expect(env.Client.Patch(ctx, w.cluster, client.MergeFrom(before))).To(Succeed())
	w.gone(w.pool)
	w.Expect(w.capstanMachines()).To(BeEmpty())
}

func (w *world) gone(o client.Object) {
	w.t.Helper()
	w.Eventually(func() bool {
		err := env.Client.Get(ctx, client.ObjectKeyFromObject(o), o)
		return err != nil && client.IgnoreNotFound(err) == nil
	}).Should(BeTrue(), "%T is gone", o)
}

// MP-07: a deletion removes the Machines first, sets a condition, and removes all objects.
func TestDeletePool(t *testing.T) {
	w := newWorldSlow(t)
	w.addPool(4, nil)
	w.Eventually(func() int { return len(w.machines()) }).Should(Equal(4))
	w.condition(clusterv1.ReadyCondition, metav1.ConditionFalse, infrav1.PoolNotReadyReason)
	// The deletion of one Machine waits for a hook.
	held := w.machines()[0]
	const hook = clusterv1.PreTerminateDeleteHookAnnotationPrefix + "/test"
	w.Expect(testenv.Change(ctx, env.Client, &held, func(m *clusterv1.Machine) { metav1.SetMetaDataAnnotation(&m.ObjectMeta, hook, "") })).To(Succeed())
	// This deletes a pool during its creation.
	w.Expect(env.Client.Delete(ctx, w.mp)).To(Succeed())
	for kind, status := range map[string]metav1.ConditionStatus{clusterv1.DeletingCondition: metav1.ConditionTrue, clusterv1.ReadyCondition: metav1.ConditionFalse} {
		w.Eventually(func() string { return w.condition(kind, status, clusterv1.DeletingReason) }).Should(Equal("1 machines still exist"))
	}
	// MP-01, MP-04, MP-08: the pool still shows the live instances.
	left := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: held.Spec.InfrastructureRef.Name}}
	w.get(left)
	w.Eventually(func(g Gomega) {
		w.get(w.pool)
		g.Expect(w.pool.Status.Instances).To(HaveLen(1))
		g.Expect(w.pool.Spec.ProviderIDList).To(Equal([]string{left.Spec.ProviderID}))
		g.Expect(w.pool.Status.Replicas).To(HaveValue(BeEquivalentTo(1)))
	}).Should(Succeed())
	w.Expect(testenv.Change(ctx, env.Client, &held, func(m *clusterv1.Machine) { delete(m.Annotations, hook) })).To(Succeed())
	w.gone(w.mp)
	w.gone(w.pool)
	w.Expect(w.capstanMachines()).To(BeEmpty())
	w.Eventually(w.machines).Should(BeEmpty(), "core lets them go behind their CapstanMachines")
}

func newWorldSlow(t *testing.T) *world {
	t.Parallel()
	return newWorldWith(t, hollow.Behaviour{StartDelay: time.Second, BootDelay: time.Second})
}

// Machines are only in the failure domains of the MachinePool, and balanced over them.
func TestFailureDomains(t *testing.T) {
	w := newWorld(t, "x", "y", "z")
	w.addPool(4, func(mp *clusterv1.MachinePool, _ *infrav1.CapstanMachinePool) {
		mp.Spec.FailureDomains = []string{"x", "y"}
	})
	w.settled(4)
	w.Eventually(w.domains).Should(Equal(map[string]int{"x": 2, "y": 2}))
	w.scale(2)
	w.settled(2)
	w.Eventually(w.domains).Should(Equal(map[string]int{"x": 1, "y": 1}))
	// Machines leave a removed domain.
	w.update(func(mp *clusterv1.MachinePool) { mp.Spec.FailureDomains = []string{"y", "z"} })
	w.Eventually(w.domains).Should(Equal(map[string]int{"y": 1, "z": 1}))
	w.settled(2)
	// The drain of a host replaces its machine in another domain.
	y := w.hosts[1]
	w.Expect(testenv.Change(ctx, env.Client, y, func(h *infrav1.CapstanHost) { h.Spec.Drain = ptr.To(true) })).To(Succeed())
	w.Eventually(w.domains).Should(Equal(map[string]int{"z": 2}))
	w.settled(2)
	w.Eventually(func() bool { w.get(y); return conditions.IsTrue(y, infrav1.HostDrainedCondition) }).Should(BeTrue())
	// The pool goes on without a domain whose only host is abandoned.
	w.Expect(testenv.Change(ctx, env.Client, y, func(h *infrav1.CapstanHost) {
		metav1.SetMetaDataAnnotation(&h.ObjectMeta, infrav1.HostAbandonedAnnotation, "")
	})).To(Succeed())
	w.Eventually(func() int { w.get(w.cluster); return len(w.cluster.Status.FailureDomains) }).Should(Equal(2))
	w.scale(3)
	w.settled(3)
	w.Expect(w.domains()).To(Equal(map[string]int{"z": 3}))
	w.Eventually(func() string { w.get(w.pool); return conditions.GetMessage(w.pool, clusterv1.ReadyCondition) }).Should(ContainSubstring("names y, which"))
}

func (w *world) domains() map[string]int {
	out := map[string]int{}
	for _, m := range w.capstanMachines() {
		out[m.Status.FailureDomain]++
	}
	return out
}

// MP-09: invalid input causes a clear error, and the pool stays unchanged.
func TestBadInput(t *testing.T) {
	w := newWorld(t, "x")
	w.addPool(2, nil)
	w.settled(2)
	before := w.machineNames()
	good := w.mp.DeepCopy()
	for _, tc := range []struct {
		reason  string
		change  func(*clusterv1.MachinePool)
		message []string
	}{
		{infrav1.PoolVersionNotAvailableReason, func(mp *clusterv1.MachinePool) { mp.Spec.Template.Spec.Version = "v1.99.0" }, []string{"No CapstanHost", "can run Kubernetes v1.99.0", oldVersion, newVersion}},
		{infrav1.PoolInvalidVersionReason, func(mp *clusterv1.MachinePool) { mp.Spec.Template.Spec.Version = "latest" }, []string{"latest"}},
		{infrav1.PoolInvalidVersionReason, func(mp *clusterv1.MachinePool) { mp.Spec.Template.Spec.Version = "" }, []string{"version"}},
		{infrav1.PoolInvalidFailureDomainReason, func(mp *clusterv1.MachinePool) { mp.Spec.FailureDomains = []string{"mars"} }, []string{"name mars, but the cluster has x", "name one of these"}},
		{infrav1.PoolInvalidReplicasReason, func(mp *clusterv1.MachinePool) { mp.Spec.Replicas = ptr.To[int32](10001) }, []string{"10000"}},
	} {
		w.update(tc.change)
		message := w.condition(clusterv1.ReadyCondition, metav1.ConditionFalse, tc.reason)
		for _, part := range tc.message {
			w.Expect(message).To(ContainSubstring(part))
		}
		w.Consistently(w.machineNames, "400ms").Should(Equal(before), tc.reason)
		w.Expect(w.pool.Spec.ProviderIDList).To(HaveLen(2))
		w.update(func(mp *clusterv1.MachinePool) {
			mp.Spec.Replicas, mp.Spec.FailureDomains, mp.Spec.Template.Spec.Version = good.Spec.Replicas, nil, newVersion
		})
		w.settled(2)
	}
	w.Expect(w.machineNames()).To(Equal(before))
	// The API server refuses negative budgets and budgets that allow no replacement.
	zero := ptr.To(intstr.FromInt32(0))
	w.Expect(w.updatePool(func(p *infrav1.CapstanMachinePool) {
		p.Spec.RollingUpdate.MaxSurge, p.Spec.RollingUpdate.MaxUnavailable = zero, zero
	})).
		To(MatchError(ContainSubstring("cannot both be 0")))
	negative := w.mp.DeepCopy()
	negative.Spec.Replicas = ptr.To[int32](-1)
	w.Expect(env.Client.Patch(ctx, negative, client.MergeFrom(w.mp))).To(MatchError(ContainSubstring("non-negative")))
}

// Surplus machines are removed even if no host can run the version.
func TestShrinksWhileTheVersionIsNotAvailable(t *testing.T) {
	w := newWorld(t)
	w.addPool(3, nil)
	w.settled(3)
	w.update(func(mp *clusterv1.MachinePool) {
		mp.Spec.Template.Spec.Version = "v1.99.0"
		mp.Spec.Replicas = ptr.To[int32](1)
	})
	w.Eventually(w.machineNames).Should(HaveLen(1))
	w.condition(clusterv1.ReadyCondition, metav1.ConditionFalse, infrav1.PoolVersionNotAvailableReason)
}

// Failed machines are reported and counted. They are replaced only if a MachineHealthCheck marks them.
func TestFailedMachines(t *testing.T) {
	t.Parallel()
	w := newWorldWith(t, hollow.Behaviour{FailBootstrap: 1})
	w.addPool(2, nil)
	w.Eventually(func() string {
		w.get(w.pool)
		return conditions.GetMessage(w.pool, clusterv1.ReadyCondition)
	}).Should(And(ContainSubstring("2 failed"), ContainSubstring("--fail-bootstrap")))
	before := w.machineNames()
	w.Consistently(w.machineNames).Should(Equal(before))
	w.Eventually(func() *bool { w.get(w.pool); return w.pool.Status.Ready }).Should(HaveValue(BeTrue()), "they are there, as far as they ever will be")
	w.scale(0)
	w.settled(0)
}

// A pool causes no writes while its machines do not change, with 2 machines as with 1,000.
func TestSteadyStateWritesNothing(t *testing.T) {
	w := newWorld(t)
	w.addPool(2, nil)
	w.settled(2)
	expect.Idle(t, "the pool", 3500*time.Millisecond, w.resourceVersions) // On a busy box, core makes its last writes late.
}

func (w *world) resourceVersions() string {
	w.get(w.pool)
	out := []string{w.pool.ResourceVersion}
	for _, m := range w.capstanMachines() {
		out = append(out, m.ResourceVersion)
	}
	return strings.Join(out, " ")
}

// The CEL rules of the pool and of its template.
func TestValidation(t *testing.T) {
	w := newWorld(t)
	zero, one := ptr.To(intstr.FromInt32(0)), ptr.To(intstr.FromInt32(1))
	for name, tc := range map[string]struct {
		change func(*infrav1.CapstanMachinePoolSpec)
		want   string
	}{
		"both 0": {func(s *infrav1.CapstanMachinePoolSpec) {
			s.RollingUpdate.MaxSurge, s.RollingUpdate.MaxUnavailable = zero, zero
		}, "cannot both be 0"},
		"0 and not set": {func(s *infrav1.CapstanMachinePoolSpec) { s.RollingUpdate.MaxSurge = zero }, "cannot both be 0"},
		"0% and 0": {func(s *infrav1.CapstanMachinePoolSpec) {
			s.RollingUpdate.MaxSurge, s.RollingUpdate.MaxUnavailable = ptr.To(intstr.FromString("0%")), zero
		}, "cannot both be 0"},
		"0 and 1": {func(s *infrav1.CapstanMachinePoolSpec) {
			s.RollingUpdate.MaxSurge, s.RollingUpdate.MaxUnavailable = zero, one
		}, ""},
		"percent":  {func(s *infrav1.CapstanMachinePoolSpec) { s.RollingUpdate.MaxSurge = ptr.To(intstr.FromString("25%")) }, ""},
		"negative": {func(s *infrav1.CapstanMachinePoolSpec) { s.RollingUpdate.MaxSurge = ptr.To(intstr.FromInt32(-1)) }, "number from 0"},
		"200%":     {func(s *infrav1.CapstanMachinePoolSpec) { s.RollingUpdate.MaxSurge = ptr.To(intstr.FromString("200%")) }, "percentage"},
		"no number": {func(s *infrav1.CapstanMachinePoolSpec) {
			s.RollingUpdate.MaxUnavailable = ptr.To(intstr.FromString("many"))
		}, "percentage"},
		"unknown policy":    {func(s *infrav1.CapstanMachinePoolSpec) { s.DeletePolicy = "Nicest" }, "Unsupported value"},
		"negative replicas": {func(s *infrav1.CapstanMachinePoolSpec) { s.Replicas = ptr.To[int32](-1) }, "replicas"},
		"a machine's id":    {func(s *infrav1.CapstanMachinePoolSpec) { s.MachineTemplate.Spec.ID = "12345678" }, "identify one machine"},
		"a machine's host":  {func(s *infrav1.CapstanMachinePoolSpec) { s.MachineTemplate.Spec.HostName = "h" }, "identify one machine"},
		"a machine's address": {func(s *infrav1.CapstanMachinePoolSpec) {
			s.MachineTemplate.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: "10.0.0.2", Prefix: 24}}
		}, "apply to one machine"},
	} {
		p := &infrav1.CapstanMachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: unique("pool")}}
		tc.change(&p.Spec)
		err := env.Client.Create(ctx, p)
		if tc.want == "" {
			w.Expect(err).NotTo(HaveOccurred(), name)
		} else {
			w.Expect(err).To(MatchError(ContainSubstring(tc.want)), name)
		}
	}
	p := &infrav1.CapstanMachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: unique("pool")}, Spec: infrav1.CapstanMachinePoolSpec{ID: "12345678", ProviderID: "capstan-pool://12345678"}}
	w.create(p)
	for _, change := range []func(){func() { p.Spec.ID = "87654321" }, func() { p.Spec.ID = "" }, func() { p.Spec.ProviderID = "x" }} {
		before := p.DeepCopy()
		change()
		w.Expect(env.Client.Patch(ctx, p, client.MergeFrom(before))).To(MatchError(ContainSubstring("cannot be changed")))
		p = before
	}
}

// MP-10 ALL-10: a template is immutable, except in a dry run of the topology controller. Its status contains the capacity of a
// machine.
func TestTemplate(t *testing.T) {
	w := newWorld(t)
	tpl := &infrav1.CapstanMachinePoolTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: unique("tpl")}}
	tpl.Spec.Template.Spec.MachineTemplate.Spec.CPUs = 3
	w.create(tpl)
	w.Eventually(func() int64 { w.get(tpl); return tpl.Status.Capacity.Cpu().Value() }).Should(BeEquivalentTo(3))
	changed := tpl.DeepCopy()
	changed.Spec.Template.Spec.MachineTemplate.Spec.CPUs = 4
	w.Expect(env.Client.Patch(ctx, changed, client.MergeFrom(tpl))).To(MatchError(ContainSubstring("cannot be changed")))
	changed = tpl.DeepCopy()
	changed.Annotations = map[string]string{clusterv1.TopologyDryRunAnnotation: ""}
	changed.Spec.Template.Spec.MachineTemplate.Spec.CPUs = 4
	w.Expect(env.Client.Patch(ctx, changed, client.MergeFrom(tpl), client.DryRunAll)).To(Succeed())
	own := &infrav1.CapstanMachinePoolTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: unique("tpl")}}
	own.Spec.Template.Spec.ProviderID = "capstan-pool://1"
	w.Expect(env.Client.Create(ctx, own)).To(MatchError(ContainSubstring("apply to one pool")))
}

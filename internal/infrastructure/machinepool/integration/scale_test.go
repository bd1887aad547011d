package integration

import (
	"slices"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

// MP-01 MP-02 MP-03 MP-04 MP-05 MP-08
func TestScaleUpAndDown(t *testing.T) {
	w := newWorld(t)
	w.addPool(3, nil)
	w.settled(3)

	// MP-03
	w.Expect(w.pool.Spec.ProviderID).To(Equal(infrav1.PoolProviderIDPrefix + w.pool.Spec.ID))
	// MP-05
	w.Expect(w.pool.Status.Ready).To(HaveValue(BeTrue()))
	w.Expect(w.pool.Status.Initialization.Provisioned).To(HaveValue(BeTrue()))
	// MP-02
	w.Expect(w.pool.Status.InfrastructureMachineKind).To(Equal("CapstanMachine"))
	var ids []string
	providerID := map[string]string{}
	for _, m := range w.capstanMachines() {
		w.Expect(m.Labels).To(HaveKeyWithValue(clusterv1.ClusterNameLabel, w.cluster.Name))
		w.Expect(m.Labels).To(HaveKeyWithValue(clusterv1.MachinePoolNameLabel, w.mp.Name))
		w.Expect(m.Labels).To(HaveKeyWithValue("team", "one"))
		w.Expect(m.OwnerReferences).To(ContainElement(HaveField("UID", w.pool.UID)))
		w.Expect(m.OwnerReferences).To(ContainElement(HaveField("Kind", "Machine")), "the Machine that core made")
		w.Expect(m.Spec.CPUs).To(BeEquivalentTo(2))
		w.Expect(w.node(m.Name).Spec.ProviderID).To(Equal(m.Spec.ProviderID))
		ids = append(ids, m.Spec.ProviderID)
		providerID[m.Name] = m.Spec.ProviderID
	}
	// Core copies the version of a Machine from its Node, in a later reconcile of the MachinePool.
	w.Eventually(w.machines).Should(HaveEach(And(HaveField("Spec.Version", newVersion), HaveField("Status.NodeRef.Name", Not(BeEmpty())))))
	// MP-04
	slices.Sort(ids)
	w.Expect(w.pool.Spec.ProviderIDList).To(Equal(ids))
	// MP-01
	w.Expect(w.pool.Status.Instances).To(HaveLen(3))
	for i, name := range w.machineNames() {
		in := w.pool.Status.Instances[i]
		w.Expect(in.InstanceName).To(Equal(name))
		w.Expect(in.Version).To(Equal(newVersion))
		w.Expect(in.Ready).To(HaveValue(BeTrue()))
		w.Expect(in.ProviderID).To(Equal(providerID[name]))
		w.Expect(in.Addresses).To(ContainElement(HaveField("Type", clusterv1.MachineInternalIP)))
	}
	// Core reports this in the MachinePool.
	w.Eventually(func(g Gomega) {
		w.get(w.mp)
		g.Expect(w.mp.Spec.ProviderIDList).To(Equal(ids))
		g.Expect(w.mp.Status.Replicas).To(HaveValue(BeEquivalentTo(3)))
		g.Expect(w.mp.Status.ReadyReplicas).To(HaveValue(BeEquivalentTo(3)))
		g.Expect(w.mp.Status.NodeRefs).To(HaveLen(3))
		g.Expect(w.mp.Status.Initialization.InfrastructureProvisioned).To(HaveValue(BeTrue()))
	}).Should(Succeed())

	before := w.machineNames()
	w.scale(5)
	w.settled(5)
	w.Expect(w.machineNames()).To(ContainElements(before), "scaling up leaves what is there")
	w.scale(1)
	w.settled(1)
	w.scale(0)
	w.settled(0)
	w.Expect(w.pool.Spec.ProviderIDList).To(BeEmpty())
	w.Expect(w.pool.Status.Instances).To(BeEmpty())
	w.scale(2)
	w.settled(2)
}

// MP-05: a pool with zero replicas is complete.
func TestPoolOfZeroIsReady(t *testing.T) {
	w := newWorld(t)
	w.addPool(0, nil)
	w.settled(0)
	w.Expect(w.pool.Status.Ready).To(HaveValue(BeTrue()))
	w.Expect(w.pool.Status.Initialization.Provisioned).To(HaveValue(BeTrue()))
	// An autoscaler needs the capacity of a machine to scale from zero.
	w.Expect(w.pool.Status.Capacity.Cpu().Value()).To(BeEquivalentTo(2))
	w.Expect(w.pool.Status.NodeInfo.OperatingSystem).To(Equal("linux"))
}

// The replicas change up and down quickly. In the end, the pool has the last number.
func TestScaleChangesItsMind(t *testing.T) {
	w := newWorld(t)
	w.addPool(6, nil)
	w.Eventually(w.capstanMachines).ShouldNot(BeEmpty())
	for _, n := range []int32{2, 7, 0, 4, 1, 5} {
		w.scale(n)
		if n > 0 {
			w.Eventually(w.capstanMachines).ShouldNot(BeEmpty())
		}
	}
	w.settled(5)
}

// MP-02: only a Machine that a user deletes is replaced.
func TestDeletedMachineIsReplaced(t *testing.T) {
	w := newWorld(t)
	w.addPool(3, nil)
	w.settled(3)
	before := w.machineNames()
	m := w.machines()[1]
	w.Expect(env.Client.Delete(ctx, &m)).To(Succeed())
	w.Eventually(w.machineNames).ShouldNot(ContainElement(m.Name))
	w.settled(3)
	kept := slices.DeleteFunc(before, func(n string) bool { return n == m.Name })
	w.Expect(w.machineNames()).To(ContainElements(kept))
}

// If a user deletes a CapstanMachine, its Machine is deleted too.
func TestDeletedCapstanMachineIsReplaced(t *testing.T) {
	w := newWorld(t)
	w.addPool(2, nil)
	w.settled(2)
	m := w.capstanMachines()[0]
	w.Expect(env.Client.Delete(ctx, &m)).To(Succeed())
	w.Eventually(w.machineNames).ShouldNot(ContainElement(m.Name))
	w.settled(2)
}

// mark sets the annotation that makes a Machine the first to be deleted. Core writes the Machine at the same time.
func (w *world) mark(m *clusterv1.Machine) {
	w.t.Helper()
	w.Expect(testenv.Change(ctx, env.Client, m, func(m *clusterv1.Machine) {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.DeleteMachineAnnotation, "yes")
	})).To(Succeed())
}

// The delete annotation chooses the Machine to delete. Only surplus Machines are deleted.
func TestDeleteAnnotation(t *testing.T) {
	w := newWorld(t)
	w.addPool(4, nil)
	w.settled(4)
	var marked []string
	for _, m := range w.machines()[2:] {
		w.mark(&m)
		marked = append(marked, m.Name)
	}
	w.Consistently(w.machineNames).Should(HaveLen(4), "the annotation alone deletes nothing")
	w.scale(3)
	w.settled(3)
	left := 0
	for _, name := range w.machineNames() {
		if slices.Contains(marked, name) {
			left++
		}
	}
	w.Expect(left).To(Equal(1), "one of the two that are marked has gone")
}

// cluster.x-k8s.io/replicas-managed-by: the replicas of the pool itself count, and the MachinePool follows them.
func TestReplicasManagedByAnAutoscaler(t *testing.T) {
	w := newWorld(t)
	w.addPool(2, func(mp *clusterv1.MachinePool, _ *infrav1.CapstanMachinePool) {
		mp.Annotations = map[string]string{clusterv1.ReplicasManagedByAnnotation: "somebody"}
	})
	w.settled(2)
	w.Expect(w.pool.Spec.Replicas).To(HaveValue(BeEquivalentTo(2)), "who begins to manage finds the number here")

	w.Expect(w.updatePool(func(p *infrav1.CapstanMachinePool) { p.Spec.Replicas = ptr.To[int32](3) })).To(Succeed())
	w.settled(3)
	w.Eventually(func() *int32 { w.get(w.mp); return w.mp.Spec.Replicas }).Should(HaveValue(BeEquivalentTo(3)))

	w.scale(7)
	w.Eventually(func() int32 { w.get(w.mp); return *w.mp.Spec.Replicas }).Should(BeEquivalentTo(3))
	w.settled(3)

	w.update(func(mp *clusterv1.MachinePool) { mp.Annotations = nil })
	w.scale(1)
	w.settled(1)

	w.update(func(mp *clusterv1.MachinePool) {
		mp.Annotations = map[string]string{clusterv1.ReplicasManagedByAnnotation: "somebody"}
	})
	w.Eventually(func() *int32 { w.get(w.pool); return w.pool.Spec.Replicas }).Should(HaveValue(BeEquivalentTo(1)), "the next one finds the present number")
	w.settled(1)
}

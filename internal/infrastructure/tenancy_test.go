package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// admits changes the namespaces that can use a host.
func (b *box) admits(host *infrav1.CapstanHost, namespaces ...string) {
	b.t.Helper()
	update(b, host, func(h *infrav1.CapstanHost) { h.Spec.AllowedNamespaces = &infrav1.AllowedNamespaces{Names: namespaces} })
}

// notAsked checks that a host got no request to create anything.
func (b *box) notAsked(fake *fakehost.Host) {
	b.t.Helper()
	for _, call := range []string{"EnsureNetwork", "EnsureLoadBalancer", "EnsureMachine"} {
		b.Expect(fake.Calls(call)).To(BeZero(), call)
	}
}

// ALL-18: a machine whose spec already has a host, an id and an address gets nothing on a host that does not admit its namespace.
// Machines from the time when the host admitted the namespace continue, also after a move, which loses the status. They can be
// deleted.
func TestMachineThatNamesTheHostOfOthers_ALL18(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	owner := newNamespace(t)
	foreign, fake := owner.addHost(nil)
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		m.Spec.ID, m.Spec.HostName = unique("known"), foreign.Name
		m.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: b.address(100), Prefix: 21}}
	})
	b.Expect(b.condition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.HostNotAllowedReason)).
		To(And(ContainSubstring(foreign.Name), ContainSubstring("does not admit namespace "+b.namespace), ContainSubstring("spec.allowedNamespaces")))
	b.notAsked(fake)

	b.admits(foreign, owner.namespace, b.namespace)
	b.running(m)
	b.admits(foreign, owner.namespace)
	before := m.DeepCopy()
	m.Status = infrav1.CapstanMachineStatus{}
	b.Expect(env.Client.Status().Patch(ctx, m, client.MergeFrom(before))).To(Succeed())
	update(b, m, func(m *infrav1.CapstanMachine) { m.Annotations = map[string]string{"moved": ""} })
	b.running(m)
	b.Expect(fake.Calls("EnsureMachine")).To(Equal(1))
	b.delete(m)
	b.gone(m)
	made, _ := fake.Machine(m.Spec.ID)
	b.Expect(made).To(BeNil())
}

// ALL-18: the deletion of an object that only names a host does not call a host that does not admit its namespace. A machine whose creation
// was under way when its namespace was excluded is removed from the host.
func TestDeletionOnTheHostOfOthers_ALL18(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.fake.Refuse("EnsureMachine", status.Error(codes.Unavailable, "the answer is lost"))
	_, m := b.addMachine(nil, nil)
	b.condition(m, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineRefusedReason)
	b.admits(b.host, "somebody-else")
	b.delete(m)
	b.gone(m)
	called := b.fake.Calls("DeleteMachine")
	b.Expect(called).NotTo(BeZero())

	byHand := &infrav1.CapstanMachine{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: "by-hand", Finalizers: []string{infrav1.MachineFinalizer}},
		Spec:       infrav1.CapstanMachineSpec{ID: unique("by-hand"), HostName: b.host.Name},
	}
	b.create(byHand)
	b.delete(byHand)
	b.gone(byHand)
	b.Expect(b.fake.Calls("DeleteMachine")).To(Equal(called))
}

// The memory that was promised to a machine is free for others after somebody removed its owner and its finalizer, and deleted it.
func TestPromiseOfMachineWithoutOwner(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	large := func(m *infrav1.CapstanMachine) { m.Spec.Memory = ptr.To(resource.MustParse("40Gi")) }
	machine, first := b.addMachine(func(m *clusterv1.Machine) {
		m.Spec.Bootstrap = clusterv1.Bootstrap{
			ConfigRef:      clusterv1.ContractVersionedObjectReference{APIGroup: "bootstrap.capstan.dev", Kind: "CapstanConfig", Name: "any"},
			DataSecretName: ptr.To("missing"),
		}
	}, large)
	b.condition(first, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForBootstrapDataReason)
	_, second := b.addMachine(nil, large)
	b.condition(second, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)
	update(b, machine, func(m *clusterv1.Machine) { m.Spec.Bootstrap.DataSecretName = nil })
	b.Eventually(func() string {
		return b.condition(first, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForBootstrapDataReason)
	}).Should(ContainSubstring("bootstrap provider"))
	b.unchanged(first) // The deletion is the only event.
	update(b, first, func(m *infrav1.CapstanMachine) { m.OwnerReferences, m.Finalizers = nil, nil })
	b.delete(first)
	b.running(second)
}

// ALL-18: a cluster whose spec already has a host gets neither a network nor a load balancer on a host that does not admit its namespace.
func TestClusterThatNamesTheHostOfOthers_ALL18(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.addHost(nil)
	owner := newNamespace(t)
	foreign, fake := owner.addHost(nil)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		c.Spec.ID, c.Spec.Network.MachineCIDR = unique("known"), "10.220.0.0/21"
		c.Spec.LoadBalancer.HostName = foreign.Name
	})
	for _, condition := range []string{infrav1.NetworkReadyCondition, infrav1.LoadBalancerReadyCondition} {
		b.Expect(b.condition(b.capstan, condition, metav1.ConditionFalse, infrav1.HostNotAllowedReason)).
			To(And(ContainSubstring(foreign.Name), ContainSubstring("does not admit namespace "+b.namespace), ContainSubstring("spec.allowedNamespaces")))
	}
	b.notAsked(fake)

	b.admits(foreign, owner.namespace, b.namespace)
	b.provisioned()
	b.admits(foreign, owner.namespace)
	before := b.capstan.DeepCopy()
	b.capstan.Status = infrav1.CapstanClusterStatus{}
	b.Expect(env.Client.Status().Patch(ctx, b.capstan, client.MergeFrom(before))).To(Succeed())
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Annotations = map[string]string{"moved": ""} })
	b.waitProvisioned()
	_, m := b.addMachine(controlPlane, nil)
	b.running(m)
	b.Eventually(func() int { return len(fake.LoadBalancer(b.capstan.Spec.ID).GetBackends()) }).Should(Equal(1), "its load balancer is kept up to date")
	b.delete(m)
	b.gone(m)
	b.delete(b.capstan)
	b.gone(b.capstan)
	b.Expect(fake.LoadBalancer(b.capstan.Spec.ID)).To(BeNil())
	b.Expect(fake.Network(b.capstan.Spec.ID)).To(BeNil())
}

// ALL-18: a host selects namespaces by label. A cluster, and then a machine, wait until their Namespace gets the label. No other
// event occurs meanwhile.
func TestNamespaceThatIsAdmittedLater_ALL18(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	tenant := unique("tenant")
	label := func(value string) {
		update(b, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b.namespace}}, func(n *corev1.Namespace) {
			metav1.SetMetaDataLabel(&n.ObjectMeta, "tenant", value)
		})
	}
	b.addHost(func(h *infrav1.CapstanHost) {
		h.Spec.AllowedNamespaces = &infrav1.AllowedNamespaces{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"tenant": tenant}}}
	})
	b.addCluster(nil, nil)
	b.condition(b.capstan, infrav1.HostsAvailableCondition, metav1.ConditionFalse, infrav1.NoHostsReason)
	label(tenant)
	b.provisioned()

	label("another")
	_, m := b.addMachine(nil, nil)
	b.condition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)
	label(tenant)
	b.running(m)
}

// ALL-18: copies of a cluster's objects in another namespace have its ids. On hosts of both namespaces they cannot adopt, change
// or remove anything of the originals. Their conditions contain the cause, and they can be deleted.
func TestCopyInAnotherNamespace_ALL18(t *testing.T) {
	t.Parallel()
	b, thief := newNamespace(t), newNamespace(t)
	both := func(h *infrav1.CapstanHost) {
		h.Spec.AllowedNamespaces = &infrav1.AllowedNamespaces{Names: []string{b.namespace, thief.namespace}}
	}
	b.host, b.fake = b.addHost(both)
	b.fake.AddTenant(thief.namespace)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = b.host.Name })
	b.provisioned()
	_, m := b.addMachine(controlPlane, func(m *infrav1.CapstanMachine) { m.Spec.HostName = b.host.Name })
	b.running(m)
	elsewhere, fake := b.addHost(both) // has the network of the cluster, and no load balancer
	_, worker := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.HostName = elsewhere.Name })
	b.running(worker)
	b.get(b.capstan)
	id := b.capstan.Spec.ID
	b.Eventually(func() int { return len(b.fake.LoadBalancer(id).GetBackends()) }).Should(Equal(1))

	thief.addCluster(nil, func(c *infrav1.CapstanCluster) { b.capstan.Spec.DeepCopyInto(&c.Spec) })
	thief.Expect(thief.condition(thief.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkRefusedReason)).
		To(And(ContainSubstring("is a copy"), Not(ContainSubstring(b.namespace+"/"))))
	cluster := thief.cluster.DeepCopy()
	thief.cluster.Status.Initialization.InfrastructureProvisioned = ptr.To(true)
	thief.Expect(env.Client.Status().Patch(ctx, thief.cluster, client.MergeFrom(cluster))).To(Succeed())
	_, copied := thief.addMachine(controlPlane, func(c *infrav1.CapstanMachine) { m.Spec.DeepCopyInto(&c.Spec) })
	_, unmade := thief.addMachine(nil, func(c *infrav1.CapstanMachine) {
		m.Spec.DeepCopyInto(&c.Spec)
		c.Spec.ProviderID = ""
	})
	_, guest := thief.addMachine(nil, func(c *infrav1.CapstanMachine) { c.Spec.HostName = b.host.Name })
	for _, c := range []*infrav1.CapstanMachine{copied, unmade} {
		thief.Expect(thief.condition(c, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineRefusedReason)).
			To(And(ContainSubstring("belongs to a machine of another namespace"), Not(ContainSubstring(b.namespace+"/")), ContainSubstring("Delete this object")))
		thief.Expect(c.Status.Initialization.Provisioned).To(BeNil())
	}
	thief.Eventually(func() string { // The host first refuses addresses that are in use.
		return thief.condition(guest, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineRefusedReason)
	}).Should(ContainSubstring("this object or its cluster is a copy"), "a machine of its own, in the network of the other cluster")

	for _, c := range []*infrav1.CapstanMachine{copied, unmade, guest} {
		thief.delete(c)
		thief.gone(c)
	}
	thief.delete(thief.capstan)
	thief.gone(thief.capstan)
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made.GetSpec().GetName()).To(Equal(m.Name))
	b.Expect(b.fake.LoadBalancer(id)).To(HaveField("Backends", HaveLen(1)))
	b.Expect(b.fake.LoadBalancer(id).GetNamespace()).To(Equal(b.namespace))
	b.Expect(fake.Network(id).GetNamespace()).To(Equal(b.namespace))
	b.Expect(b.fake.Calls("DeleteLoadBalancer")).To(BeZero())
	b.running(m)

	b.delete(m)
	b.delete(worker)
	b.gone(m)
	b.gone(worker)
	b.delete(b.capstan)
	b.gone(b.capstan)
	b.Expect(b.fake.LoadBalancer(id)).To(BeNil())
	b.Expect(fake.Network(id)).To(BeNil())
}

// If the host answers that another owner has the id, the host has nothing of the machine, and its deletion completes.
func TestDeletionOfTheIDOfAnother_ALL18(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.fake.Lose(m.Spec.ID)
	b.condition(m, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineLostReason)
	b.fake.Refuse("DeleteMachine", status.Error(codes.PermissionDenied, "belongs to another"))
	b.delete(m)
	b.gone(m)
}

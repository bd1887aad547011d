package infrastructure_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1beta1 "capstan.dev/capstan/api/infrastructure/v1beta1"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/testenv/testmetrics"
)

// IM-01, IM-03, IM-04, IM-09, IM-10, ALL-09, ALL-13: the normal path of the contract, and deletion.
func TestMachineLife(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)

	b.Expect(m.Finalizers).To(ConsistOf(infrav1.MachineFinalizer))
	b.Expect(m.Spec.ID).NotTo(BeEmpty())
	b.Expect(m.Spec.ProviderID).To(Equal("capstan://" + m.Spec.ID))
	b.Expect(m.Spec.HostName).To(Equal(b.host.Name))
	b.Expect(m.Status.FailureDomain).To(Equal(b.host.Name))
	b.Expect(m.Status.Addresses).To(Equal([]clusterv1.MachineAddress{
		{Type: clusterv1.MachineHostName, Address: m.Name},
		{Type: clusterv1.MachineInternalIP, Address: m.Spec.Network.Addresses[0].Address},
	}))

	made, data := b.fake.Machine(m.Spec.ID)
	b.Expect(string(data)).To(Equal("#cloud-config"))
	b.Expect(made.GetSpec().GetProviderId()).To(Equal(m.Spec.ProviderID))
	b.Expect(made.GetSpec().GetNetwork().GetId()).To(Equal(b.capstan.Spec.ID))
	b.Expect(made.GetSpec().GetNetwork().GetCidr()).To(Equal(b.capstan.Spec.Network.MachineCIDR))
	b.Expect(made.GetSpec().GetMemoryBytes()).To(Equal(int64(2 << 30)))
	b.Expect(made.GetSpec().GetPidsLimit()).To(Equal(int64(16384)))
	b.Expect(made.GetSpec().GetDiskBytes()).To(Equal(int64(20 << 30)))
	b.Expect(made.GetSpec().GetImage()).To(Equal("host"))
	b.Expect(made.GetSpec().GetKubernetesVersion()).To(Equal("v1.36.3"))
	b.Expect(b.fake.Calls("EnsureMachine")).To(Equal(1))

	// The writes for a machine: finalizer, Paused, assignment; then conditions, spec and status, once or twice. The number depends
	// on the time until the host reports the running machine.
	t.Logf("%d writes for a machine from creation to Ready, %d for its cluster", writes.of(m), writes.of(b.capstan))
	b.Expect(writes.of(m)).To(BeNumerically("<=", 16))
	b.Expect(writes.of(b.capstan)).To(BeNumerically("<=", 12))
	b.unchanged(m, b.capstan, b.host)

	b.delete(m)
	b.gone(m)
	made, _ = b.fake.Machine(m.Spec.ID)
	b.Expect(made).To(BeNil())
}

// witness is a capstand that checks at each side effect whether the object already has its finalizer. Otherwise the result of the
// call could remain after a deletion.
type witness struct {
	*fakehost.Host
	b *box
}

// serve starts the witness and returns its address.
func (w witness) serve() string {
	w.b.t.Helper()
	// Not t.TempDir(): a socket's path holds at most 107 bytes.
	dir, err := os.MkdirTemp("", "witness")
	w.b.Expect(err).NotTo(HaveOccurred())
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	w.b.Expect(err).NotTo(HaveOccurred())
	server := grpc.NewServer()
	hostpb.RegisterHostServer(server, w)
	go func() { _ = server.Serve(l) }()
	w.b.t.Cleanup(func() {
		server.Stop()
		_ = os.RemoveAll(dir)
	})
	return "unix://" + l.Addr().String()
}

func (w witness) EnsureNetwork(ctx context.Context, n *hostpb.Network) (*hostpb.Network, error) {
	w.look(ctx, "EnsureNetwork", &infrav1.CapstanCluster{}, n, infrav1.ClusterFinalizer)
	return w.Host.EnsureNetwork(ctx, n)
}

func (w witness) EnsureMachine(ctx context.Context, r *hostpb.EnsureMachineRequest) (*hostpb.Machine, error) {
	w.look(ctx, "EnsureMachine", &infrav1.CapstanMachine{}, r.GetSpec(), infrav1.MachineFinalizer)
	return w.Host.EnsureMachine(ctx, r)
}

func (w witness) look(ctx context.Context, call string, obj client.Object, of owner.Object, finalizer string) {
	err := env.Client.Get(ctx, client.ObjectKey{Namespace: of.GetNamespace(), Name: of.GetName()}, obj)
	if err != nil || !slices.Contains(obj.GetFinalizers(), finalizer) {
		w.b.t.Errorf("%s for %s with finalizers %v, %v", call, of.GetName(), obj.GetFinalizers(), err)
	}
}

// startAgain requests the start of a failed machine with the annotation. If the host refuses, the call is not repeated.
func (b *box) startAgain(m *infrav1.CapstanMachine) {
	b.t.Helper()
	annotated := func() bool { b.get(m); _, ok := m.Annotations[infrav1.MachineStartAnnotation]; return ok }
	ask := func() {
		b.get(m)
		before := m.DeepCopy()
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, infrav1.MachineStartAnnotation, "")
		b.Expect(env.Client.Patch(ctx, m, client.MergeFrom(before))).To(Succeed())
	}
	b.fake.Refuse("StartMachine", status.Error(codes.FailedPrecondition, "cannot"))
	ask()
	b.Eventually(annotated).Should(BeFalse())
	b.Expect(b.fake.Calls("StartMachine")).To(Equal(1))
	b.fake.Refuse("StartMachine", nil)
	ask()
	b.condition(m, "MachineRunning", metav1.ConditionTrue, "MachineRunning")
	b.Eventually(annotated).Should(BeFalse())
}

// IM-10, IC-08: the finalizers are there before the first side effect. One reconcile writes the provider id, and directly after it the
// status with the addresses, the failure domain and provisioned.
func TestMachineOrder(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.addHost(func(h *infrav1.CapstanHost) { h.Spec.Address = witness{fakehost.New(t), b}.serve() })
	b.addCluster(nil, nil)
	b.provisioned()
	versions := eachVersion[*infrav1.CapstanMachine](b, &infrav1.CapstanMachineList{})
	b.addMachine(nil, nil)
	pending := false
	for m := range versions {
		if m.Spec.ID != "" {
			b.Expect(m.Finalizers).To(ConsistOf(infrav1.MachineFinalizer))
		}
		provisioned := ptr.Deref(m.Status.Initialization.Provisioned, false)
		if pending {
			b.Expect(provisioned).To(BeTrue(), "the next version after the provider id")
		}
		pending = m.Spec.ProviderID != ""
		if provisioned {
			b.Expect(m.Spec.ProviderID).To(Equal("capstan://" + m.Spec.ID))
			b.Expect(m.Status.Addresses).To(HaveLen(2))
			b.Expect(m.Status.FailureDomain).NotTo(BeEmpty())
			return
		}
	}
}

// IM-05: a machine waits for each of its prerequisites, and nothing is created before.
func TestMachineWaits_IM05(t *testing.T) {
	b := newPausedBox(t)
	secret := ""
	machine, m := b.addMachine(func(m *clusterv1.Machine) {
		secret = *m.Spec.Bootstrap.DataSecretName
		m.Spec.Bootstrap = clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{APIGroup: "bootstrap.capstan.dev", Kind: "CapstanConfig", Name: "x"}}
	}, nil)
	orphan := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("orphan")}}
	b.create(orphan)
	_, stray := b.addMachine(func(m *clusterv1.Machine) { m.Spec.ClusterName = "no-such-cluster" }, nil)

	b.condition(m, "MachineRunning", metav1.ConditionFalse, "WaitingForClusterInfrastructureReady")
	b.resume()
	b.condition(m, "MachineRunning", metav1.ConditionFalse, "WaitingForBootstrapData")
	b.Expect(m.Spec.ID).To(BeEmpty())
	b.Expect(b.fake.Calls("EnsureMachine")).To(BeZero())
	update(b, machine, func(m *clusterv1.Machine) { m.Spec.Bootstrap.DataSecretName = &secret })
	b.running(m)

	for why, other := range map[string]*infrav1.CapstanMachine{"no Machine owner": orphan, "no Cluster": stray} {
		b.get(other)
		b.Expect(other.Finalizers).To(BeEmpty(), "%s: nothing is done", why)
		b.Expect(other.Status.Conditions).To(BeEmpty(), why)
	}
}

// IM-05: a deletion waits neither for the cluster's infrastructure nor for bootstrap data.
func TestDeletionDoesNotWait_IM05(t *testing.T) {
	t.Parallel()
	b := newPausedBox(t)
	_, early := b.addMachine(nil, nil)
	b.condition(early, "MachineRunning", metav1.ConditionFalse, "WaitingForClusterInfrastructureReady")
	b.Expect(early.Finalizers).To(ConsistOf(infrav1.MachineFinalizer))
	b.delete(early)
	b.gone(early)

	b.resume()
	_, m := b.addMachine(func(m *clusterv1.Machine) {
		m.Spec.Bootstrap = clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{APIGroup: "bootstrap.capstan.dev", Kind: "CapstanConfig", Name: "x"}}
	}, nil)
	b.condition(m, "MachineRunning", metav1.ConditionFalse, "WaitingForBootstrapData")
	b.Expect(m.Finalizers).To(ConsistOf(infrav1.MachineFinalizer))
	b.delete(m)
	b.gone(m)
}

// IM-05: the Machine of a pool has an empty dataSecretName. Its bootstrap data is that of the MachinePool.
func TestPoolMachineTakesTheDataOfItsPool_IM05(t *testing.T) {
	b := newBox(t).provisioned()
	pool := &clusterv1.MachinePool{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("pool"), Labels: map[string]string{clusterv1.ClusterNameLabel: b.cluster.Name}},
		Spec: clusterv1.MachinePoolSpec{ClusterName: b.cluster.Name, Template: clusterv1.MachineTemplateSpec{Spec: clusterv1.MachineSpec{
			ClusterName:       b.cluster.Name,
			Bootstrap:         clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{APIGroup: "bootstrap.capstan.dev", Kind: "CapstanConfig", Name: "x"}},
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachinePool", Name: "x"},
		}}},
	}
	b.create(pool)
	b.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: "pool-data"}, Data: map[string][]byte{"value": []byte("#cloud-config of the pool")}})
	_, m := b.addMachine(func(m *clusterv1.Machine) {
		m.Labels[clusterv1.MachinePoolNameLabel] = pool.Name
		m.Spec.Bootstrap = clusterv1.Bootstrap{DataSecretName: ptr.To("")}
	}, func(m *infrav1.CapstanMachine) {
		m.Labels = map[string]string{clusterv1.MachinePoolNameLabel: pool.Name}
	})
	b.condition(m, "MachineRunning", metav1.ConditionFalse, "WaitingForBootstrapData")
	update(b, pool, func(p *clusterv1.MachinePool) { p.Spec.Template.Spec.Bootstrap.DataSecretName = ptr.To("pool-data") })
	b.running(m)
	_, data := b.fake.Machine(m.Spec.ID)
	b.Expect(string(data)).To(Equal("#cloud-config of the pool"))
}

// A condition reports a missing or empty bootstrap Secret.
func TestMissingBootstrapSecret_IM05(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(func(m *clusterv1.Machine) { m.Spec.Bootstrap.DataSecretName = ptr.To("nothing-there") }, nil)
	b.Expect(b.condition(m, "MachineRunning", metav1.ConditionFalse, "WaitingForBootstrapData")).To(ContainSubstring("nothing-there"))
	b.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: "empty"}})
	_, m = b.addMachine(func(m *clusterv1.Machine) { m.Spec.Bootstrap.DataSecretName = ptr.To("empty") }, nil)
	b.Expect(b.condition(m, "MachineRunning", metav1.ConditionFalse, "WaitingForBootstrapData")).To(ContainSubstring(`no bootstrap data under the key "value"`))
}

// IM-02: the machine is placed in the failure domain of its Machine. A condition reports an unknown failure domain.
func TestFailureDomain_IM02(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	rack, _ := b.addHost(func(h *infrav1.CapstanHost) { h.Spec.FailureDomain = "rack-2" })
	b.provisioned()
	_, m := b.addMachine(func(m *clusterv1.Machine) { m.Spec.FailureDomain = "rack-2" }, nil)
	b.running(m)
	b.Expect(m.Spec.HostName).To(Equal(rack.Name))
	b.Expect(m.Status.FailureDomain).To(Equal("rack-2"))
	_, m = b.addMachine(func(m *clusterv1.Machine) { m.Spec.FailureDomain = "rack-3" }, nil)
	b.Expect(b.condition(m, "HostAssigned", metav1.ConditionFalse, "NoHost")).To(ContainSubstring("is in failure domain rack-2, not rack-3"))
	b.condition(m, "Ready", metav1.ConditionFalse, "NoHost")
}

// A machine waits until a host has enough memory for it.
func TestWaitsForCapacity(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.MemoryBytes = 3 << 30 })
	_, first := b.addMachine(nil, nil)
	b.running(first)
	before := b.counter("capstan_placement_refusals_total", "Memory")
	_, second := b.addMachine(nil, nil)
	b.Expect(b.condition(second, "HostAssigned", metav1.ConditionFalse, "NoHost")).To(ContainSubstring("1Gi of memory left, 2Gi are needed"))
	b.Expect(b.counter("capstan_placement_refusals_total", "Memory")).To(BeNumerically(">", before))
	placed := b.counter("capstan_placement_attempts_total", "Placed")
	b.delete(first)
	b.running(second)
	b.Expect(b.counter("capstan_placement_attempts_total", "Placed")).To(BeNumerically(">", placed))
}

// Machines that are placed at the same time have different memory, addresses and ids.
func TestManyMachinesAtOnce(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.addHost(nil)
	b.provisioned()
	var machines []*infrav1.CapstanMachine
	for range 20 {
		_, m := b.addMachine(nil, nil)
		machines = append(machines, m)
	}
	addresses, ids, hosts := map[string]bool{}, map[string]bool{}, map[string]int{}
	for _, m := range machines {
		b.running(m)
		addresses[m.Spec.Network.Addresses[0].Address] = true
		ids[m.Spec.ID] = true
		hosts[m.Spec.HostName]++
	}
	b.Expect(addresses).To(HaveLen(20))
	b.Expect(ids).To(HaveLen(20))
	for _, n := range hosts {
		b.Expect(n).To(Equal(10), "equal hosts get equal shares: %v", hosts)
	}
}

// An address that is in use on the host is replaced by a higher one. The same address is not tried twice.
func TestAddressIsTaken(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	for i := 2; i <= 3; i++ {
		b.Expect(stranger(b, fmt.Sprintf("stranger-%d", i), b.address(i))).To(Succeed())
	}
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.Expect(m.Spec.Network.Addresses[0].Address).To(Equal(b.address(4)))
}

// If the host has a machine with the same name and another id, a condition reports that it belongs to another management plane.
func TestKnownNameWithAnotherID(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { b.Expect(stranger(b, m.Name, b.address(9))).To(Succeed()) })
	b.Expect(b.condition(m, "MachineRunning", metav1.ConditionFalse, "MachineRefused")).To(ContainSubstring("is stranger-" + m.Name + " on this host"))
	b.Expect(m.Spec.Network.Addresses[0].Address).To(Equal(b.address(2)), "another address would not help")
}

// stranger creates a machine of another management plane in the cluster's network.
func stranger(b *box, name, address string) error {
	_, err := b.fake.EnsureMachine(ctx, &hostpb.EnsureMachineRequest{Spec: &hostpb.MachineSpec{
		Id: "stranger-" + name, Namespace: b.namespace, Name: name, MemoryBytes: 1 << 30, Image: "host", KubernetesVersion: "v1.36.3",
		Network:   &hostpb.Network{Id: b.capstan.Spec.ID, Namespace: b.namespace, Name: b.cluster.Name, Cidr: b.capstan.Spec.Network.MachineCIDR},
		Addresses: []*hostpb.Address{{Address: address, Prefix: 21}},
	}})
	return err
}

// A refusal that needs a change of the object is shown and not retried. A temporary refusal is retried. No other test runs meanwhile:
// free memory of any host is an event for each refused machine.
func TestRefusals(t *testing.T) {
	b := newBox(t).provisioned()
	b.fake.Refuse("EnsureMachine", status.Error(codes.InvalidArgument, "no such thing"))
	_, m := b.addMachine(nil, nil)
	b.Expect(b.condition(m, "MachineRunning", metav1.ConditionFalse, "MachineRefused")).To(ContainSubstring("no such thing"))
	calls := b.fake.Calls("EnsureMachine")

	retries := newBox(t).provisioned()
	retries.fake.Refuse("EnsureMachine", status.Error(codes.FailedPrecondition, "not yet"))
	_, m = retries.addMachine(nil, nil)
	b.Expect(b.condition(m, "MachineRunning", metav1.ConditionFalse, "MachineRefused")).To(ContainSubstring("not yet"))
	b.Eventually(func() int { return retries.fake.Calls("EnsureMachine") }).Should(BeNumerically(">=", calls+7))
	// The written condition and other changes of the object cause events. Retries would have caused as many calls as above.
	b.Expect(b.fake.Calls("EnsureMachine")).To(BeNumerically("<=", calls+3))
	retries.fake.Refuse("EnsureMachine", nil)
	b.running(m)
}

// IM-08, ALL-16: a condition reports a failed bootstrap, and terminal failures have their own reasons.
func TestTerminalFailures(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.fake.Update(m.Spec.ID, func(s *hostpb.MachineStatus) {
		s.Bootstrap, s.BootstrapMessage = hostpb.MachineStatus_BOOTSTRAP_FAILED, "runcmd 3 ended with 1"
	})
	b.Expect(b.condition(m, "BootstrapSucceeded", metav1.ConditionFalse, "BootstrapFailed")).To(ContainSubstring("runcmd 3 ended with 1"))
	b.condition(m, "Ready", metav1.ConditionFalse, "BootstrapFailed")

	b.fake.Update(m.Spec.ID, func(s *hostpb.MachineStatus) {
		s.Phase, s.Message, s.Restarts = hostpb.MachineStatus_FAILED, "its restarts are used up", 5
	})
	b.Expect(b.condition(m, "MachineRunning", metav1.ConditionFalse, "MachineFailed")).To(ContainSubstring("its restarts are used up"))
	b.startAgain(m)
	b.Eventually(func() *int32 { b.get(m); return m.Status.Restarts }).Should(HaveValue(Equal(int32(5))))
	b.Expect(m.Status.Initialization.Provisioned).To(HaveValue(BeTrue()), "provisioned is never taken back")

	b.fake.Update(m.Spec.ID, func(s *hostpb.MachineStatus) {
		s.Bootstrap, s.Phase, s.Message, s.DiskLost = hostpb.MachineStatus_SUCCEEDED, hostpb.MachineStatus_FAILED, "the disk of the machine is lost", true
	})
	b.Expect(b.condition(m, "MachineRunning", metav1.ConditionFalse, "MachineLost")).To(ContainSubstring("Delete the Machine"))
	former := &infrav1beta1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name}}
	b.Eventually(func() *string { b.get(former); return former.Status.FailureReason }).Should(HaveValue(Equal("MachineLost")))
}

// A machine that its host has lost is failed and is not created again.
func TestLostMachineIsNotReplaced_ALL16(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.fake.Lose(m.Spec.ID)
	b.condition(m, "MachineRunning", metav1.ConditionFalse, "MachineLost")
	b.Expect(b.fake.Calls("EnsureMachine")).To(Equal(1))
	b.delete(m)
	b.gone(m)
}

// While a host does not answer, the conditions of its machines are Unknown. They return to normal when it answers.
func TestHostOutage(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.fake.Stop()
	b.condition(m, "MachineRunning", metav1.ConditionUnknown, "HostUnreachable")
	b.condition(b.host, "Connected", metav1.ConditionFalse, "Unreachable")
	b.condition(b.capstan, "HostsAvailable", metav1.ConditionFalse, "NoHostConnected")
	b.fake.Start(t)
	b.running(m)
	b.condition(b.host, "Ready", metav1.ConditionTrue, "Ready")
	b.condition(b.capstan, "Ready", metav1.ConditionTrue, "Ready")
}

// IM-09: a deletion waits for an unreachable host until it answers or is abandoned.
func TestDeletionWaitsForTheHost_IM09(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, returns := b.addMachine(nil, nil)
	b.running(returns)
	b.fake.Stop()
	b.condition(b.host, "Connected", metav1.ConditionFalse, "Unreachable")
	b.delete(returns)
	b.Expect(b.condition(returns, "Deleting", metav1.ConditionTrue, "DeletionBlocked")).To(ContainSubstring(infrav1.HostAbandonedAnnotation))
	b.fake.Start(t)
	b.gone(returns)

	_, given := b.addMachine(nil, nil)
	b.running(given)
	b.fake.Stop()
	b.condition(b.host, "Connected", metav1.ConditionFalse, "Unreachable")
	b.delete(given)
	b.condition(given, "Deleting", metav1.ConditionTrue, "DeletionBlocked")
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Annotations = map[string]string{infrav1.HostAbandonedAnnotation: ""} })
	b.gone(given)
	b.delete(b.capstan)
	b.gone(b.capstan)
}

// IM-09: the finalizer stays after an error of the host and during a slow removal.
func TestDeletionIsRepeated_IM09(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.fake.Refuse("DeleteMachine", status.Error(codes.Internal, "disk is busy"))
	b.delete(m)
	b.Expect(b.condition(m, "Deleting", metav1.ConditionTrue, "DeletionBlocked")).To(ContainSubstring("disk is busy"))
	b.Expect(conditions.IsFalse(m, "Ready")).To(BeTrue(), "ALL-09: Ready over the whole life, deletion included")
	b.fake.Hold(true)
	b.fake.Refuse("DeleteMachine", nil)
	b.condition(m, "Deleting", metav1.ConditionTrue, "Deleting")
	b.fake.Hold(false)
	b.fake.Lose(m.Spec.ID)
	b.gone(m)
}

// IM-09: for an object that never had a Machine, only the finalizer is removed. If the Machine is already deleted, the machine is
// still removed from the host.
func TestDeletionWithoutOwner_IM09(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	orphan := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("orphan"), Finalizers: []string{infrav1.MachineFinalizer}}}
	b.create(orphan)
	b.delete(orphan)
	b.gone(orphan)
	b.Expect(b.fake.Calls("DeleteMachine")).To(BeZero())

	machine, m := b.addMachine(nil, nil)
	b.running(m)
	// A copy has the id of the original and no Machine.
	copied := &infrav1.CapstanMachine{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("copy"), Finalizers: []string{infrav1.MachineFinalizer}},
		Spec:       *m.Spec.DeepCopy(),
	}
	b.create(copied)
	b.delete(copied)
	b.gone(copied)
	original, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(original).NotTo(BeNil())

	b.delete(machine)
	b.gone(machine)
	b.delete(m)
	b.gone(m)
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made).To(BeNil())
}

// IM-06: control plane machines become backends of the load balancer, and workers do not. A deleted machine leaves the load
// balancer before its host removes it. IM-10: a machine joins before it has its provider id.
func TestControlPlaneMachinesAreBackends_IM06(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.fake.Hold(true)
	_, one := b.addMachine(controlPlane, nil)
	b.Eventually(b.backends).Should(HaveLen(1))
	b.get(one)
	b.Expect(one.Spec.ProviderID).To(BeEmpty())
	b.fake.Hold(false)
	_, two := b.addMachine(controlPlane, nil)
	_, worker := b.addMachine(nil, nil)
	b.running(one)
	b.running(two)
	b.running(worker)
	b.Eventually(b.backends).Should(ConsistOf(one.Spec.Network.Addresses[0].Address+":6443", two.Spec.Network.Addresses[0].Address+":6443"))
	made, _ := b.fake.Machine(one.Spec.ID)
	b.Expect(made.GetSpec().GetControlPlane()).To(BeTrue())

	// While the load balancer cannot be changed, the cluster's own reconciler cannot remove the backend either.
	b.fake.Refuse("EnsureLoadBalancer", status.Error(codes.Internal, "wait"))
	b.delete(one)
	b.Expect(b.condition(one, "Deleting", metav1.ConditionTrue, "DeletionBlocked")).To(ContainSubstring("leave the load balancer"))
	b.Expect(b.fake.Calls("DeleteMachine")).To(BeZero(), "it leaves before DeleteMachine is called")
	b.fake.Refuse("EnsureLoadBalancer", nil)
	b.gone(one)
	b.Expect(b.backends()).To(ConsistOf(two.Spec.Network.Addresses[0].Address + ":6443"))
}

// ALL-08: nothing changes while the cluster or the machine is paused, including its deletion.
func TestPausedMachine_ALL08(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
	b.condition(b.capstan, "Paused", metav1.ConditionTrue, "Paused")
	_, m := b.addMachine(nil, nil)
	b.condition(m, "Paused", metav1.ConditionTrue, "Paused")
	b.Expect(m.Finalizers).To(BeEmpty())
	b.Expect(m.Spec.ID).To(BeEmpty())
	update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = nil })
	b.running(m)
	update(b, m, func(m *infrav1.CapstanMachine) { m.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} })
	b.condition(m, "Paused", metav1.ConditionTrue, "Paused")
	b.deletePaused(m)
	b.Consistently(func() int { return b.fake.Calls("DeleteMachine") }).Should(BeZero())
	update(b, m, func(m *infrav1.CapstanMachine) { m.Annotations = nil })
	b.gone(m)
}

// ALL-12: a move loses the status. It is built again from the spec and the host, and nothing is created again.
// Row CTL-14.
func TestStatusIsRebuilt_ALL12(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	status, infra := m.Status.DeepCopy(), b.capstan.DeepCopy()
	before := m.DeepCopy()
	m.Status = infrav1.CapstanMachineStatus{}
	b.Expect(env.Client.Status().Patch(ctx, m, client.MergeFrom(before))).To(Succeed())
	update(b, m, func(m *infrav1.CapstanMachine) { m.Annotations = map[string]string{"moved": ""} })
	b.running(m)
	b.Expect(m.Status).To(And(HaveField("Addresses", Equal(status.Addresses)), HaveField("FailureDomain", Equal(status.FailureDomain))))
	b.Expect(b.fake.Calls("EnsureMachine")).To(Equal(1))

	beforeCluster := b.capstan.DeepCopy()
	b.capstan.Status = infrav1.CapstanClusterStatus{}
	b.Expect(env.Client.Status().Patch(ctx, b.capstan, client.MergeFrom(beforeCluster))).To(Succeed())
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Annotations = map[string]string{"moved": ""} })
	b.waitProvisioned()
	b.Eventually(func() infrav1.CapstanClusterStatus { b.get(b.capstan); return b.capstan.Status }).Should(
		HaveField("FailureDomains", Equal(infra.Status.FailureDomains)))
	b.Expect(b.capstan.Spec).To(Equal(infra.Spec))
}

// ALL-18: a host that does not admit the namespace is not used, even if the spec names it.
func TestHostOfAnotherNamespace_ALL18(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	other := newNamespace(t)
	foreign, _ := other.addHost(nil)
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.HostName = foreign.Name })
	b.condition(m, "HostAssigned", metav1.ConditionFalse, "HostNotAllowed")
	_, m = b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.HostName = b.host.Name })
	b.running(m)
}

// The host gets the size of the machine.
func TestSize(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		m.Spec.CPUs, m.Spec.Memory, m.Spec.Disk.Size = 2, ptr.To(resource.MustParse("1Gi")), ptr.To(resource.MustParse("3Gi"))
	})
	b.running(m)
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made.GetSpec().GetCpus()).To(Equal(int32(2)))
	b.Expect(made.GetSpec().GetMemoryBytes()).To(Equal(int64(1 << 30)))
	b.Expect(made.GetSpec().GetDiskBytes()).To(Equal(int64(3 << 30)))
	m.Spec.Disk = infrav1.MachineDiskSpec{}
	b.Expect(env.Client.Update(ctx, m)).To(MatchError(ContainSubstring("disk cannot shrink once the machine has its id")))
}

// TestPlacementIsWrittenLater_IM02: a placement that could not be written reserves no memory. The machine is placed as soon as
// the write succeeds.
func TestPlacementIsWrittenLater_IM02(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.MemoryBytes = 1 << 30 })
	small := func(m *infrav1.CapstanMachine) { m.Spec.Memory = ptr.To(resource.MustParse("1Gi")) }
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		small(m)
		writes.fail(m.Name, `"hostName"`, 3)
	})
	b.Eventually(func() bool { return writes.failed(m.Name) }).Should(BeTrue())
	b.Eventually(func() string {
		b.get(m)
		return m.Spec.HostName
	}).Should(Equal(b.host.Name))
}

// The alert CapstanManagerDown needs a series of each provider.
func TestManagerInfo(t *testing.T) {
	if got := testmetrics.Sum(t, "capstan_manager_info", map[string]string{"provider": "infrastructure"}); got != 1 {
		t.Errorf("capstan_manager_info is %v", got)
	}
}

// counter returns the value of a counter of the manager with one label. Tests in parallel also increase it.
func (b *box) counter(name, label string) float64 {
	b.t.Helper()
	for _, s := range testmetrics.Gather(b.t, name, nil) {
		for _, value := range s.Labels {
			if value == label {
				return s.Value
			}
		}
	}
	b.t.Fatalf("no metric %s of %s", name, label)
	return 0
}

// A machine without a host is placed when the selector of its cluster selects one (ALL-13). The test is not parallel, because free
// resources of the hosts of other tests are events for all machines without a host.
func TestHostSelectorOfACluster_ALL13(t *testing.T) {
	b := newBox(t).provisioned()
	selects := func(s *metav1.LabelSelector) {
		update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.HostSelector = s })
	}
	selects(&metav1.LabelSelector{MatchLabels: map[string]string{"rack": "none"}})
	_, m := b.addMachine(nil, nil)
	b.condition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)
	selects(nil)
	b.running(m)
}

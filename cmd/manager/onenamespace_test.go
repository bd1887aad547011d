package main

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// ALL-07: the API server calls the webhooks of a manager of one namespace for the objects of all namespaces.
func TestWebhooksOfOneNamespace_ALL07(t *testing.T) {
	w := sharedEnvironment(t, allWebhooks...)
	w.run(append(w.env.WebhookFlags(), "--namespace="+w.env.Namespace(t))...)
	// try waits for a refusal: it creates an object with dry run. This succeeds until the API server uses the webhooks, and fails with
	// another error until the manager has started.
	try := func(obj client.Object) func() error {
		return func() error {
			return w.env.Client.Create(t.Context(), obj.DeepCopyObject().(client.Object), client.DryRunAll)
		}
	}
	other := w.env.Namespace(t)
	w.refusesInfrastructure(other, try)
	w.refusesPools(other, try)
}

func (w *environment) refusesInfrastructure(other string, try func(client.Object) func() error) {
	w.t.Helper()
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: other, Name: "c"}, Spec: clusterv1.ClusterSpec{
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanCluster", Name: "c"},
		ClusterNetwork:    clusterv1.ClusterNetwork{Pods: clusterv1.NetworkRanges{CIDRBlocks: []string{"10.244.0.0/16"}}},
	}}
	w.create(cluster)
	capstan := func(network string) *infrav1.CapstanCluster {
		c := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: other, Name: "c", Labels: map[string]string{clusterv1.ClusterNameLabel: "c"}}}
		c.Spec.Network.MachineCIDR = network
		return c
	}
	w.Eventually(try(capstan("10.244.8.0/21"))).Should(MatchError(ContainSubstring("overlaps")), "compared with the networks of the Cluster")
	w.create(capstan("10.201.0.0/21"))

	machines := &infrav1.CapstanMachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: other, Name: "m"}}
	machines.Spec.MachineTemplate.ObjectMeta.Labels = map[string]string{"tier": "a b"}
	w.Expect(try(machines)()).To(MatchError(And(ContainSubstring("spec.machineTemplate.metadata.labels"), ContainSubstring("a b"))))
}

func (w *environment) refusesPools(other string, try func(client.Object) func() error) {
	w.t.Helper()
	pool := func(name, cidr string) *ipamv1.CapstanIPPool {
		p := &ipamv1.CapstanIPPool{ObjectMeta: metav1.ObjectMeta{Namespace: other, Name: name}}
		p.Spec.Subnets, p.Spec.Overlap = []ipamv1.Subnet{{CIDR: cidr}}, ipamv1.RefuseOverlap
		return p
	}
	empty := pool("empty", "10.0.0.0/24")
	empty.Spec.Subnets[0].Exclude = []ipamv1.AddressRange{"10.0.0.0/24"}
	w.Eventually(try(empty)).Should(MatchError(ContainSubstring("no address to allocate")))
	first := pool("p", "10.1.0.0/24")
	w.create(first)
	w.Expect(try(pool("second", "10.1.0.0/24"))()).To(MatchError(ContainSubstring("in common with CapstanIPPool/" + other + "/p")))
	w.create(&capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Namespace: other, Name: "claim"}, Spec: capiipamv1.IPAddressSpec{
		ClaimRef: capiipamv1.IPAddressClaimReference{Name: "claim"}, Address: "10.1.0.7", Prefix: ptr.To[int32](24),
		PoolRef: capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: "CapstanIPPool", Name: "p"},
	}})
	w.Expect(w.env.Client.Delete(w.t.Context(), first)).To(MatchError(ContainSubstring("10.1.0.7 of claim " + other + "/claim")))
}

// ALL-07: managers of two namespaces share a host. The host is not deleted before the machines of both are deleted. The
// last manager releases it.
func TestSharedHostIsDeleted_ALL07(t *testing.T) {
	w := sharedEnvironment(t)
	fake := fakehost.New(t)
	red, blue := w.env.Namespace(t), w.env.Namespace(t)
	w.run("--namespace=" + red)
	stopBlue := w.run("--namespace=" + blue)
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "shared"}, Spec: infrav1.CapstanHostSpec{Address: fake.Address()}}
	w.create(host)
	connected := func() bool { w.get(host); return conditions.IsTrue(host, infrav1.HostConnectedCondition) }
	w.Eventually(connected).Should(BeTrue())
	machine := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: blue, Name: "m"}, Spec: infrav1.CapstanMachineSpec{HostName: host.Name}}
	w.create(machine)
	stopBlue() // The other manager must then decide.
	w.Expect(w.env.Client.Delete(t.Context(), host)).To(Succeed())
	inUse := func() string { w.get(host); return conditions.GetMessage(host, clusterv1.DeletingCondition) }
	w.Eventually(inUse).Should(ContainSubstring("1 CapstanMachines and the load balancers of 0 CapstanClusters"))

	w.run("--namespace=" + blue)
	w.Expect(w.env.Client.Delete(t.Context(), machine)).To(Succeed())
	w.Eventually(func() error { return w.env.Client.Get(t.Context(), client.ObjectKeyFromObject(host), host) }).
		Should(MatchError(ContainSubstring("not found")))
}

// MP-07: metadata that the webhook would refuse now may exist from an earlier version. A condition shows it, and the
// pool can still be scaled down.
func TestRefusedMetadataIsShown_MP07(t *testing.T) {
	w := sharedEnvironment(t)
	w.run()
	f := w.family(familyOf{namespace: w.env.Namespace(t), name: "f", subnet: "10.1.0.0/24", hostAddress: fakehost.New(t).Address()})
	scale := func(n int) {
		w.patch(&clusterv1.MachinePool{ObjectMeta: f.meta("f")}, `{"spec":{"replicas":%d}}`, n)
	}
	members := func() (n int) {
		list := &infrav1.CapstanMachineList{}
		w.Expect(w.env.Client.List(t.Context(), list, client.InNamespace(f.cluster.Namespace), client.HasLabels{infrav1.MachinePoolLabel})).To(Succeed())
		return len(list.Items)
	}
	scale(2)
	w.Eventually(members).Should(Equal(2))
	pool := &infrav1.CapstanMachinePool{ObjectMeta: f.meta("f")}
	w.patch(pool, `{"spec":{"machineTemplate":{"metadata":{"labels":{"tier":"a b"}}}}}`)
	ready := func() string {
		w.get(pool)
		if c := conditions.Get(pool, clusterv1.ReadyCondition); c != nil {
			return c.Reason + ": " + c.Message
		}
		return ""
	}
	w.Eventually(ready).Should(And(HavePrefix(infrav1.PoolChangeFailedReason+": 2 changes failed"), ContainSubstring("a b")))
	scale(1)
	w.Eventually(members).Should(Equal(1))
	scale(0)
	w.Eventually(members).Should(BeZero())
}

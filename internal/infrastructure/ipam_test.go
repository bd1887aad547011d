package infrastructure_test

import (
	"maps"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

var pools = []infrav1.IPPoolReference{
	{APIGroup: "ipam.example.com", Kind: "FourPool", Name: "four"}, {APIGroup: "ipam.example.com", Kind: "SixPool", Name: "six"},
}

// fulfil creates the IPAddress of a claim, as an IPAM provider does.
func (b *box) fulfil(claim *capiipamv1.IPAddressClaim, address string, prefix int32, gateway string) {
	b.t.Helper()
	b.create(&capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name},
		Spec: capiipamv1.IPAddressSpec{
			ClaimRef: capiipamv1.IPAddressClaimReference{Name: claim.Name}, PoolRef: claim.Spec.PoolRef, Address: address, Prefix: ptr.To(prefix), Gateway: gateway,
		},
	})
	b.names(claim)
}

// names makes a claim name its IPAddress, which is created later.
func (b *box) names(claim *capiipamv1.IPAddressClaim) {
	b.t.Helper()
	before := claim.DeepCopy()
	claim.Status.AddressRef.Name = claim.Name
	b.Expect(env.Client.Status().Patch(ctx, claim, client.MergeFrom(before))).To(Succeed())
}

// exhausted sets the condition of a claim as an IPAM provider does for an exhausted pool.
func (b *box) exhausted(claim *capiipamv1.IPAddressClaim) {
	b.t.Helper()
	before := claim.DeepCopy()
	conditions.Set(claim, metav1.Condition{
		Type: capiipamv1.IPAddressClaimReadyCondition, Status: metav1.ConditionFalse, Reason: "PoolExhausted", Message: "3 of 3 are taken",
	})
	b.Expect(env.Client.Status().Patch(ctx, claim, client.MergeFrom(before))).To(Succeed())
}

func (b *box) claim(name string) *capiipamv1.IPAddressClaim {
	b.t.Helper()
	claim := &capiipamv1.IPAddressClaim{}
	b.Eventually(func() error {
		return env.Client.Get(ctx, client.ObjectKey{Namespace: b.namespace, Name: name}, claim)
	}).Should(Succeed())
	return claim
}

// restored (ALL-11) checks that obj gets its current references and finalizers back after it has lost them, and also if the
// references have an older or newer API version and the UID that the owner had before a restore.
func (b *box) restored(obj client.Object, outdated ...string) {
	b.t.Helper()
	b.get(obj)
	refs, finalizers := obj.GetOwnerReferences(), obj.GetFinalizers()
	check := func(what string, change func(client.Object)) {
		b.t.Helper()
		update(b, obj, change)
		b.Eventually(func(g Gomega) {
			g.Expect(env.Client.Get(ctx, client.ObjectKeyFromObject(obj), obj)).To(Succeed())
			g.Expect(obj.GetOwnerReferences()).To(Equal(refs))
			g.Expect(obj.GetFinalizers()).To(Equal(finalizers))
		}).Should(Succeed(), "%s of %s", what, obj.GetName())
	}
	if len(finalizers) > 0 {
		check("lost finalizers", func(o client.Object) { o.SetFinalizers(nil) })
	}
	if len(outdated) > 0 {
		check("lost references", func(o client.Object) { o.SetOwnerReferences(nil) })
	}
	for _, version := range outdated {
		check("references of "+version, func(o client.Object) {
			old := o.GetOwnerReferences()
			for i := range old {
				old[i].APIVersion, old[i].UID = version, "of-before-the-restore"
			}
			o.SetOwnerReferences(old)
		})
	}
}

var otherVersions = []string{infrav1.GroupVersion.Group + "/v1beta1", infrav1.GroupVersion.Group + "/v1beta3"}

// deletedWithoutOwners deletes an object whose claim has no owner reference at that moment. The controller must still find the
// claim.
func (b *box) deletedWithoutOwners(obj client.Object, claim *capiipamv1.IPAddressClaim) {
	b.t.Helper()
	pause := func(paused bool) {
		update(b, obj, func(o client.Object) {
			annotations := map[string]string{clusterv1.PausedAnnotation: "yes"}
			maps.Copy(annotations, o.GetAnnotations())
			if !paused {
				delete(annotations, clusterv1.PausedAnnotation)
			}
			o.SetAnnotations(annotations)
		})
	}
	pause(true)
	b.condition(obj.(conditioned), clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	update(b, claim, func(c *capiipamv1.IPAddressClaim) { c.OwnerReferences = nil })
	b.delete(obj)
	pause(false)
}

// IPAM-07, ALL-11: the machine owns a claim of the pool and waits for its address. The deletion of the machine waits for the claim.
// Row IM-09.
func TestAddressFromPool(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = pools[:1] })
	four := b.claim(m.Name + "-0")
	b.Expect(four.Spec).To(Equal(capiipamv1.IPAddressClaimSpec{
		ClusterName: b.cluster.Name, PoolRef: capiipamv1.IPPoolReference{APIGroup: "ipam.example.com", Kind: "FourPool", Name: "four"},
	}))
	b.Expect(four.Labels).To(HaveKeyWithValue(clusterv1.ClusterNameLabel, b.cluster.Name))
	owner := metav1.GetControllerOf(four)
	b.Expect(owner.UID).To(Equal(m.UID))
	b.Expect(owner.BlockOwnerDeletion).To(HaveValue(BeTrue()))

	b.exhausted(four)
	b.Eventually(func() string {
		return b.condition(m, "AddressesAssigned", metav1.ConditionFalse, "WaitingForIPAddress")
	}).Should(And(ContainSubstring(four.Name), ContainSubstring("PoolExhausted: 3 of 3 are taken")))
	b.Expect(m.Spec.ID).To(BeEmpty())
	b.fulfil(four, b.address(7), 21, b.address(1))
	b.running(m)
	b.Expect(m.Spec.Network.Addresses).To(Equal([]infrav1.InterfaceAddress{{Address: b.address(7), Prefix: 21, Gateway: b.address(1)}}))
	b.restored(four, otherVersions...)
	b.restored(m)

	update(b, four, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = []string{"example.com/slow"} })
	b.deletedWithoutOwners(m, four)
	b.Expect(b.condition(m, "Deleting", metav1.ConditionTrue, "Deleting")).To(ContainSubstring("IPAddressClaims"))
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made).To(BeNil(), "the address is released after the machine is gone")
	b.get(four)
	update(b, four, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = nil })
	b.gone(m)
}

// A condition names an address that is outside of the network.
func TestAddressOutsideOfTheNetwork_IPAM07(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = pools[:1] })
	b.fulfil(b.claim(m.Name+"-0"), "172.16.0.9", 24, "172.16.0.1")
	b.Expect(b.condition(m, "AddressesAssigned", metav1.ConditionFalse, "AddressInvalid")).
		To(And(ContainSubstring("172.16.0.9/24"), ContainSubstring(b.capstan.Spec.Network.MachineCIDR)))
	b.Expect(b.fake.Calls("EnsureMachine")).To(BeZero())
	b.delete(m)
	b.gone(m)
}

// A condition names a gateway that the machine could not reach.
func TestGatewayOutsideOfTheNetwork_IPAM07(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = pools[:1] })
	b.fulfil(b.claim(m.Name+"-0"), b.address(7), 21, "172.16.0.1")
	b.Expect(b.condition(m, "AddressesAssigned", metav1.ConditionFalse, "AddressInvalid")).
		To(And(ContainSubstring("172.16.0.1"), ContainSubstring(b.address(1))))
	b.delete(m)
	b.gone(m)
}

// IPAM-07: an IPAddress that was removed by force is created again after its claim has named it. The claim does not change then, and the
// new IPAddress is the event for the machine and for the cluster.
func TestAddressAfterItsClaim_IPAM07(t *testing.T) {
	b := fromPool(t)
	endpoint := b.claim(b.capstan.Name + "-endpoint")
	b.names(endpoint)
	b.Eventually(func() string {
		return b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionFalse, "WaitingForIPAddress")
	}).Should(ContainSubstring("is not to be seen yet"))
	b.settled(b.capstan)
	b.fulfil(endpoint, b.address(9), 24, b.address(1))
	b.provisioned()

	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = pools[:1] })
	claim := b.claim(m.Name + "-0")
	b.names(claim)
	b.Eventually(func() string {
		return b.condition(m, "AddressesAssigned", metav1.ConditionFalse, "WaitingForIPAddress")
	}).Should(ContainSubstring("is not to be seen yet"))
	b.settled(m)
	b.fulfil(claim, b.address(7), 24, b.address(1))
	b.running(m)
}

const endpointCIDR = "10.77.8.0/24"

// fromPool adds a cluster whose load balancer gets its address from a pool.
func fromPool(t *testing.T) *box {
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		c.Spec.Network.MachineCIDR = endpointCIDR
		c.Spec.LoadBalancer.AddressFromPool = &pools[0]
	})
	return b
}

// IPAM-07, IC-10, IC-12: the address of the endpoint comes from the pool. The load balancer is created after the address exists,
// and the claim is deleted after the load balancer.
func TestEndpointFromPool(t *testing.T) {
	t.Parallel()
	b := fromPool(t)
	claim := b.claim(b.capstan.Name + "-endpoint")
	b.Expect(claim.Spec).To(Equal(capiipamv1.IPAddressClaimSpec{
		ClusterName: b.cluster.Name, PoolRef: capiipamv1.IPPoolReference{APIGroup: "ipam.example.com", Kind: "FourPool", Name: "four"},
	}))
	owner := metav1.GetControllerOf(claim)
	b.Expect(owner.UID).To(Equal(b.capstan.UID))
	b.Expect(owner.BlockOwnerDeletion).To(HaveValue(BeTrue()))

	b.exhausted(claim)
	b.Eventually(func() string {
		return b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionFalse, "WaitingForIPAddress")
	}).Should(ContainSubstring("PoolExhausted: 3 of 3 are taken"))
	b.Expect(b.fake.Calls("EnsureLoadBalancer")).To(BeZero())

	b.fulfil(claim, b.address(9), 24, b.address(1))
	b.provisioned()
	b.Expect(b.capstan.Spec.LoadBalancer.Address).To(Equal(b.address(9)))
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint).To(Equal(clusterv1.APIEndpoint{Host: b.address(9), Port: 6443}))
	b.Expect(b.fake.LoadBalancer(b.capstan.Spec.ID).GetListen()).To(Equal([]string{":6443", b.address(9) + ":6443"}))
	b.unchanged(b.capstan)
	b.Expect(changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.AddressFromPool = &pools[1] })).
		To(MatchError(ContainSubstring("cannot be changed once the load balancer has its address")))
	b.Expect(changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer = infrav1.LoadBalancerSpec{} })).
		To(MatchError(ContainSubstring("loadBalancer cannot be removed")))
	b.restored(claim, otherVersions...)
	b.restored(b.capstan)

	update(b, claim, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = []string{"example.com/slow"} })
	b.deletedWithoutOwners(b.capstan, claim)
	b.Expect(b.condition(b.capstan, "Deleting", metav1.ConditionTrue, "Deleting")).To(ContainSubstring(claim.Name))
	b.Expect(b.fake.LoadBalancer(b.capstan.Spec.ID)).To(BeNil(), "the address is released after the load balancer is gone")
	b.get(claim)
	update(b, claim, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = nil })
	b.gone(b.capstan)
}

// A machine without a pool never gets the address of the load balancer. A cluster with an endpoint keeps it.
func TestMachinesKeepOffTheEndpoint(t *testing.T) {
	t.Parallel()
	b := fromPool(t)
	b.fulfil(b.claim(b.capstan.Name+"-endpoint"), b.address(2), 24, b.address(1))
	b.provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.Expect(m.Spec.Network.Addresses[0].Address).To(Equal(b.address(3)))

	without := newBox(t).provisioned().capstan
	b.Expect(changed(without, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.AddressFromPool = &pools[0] })).
		To(MatchError(ContainSubstring("addressFromPool cannot be added")))
}

// A condition names an unusable address of an endpoint, and a corrected address is used as soon as it exists.
func TestEndpointThatCannotBe_IPAM07(t *testing.T) {
	t.Parallel()
	for address, why := range map[string]string{
		"172.16.0.9": "outside the cluster's network " + endpointCIDR, "fd00::9": "outside", "10.77.8.1": "gateway", "10.77.8.255": "broadcast",
	} {
		t.Run(address, func(t *testing.T) {
			b := fromPool(t)
			claim := b.claim(b.capstan.Name + "-endpoint")
			b.fulfil(claim, address, 24, "")
			b.Expect(b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionFalse, "AddressInvalid")).
				To(And(ContainSubstring(address), ContainSubstring(why)))
			b.Expect(b.fake.Calls("EnsureLoadBalancer")).To(BeZero())
			b.delete(&capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name}})
			b.delete(claim)
			b.Eventually(func() bool {
				again := b.claim(claim.Name)
				same := again.UID == claim.UID
				claim = again
				return !same
			}).Should(BeTrue())
			b.fulfil(claim, b.address(9), 24, "")
			b.waitProvisioned()
		})
	}
}

// An endpoint without an address can get another pool: the claim of the former pool is replaced, also if it has an unusable address.
func TestEndpointFromAnotherPool_IPAM07(t *testing.T) {
	t.Parallel()
	b := fromPool(t)
	former := b.claim(b.capstan.Name + "-endpoint")
	b.fulfil(former, "172.16.0.9", 24, "")
	b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionFalse, "AddressInvalid")
	update(b, former, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = []string{"example.com/slow"} })
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.AddressFromPool = &pools[1] })
	b.Eventually(func() string {
		return b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionFalse, "WaitingForIPAddress")
	}).Should(ContainSubstring(former.Name + " is from the former pool"))
	b.delete(&capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Namespace: former.Namespace, Name: former.Name}})
	b.get(former)
	update(b, former, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = nil })
	b.Eventually(func() string { return b.claim(former.Name).Spec.PoolRef.Name }).Should(Equal(pools[1].Name))
	b.fulfil(b.claim(former.Name), b.address(9), 24, "")
	b.waitProvisioned()
}

// A claim with the expected name and another owner is neither used nor deleted. The condition contains this.
func TestClaimOfSomebodyElse_IPAM07(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	var foreign *capiipamv1.IPAddressClaim
	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		foreign = &capiipamv1.IPAddressClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: c.Name + "-endpoint"},
			Spec:       capiipamv1.IPAddressClaimSpec{PoolRef: capiipamv1.IPPoolReference{APIGroup: "ipam.example.com", Kind: "FourPool", Name: "four"}},
		}
		b.create(foreign)
		c.Spec.LoadBalancer.AddressFromPool = &pools[0]
	})
	b.Expect(b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionFalse, "WaitingForIPAddress")).
		To(And(ContainSubstring(foreign.Name), ContainSubstring("does not belong to "+b.capstan.Name)))
	b.delete(b.capstan)
	b.gone(b.capstan)
	b.get(foreign)
}

const sixCIDR = "fd00:77:8::/64"

// dualStack returns a provisioned cluster whose machines can also have IPv6 addresses.
func dualStack(t *testing.T) *box {
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineIPv6CIDR = sixCIDR })
	return b.provisioned()
}

// IPAM-08: a machine with two pools has two claims, and the address, prefix and gateway of both, IPv4 first.
// Row IPAM-07.
func TestDualStackMachine(t *testing.T) {
	t.Parallel()
	b := dualStack(t)
	b.Expect(b.fake.Network(b.capstan.Spec.ID).GetIpv6Cidr()).To(Equal(sixCIDR))
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		m.Spec.Network.AddressesFromPools = []infrav1.IPPoolReference{pools[1], pools[0]}
	})
	six, four := b.claim(m.Name+"-0"), b.claim(m.Name+"-1")
	b.Expect(six.Spec.PoolRef.Name).To(Equal("six"))
	b.fulfil(six, "fd00:77:8::7", 64, "fd00:77:8::1")
	b.exhausted(four)
	b.Eventually(func() string {
		return b.condition(m, "AddressesAssigned", metav1.ConditionFalse, "WaitingForIPAddress")
	}).Should(ContainSubstring(four.Name), "half of its addresses is not enough")
	b.Expect(m.Spec.Network.Addresses).To(BeEmpty())
	b.fulfil(four, b.address(7), 21, b.address(1))
	b.running(m)
	b.Expect(m.Spec.Network.Addresses).To(Equal([]infrav1.InterfaceAddress{
		{Address: b.address(7), Prefix: 21, Gateway: b.address(1)}, {Address: "fd00:77:8::7", Prefix: 64, Gateway: "fd00:77:8::1"},
	}))
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made.GetSpec().GetNetwork().GetIpv6Cidr()).To(Equal(sixCIDR))
	b.Expect(made.GetSpec().GetAddresses()).To(HaveLen(2))
	b.Eventually(func() []clusterv1.MachineAddress { b.get(m); return m.Status.Addresses }).Should(Equal([]clusterv1.MachineAddress{
		{Type: clusterv1.MachineHostName, Address: m.Name}, {Type: clusterv1.MachineInternalIP, Address: b.address(7)},
		{Type: clusterv1.MachineInternalIP, Address: "fd00:77:8::7"},
	}))

	b.delete(m)
	b.gone(m)
	for _, claim := range []client.Object{six, four} {
		b.gone(claim)
	}
	b.Expect(changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineIPv6CIDR = "fd00:77:9::/64" })).
		To(MatchError(ContainSubstring("cannot be changed from")))
}

// IPAM-08: in a dual stack network, a machine without pools has addresses of both families.
func TestDualStackWithoutPools_IPAM08(t *testing.T) {
	t.Parallel()
	b := dualStack(t)
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.Expect(m.Spec.Network.Addresses).To(Equal([]infrav1.InterfaceAddress{
		{Address: b.address(2), Prefix: 21, Gateway: b.address(1)}, {Address: "fd00:77:8::2", Prefix: 64, Gateway: "fd00:77:8::1"},
	}))
	b.delete(m)
	b.gone(m)
}

// IPAM-08: in a dual stack network, a machine with one pool has one address. Conditions name addresses that do not match.
func TestPoolsThatDoNotFit_IPAM08(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		cluster func(*testing.T) *box
		pools   []infrav1.IPPoolReference
		first   func(*box) string
		second  string
		why     string
	}{
		"IPv6 alone":         {dualStack, pools[1:], func(*box) string { return "fd00:77:8::7" }, "", "and no IPv4 address, but the first network of the cluster's machines is"},
		"no IPv6 network":    {func(t *testing.T) *box { return newBox(t).provisioned() }, pools, func(b *box) string { return b.address(7) }, "fd00:77:8::7", "machineIPv6CIDR"},
		"another network":    {dualStack, pools, func(b *box) string { return b.address(7) }, "fd00:77:9::7", "fd00:77:9::7/64, which is not a valid machine address in the cluster's network " + sixCIDR},
		"the bridge's":       {dualStack, pools, func(b *box) string { return b.address(7) }, "fd00:77:8::1", "not a valid machine address"},
		"two IPv4 addresses": {dualStack, pools, func(b *box) string { return b.address(7) }, "10.9.9.9", "10.9.9.9/64"},
	} {
		t.Run(name, func(t *testing.T) {
			b := tc.cluster(t)
			_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = tc.pools })
			prefix := int32(21)
			if tc.second == "" {
				prefix = 64
			}
			b.fulfil(b.claim(m.Name+"-0"), tc.first(b), prefix, "")
			if tc.second != "" {
				b.fulfil(b.claim(m.Name+"-1"), tc.second, 64, "")
			}
			b.Expect(b.condition(m, "AddressesAssigned", metav1.ConditionFalse, "AddressInvalid")).To(ContainSubstring(tc.why))
			b.Expect(b.fake.Calls("EnsureMachine")).To(BeZero())
			b.delete(m)
			b.gone(m)
		})
	}
	b := dualStack(t)
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = pools[:1] })
	b.fulfil(b.claim(m.Name+"-0"), b.address(7), 21, "")
	b.running(m)
	b.Expect(m.Spec.Network.Addresses).To(HaveLen(1))
}

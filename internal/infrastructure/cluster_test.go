package infrastructure_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// address returns the n-th address of the cluster's network.
func (b *box) address(n int) string {
	a := netip.MustParsePrefix(b.capstan.Spec.Network.MachineCIDR).Addr()
	for range n {
		a = a.Next()
	}
	return a.String()
}

// IC-01, IC-02, IC-04, IC-08, IC-10, IC-12, ALL-09, ALL-13: the normal path of the contract, and deletion.
func TestClusterLife(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.waitProvisioned()
	c := b.capstan
	b.Expect(c.Finalizers).To(ConsistOf(infrav1.ClusterFinalizer))
	b.Expect(c.Spec.ID).NotTo(BeEmpty())
	b.Expect(networkPool.Contains(netip.MustParsePrefix(c.Spec.Network.MachineCIDR).Addr())).To(BeTrue())
	b.Expect(c.Spec.LoadBalancer.HostName).To(Equal(b.host.Name))
	b.Expect(c.Spec.ControlPlaneEndpoint).To(Equal(clusterv1.APIEndpoint{Host: b.address(1), Port: 6443}))
	b.Expect(c.Status.FailureDomains).To(Equal([]clusterv1.FailureDomain{{Name: b.host.Name, ControlPlane: ptr.To(true)}}))
	b.condition(c, "Ready", metav1.ConditionTrue, "Ready")
	b.Expect(b.fake.LoadBalancer(c.Spec.ID).GetListen()).To(Equal([]string{":6443"}))
	b.Expect(b.fake.Network(c.Spec.ID).GetCidr()).To(Equal(c.Spec.Network.MachineCIDR))
	b.Expect(b.fake.Network(c.Spec.ID).GetName()).To(Equal(b.cluster.Name))
	b.unchanged(c)

	b.fake.Refuse("DeleteNetwork", refusal.Errorf(hostpb.Refusal_NETWORK_IN_USE, "in use"))
	b.delete(c)
	b.Expect(b.condition(c, "Deleting", metav1.ConditionTrue, "DeletionBlocked")).To(ContainSubstring("in use"))
	b.Expect(c.Finalizers).To(ConsistOf(infrav1.ClusterFinalizer), "an error keeps the finalizer")
	b.fake.Refuse("DeleteNetwork", nil)
	b.gone(c)
	b.Expect(b.fake.Network(c.Spec.ID)).To(BeNil())
	b.Expect(b.fake.LoadBalancer(c.Spec.ID)).To(BeNil())
}

// ALL-09: after a change of the spec all conditions of a ready object are about the new generation, as kubectl wait expects.
func TestConditionsAreAboutTheSpec_ALL09(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.BootId = "boot-1" })
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.RebootRequestedAt = metav1.Now() })
	b.Eventually(func() int { return b.fake.Calls("Reboot") }).Should(BeNumerically(">", 0))
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.BootId = "boot-2" })
	b.condition(b.host, infrav1.HostRebootedCondition, metav1.ConditionTrue, infrav1.HostRebootedReason)
	b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason)
	b.condition(b.capstan, infrav1.BootAllowedCondition, metav1.ConditionTrue, infrav1.BootAllowedReason)

	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Unschedulable = ptr.To(true) })
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.HostSelector = &metav1.LabelSelector{} })
	b.conditionsAreCurrent(b.host)
	b.conditionsAreCurrent(b.capstan)

	b.fake.Stop()
	b.condition(b.host, infrav1.HostConnectedCondition, metav1.ConditionFalse, "Unreachable")
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.HostSelector = nil })
	b.conditionsAreCurrent(b.capstan)
}

// conditionsAreCurrent waits until all conditions of an object are about its generation.
func (b *box) conditionsAreCurrent(object conditioned) {
	b.t.Helper()
	b.Eventually(func() (old []string) {
		b.get(object)
		for _, c := range object.GetConditions() {
			if c.ObservedGeneration != object.GetGeneration() {
				old = append(old, c.Type)
			}
		}
		return old
	}).Should(BeEmpty(), object.GetName())
}

// IC-04: hosts of the same failure domain make one entry. It accepts control planes if one of its hosts does.
func TestFailureDomains_IC04(t *testing.T) {
	b := newBox(t)
	for i := range 3 {
		b.addHost(func(h *infrav1.CapstanHost) {
			h.Spec.FailureDomain = "rack-1"
			h.Spec.ControlPlane = ptr.To(i == 1)
		})
	}
	worker, _ := b.addHost(func(h *infrav1.CapstanHost) { h.Spec.FailureDomain, h.Spec.ControlPlane = "rack-2", ptr.To(false) })
	newNamespace(t).addHost(nil)
	domains := func() []clusterv1.FailureDomain {
		b.get(b.capstan)
		return b.capstan.Status.FailureDomains
	}
	b.Eventually(domains).Should(Equal([]clusterv1.FailureDomain{
		{Name: b.host.Name, ControlPlane: ptr.To(true)}, {Name: "rack-1", ControlPlane: ptr.To(true)}, {Name: "rack-2", ControlPlane: ptr.To(false)},
	}))
	b.delete(worker)
	b.Eventually(domains).Should(HaveLen(2))
}

// IC-10: the endpoint of the user is kept, and the load balancer listens on the configured address and port.
func TestEndpointOfTheUser_IC10(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		cluster func(*clusterv1.Cluster)
		capstan func(*infrav1.CapstanCluster)
		want    clusterv1.APIEndpoint
		listen  []string
	}{
		"host and port": {
			capstan: func(c *infrav1.CapstanCluster) {
				c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: "api.example.com", Port: 7443}
			},
			want: clusterv1.APIEndpoint{Host: "api.example.com", Port: 7443}, listen: []string{":7443"},
		},
		"only the host": {
			capstan: func(c *infrav1.CapstanCluster) { c.Spec.ControlPlaneEndpoint.Host = "api.example.com" },
			want:    clusterv1.APIEndpoint{Host: "api.example.com", Port: 6443}, listen: []string{":6443"},
		},
		"another port outside": {
			capstan: func(c *infrav1.CapstanCluster) {
				c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: "api.example.com", Port: 443}
				c.Spec.LoadBalancer.Port = 6443
			},
			want: clusterv1.APIEndpoint{Host: "api.example.com", Port: 443}, listen: []string{":6443"},
		},
		"on the Cluster": {
			cluster: func(c *clusterv1.Cluster) {
				c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: "api.example.com", Port: 7443}
			},
			want: clusterv1.APIEndpoint{Host: "api.example.com", Port: 7443}, listen: []string{":7443"},
		},
		"bind address": {
			capstan: func(c *infrav1.CapstanCluster) {
				c.Spec.LoadBalancer = infrav1.LoadBalancerSpec{BindAddress: "192.0.2.10", Port: 8443}
			},
			want: clusterv1.APIEndpoint{Host: "192.0.2.10", Port: 8443}, listen: []string{":8443", "192.0.2.10:8443"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newNamespace(t)
			_, b.fake = b.addHost(nil)
			b.addCluster(tc.cluster, tc.capstan)
			b.waitProvisioned()
			b.Expect(b.capstan.Spec.ControlPlaneEndpoint).To(Equal(tc.want))
			b.Expect(b.fake.LoadBalancer(b.capstan.Spec.ID).GetListen()).To(Equal(tc.listen))
		})
	}
}

// IC-14: the cluster waits for an external endpoint, and no load balancer is created.
func TestExternalEndpoint_IC14(t *testing.T) {
	t.Parallel()
	for name, given := range map[string]clusterv1.APIEndpoint{
		"nothing":       {},
		"only the host": {Host: "api.example.com"},
		"only the port": {Port: 443},
	} {
		t.Run(name, func(t *testing.T) {
			b := newNamespace(t)
			_, b.fake = b.addHost(nil)
			b.addCluster(nil, func(c *infrav1.CapstanCluster) {
				c.Spec.LoadBalancer.Mode = infrav1.LoadBalancerExternal
				c.Spec.ControlPlaneEndpoint = given
			})
			b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionFalse, "WaitingForEndpoint")
			b.Expect(b.capstan.Status.Initialization.Provisioned).To(BeNil())
			b.Expect(b.capstan.Spec.ControlPlaneEndpoint).To(Equal(given))
			update(b, b.cluster, func(c *clusterv1.Cluster) {
				c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: "api.example.com", Port: 443}
			})
			b.waitProvisioned()
			b.Expect(b.capstan.Spec.ControlPlaneEndpoint).To(Equal(clusterv1.APIEndpoint{Host: "api.example.com", Port: 443}))
			b.Expect(b.fake.Calls("EnsureLoadBalancer")).To(BeZero())
			// The endpoint was not compared with those of other clusters (ALL-18).
			b.Expect(changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.Mode = infrav1.LoadBalancerManaged })).
				To(MatchError(ContainSubstring("cannot be changed to or from External once controlPlaneEndpoint is set")))
		})
	}
}

// IC-06: no controller writes the object or the status of an externally managed cluster, also during its deletion.
func TestExternallyManaged_IC06(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.addHost(nil)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		c.Annotations = map[string]string{clusterv1.ManagedByAnnotation: "others"}
		c.Finalizers = []string{infrav1.ClusterFinalizer}
		c.Spec.ID, c.Spec.Services.LoadBalancer = "external", &infrav1.ServiceLoadBalancerSpec{NodePorts: ptr.To(true)}
	})
	// Writes are counted by name, so the Cluster and the CapstanCluster share a count. The manager writes no Clusters.
	external := b.capstan
	before := external.DeepCopy()
	b.addCluster(nil, nil)
	b.waitProvisioned() // The manager has reconciled the next cluster.
	b.capstan = external
	b.Expect(writes.of(b.capstan)).To(BeZero())
	b.get(b.capstan)
	b.Expect(b.capstan).To(Equal(before))
	b.Expect(b.capstan.Status).To(Equal(infrav1.CapstanClusterStatus{}))
	b.delete(b.capstan)
	b.addCluster(nil, nil)
	b.waitProvisioned()
	b.capstan = external
	b.get(b.capstan)
	b.Expect(b.capstan.Finalizers).To(Equal(before.Finalizers))
	b.Expect(b.capstan.Status).To(Equal(infrav1.CapstanClusterStatus{}))
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Finalizers = nil })
	b.gone(b.capstan)
}

// IC-07, IC-12: without a Cluster, the controller does nothing, and deletion only removes the finalizer.
func TestNoOwner(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	_, b.fake = b.addHost(nil)
	c := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("c"), Finalizers: []string{infrav1.ClusterFinalizer}}}
	b.create(c)
	stray := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("c"), OwnerReferences: []metav1.OwnerReference{
		{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: "nobody", UID: "1"},
	}}}
	b.create(stray)
	b.addCluster(nil, nil)
	b.waitProvisioned() // The manager has reconciled the next cluster.
	b.Expect(writes.of(c)).To(BeZero())
	b.Expect(writes.of(stray)).To(BeZero())
	b.get(stray)
	b.Expect(stray.Finalizers).To(BeEmpty())
	b.delete(stray)
	b.gone(stray)
	b.delete(c)
	b.gone(c)
	b.Expect(b.fake.Calls("DeleteNetwork")).To(BeZero())
}

// IC-09: a condition contains the error, and the call is repeated.
func TestErrorsAreShownAndRetried_IC09(t *testing.T) {
	b := newNamespace(t)
	_, b.fake = b.addHost(nil)
	b.fake.Refuse("EnsureLoadBalancer", status.Error(codes.AlreadyExists, "port 6443 is taken"))
	b.addCluster(nil, nil)
	b.Expect(b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionFalse, "LoadBalancerRefused")).To(ContainSubstring("port 6443 is taken"))
	b.condition(b.capstan, "Ready", metav1.ConditionFalse, "LoadBalancerRefused")
	b.Expect(b.capstan.Status.Initialization.Provisioned).To(BeNil())
	b.fake.Refuse("EnsureLoadBalancer", nil)
	b.waitProvisioned()
}

// IC-11: one reconcile writes the spec with the endpoint, and directly after it the status with the failure domains. A cluster that is
// provisioned has both.
func TestOrder_IC11(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.addHost(nil)
	versions := eachVersion[*infrav1.CapstanCluster](b, &infrav1.CapstanClusterList{})
	b.addCluster(nil, nil)
	pending := false
	for c := range versions {
		if c.Spec.ID != "" {
			b.Expect(c.Finalizers).NotTo(BeEmpty(), "IC-08: the finalizer comes first")
		}
		provisioned := ptr.Deref(c.Status.Initialization.Provisioned, false)
		if pending {
			b.Expect(c.Status.FailureDomains).NotTo(BeEmpty(), "the version directly after the endpoint")
		}
		pending = c.Spec.ControlPlaneEndpoint.IsValid()
		if provisioned {
			b.Expect(pending).To(BeTrue())
			b.Expect(c.Status.FailureDomains).NotTo(BeEmpty())
			return
		}
	}
}

// A cluster waits until a host exists.
func TestWaitsForAHost(t *testing.T) {
	b := newNamespace(t)
	b.addCluster(nil, nil)
	b.condition(b.capstan, "HostsAvailable", metav1.ConditionFalse, "NoHosts")
	b.Expect(b.capstan.Spec.ID).To(BeEmpty())
	b.addHost(nil)
	b.waitProvisioned()
}

// A refused network from the pool is replaced by the next one. A refused network of the user is kept.
func TestRefusedNetwork(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	_, b.fake = b.addHost(nil)
	// Another management plane uses the whole pool except its last network.
	for i, cidr := range []string{"10.200.0.0/14", "10.204.0.0/15", "10.206.0.0/16", "10.207.0.0/17", "10.207.128.0/18", "10.207.192.0/19", "10.207.224.0/20", "10.207.240.0/21"} {
		_, err := b.fake.EnsureNetwork(ctx, &hostpb.Network{Id: fmt.Sprint("other-", i), Namespace: "other", Name: fmt.Sprint(i), Cidr: cidr})
		b.Expect(err).NotTo(HaveOccurred())
	}
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = "10.204.8.0/21" })
	b.Expect(b.condition(b.capstan, "NetworkReady", metav1.ConditionFalse, "NetworkRefused")).
		To(And(ContainSubstring("overlaps 10.204.0.0/15 of another cluster"), Not(ContainSubstring("other/"))), "the owner is in another namespace")
	b.Expect(b.capstan.Spec.Network.MachineCIDR).To(Equal("10.204.8.0/21"))
	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		c.Spec.Network.MachineCIDR = "10.207.232.0/21"
		c.Annotations = map[string]string{infrav1.MachineCIDRFromPoolAnnotation: ""}
	})
	b.waitProvisioned()
	b.Expect(b.capstan.Spec.Network.MachineCIDR).To(Equal("10.207.248.0/21"))
	b.delete(b.capstan)
	b.gone(b.capstan)
}

// Clusters that start at the same time get different networks.
func TestClustersAtOnce(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	var all []*infrav1.CapstanCluster
	for range 12 {
		b.addCluster(nil, nil)
		all = append(all, b.capstan)
	}
	b.addHost(nil) // All clusters have waited for it.
	seen := map[string]bool{}
	start := time.Now()
	for _, c := range all {
		b.capstan = c
		b.waitProvisioned()
		seen[c.Spec.Network.MachineCIDR] = true
	}
	t.Logf("all clusters provisioned within %s", time.Since(start).Round(time.Millisecond))
	b.Expect(seen).To(HaveLen(len(all)))
	// A host refuses the network of another cluster, and the controller then chooses again. No cluster needed this.
	events := &eventsv1.EventList{}
	b.Expect(env.Client.List(ctx, events, client.InNamespace(b.namespace))).To(Succeed())
	for _, e := range events.Items {
		b.Expect(e.Reason).NotTo(Equal(infrav1.NetworkRefusedReason), e.Note)
	}
}

// A condition reports overlapping networks, and the cluster continues after a correction.
func TestOverlappingNetworks(t *testing.T) {
	b := newNamespace(t)
	b.addHost(nil)
	b.addCluster(func(c *clusterv1.Cluster) { c.Spec.ClusterNetwork.Pods.CIDRBlocks = []string{"10.96.0.0/12"} }, nil)
	b.Expect(b.condition(b.capstan, "NetworkReady", metav1.ConditionFalse, "NetworkInvalid")).
		To(ContainSubstring("Service network 10.96.0.0/16 overlaps pod network 10.96.0.0/12"))
	update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.ClusterNetwork.Pods.CIDRBlocks = []string{"192.168.0.0/16"} })
	b.waitProvisioned()

	// A network from the pool does not overlap the cluster's own networks.
	b.addCluster(func(c *clusterv1.Cluster) { c.Spec.ClusterNetwork.Pods.CIDRBlocks = []string{"10.200.0.0/14"} }, nil)
	b.waitProvisioned()
	b.Expect(netip.MustParsePrefix("10.204.0.0/14").Contains(netip.MustParsePrefix(b.capstan.Spec.Network.MachineCIDR).Addr())).To(BeTrue())
}

// ALL-15: with a CapstanControlPlane, machines may boot after the kubeconfig and a Machine with bootstrap data exist, and provisioned
// becomes true after the first API server answers. The endpoint is written before, because the control plane needs it.
func TestProvisionedFollowsTheFirstAPIServer_ALL15(t *testing.T) {
	for name, addHost := range map[string]func(*box) *fakehost.Host{
		"network on one host":  func(b *box) *fakehost.Host { _, fake := b.addHost(nil); return fake },
		"network across hosts": func(b *box) *fakehost.Host { return b.rack(1)[0].fake },
	} {
		t.Run(name, func(t *testing.T) {
			b := newNamespace(t)
			bootsBeforeProvisioned(b, addHost(b))
		})
	}
}

func bootsBeforeProvisioned(b *box, fake *fakehost.Host) {
	b.addCluster(func(c *clusterv1.Cluster) {
		c.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{APIGroup: "controlplane.capstan.dev", Kind: "CapstanControlPlane", Name: "cp"}
	}, nil)
	b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionTrue, "LoadBalancerReady")
	b.Eventually(func() bool {
		b.get(b.capstan)
		return b.capstan.Spec.ControlPlaneEndpoint.IsValid()
	}).Should(BeTrue())
	b.condition(b.capstan, "BootAllowed", metav1.ConditionFalse, "PreparingFirstMachine")
	b.create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: b.cluster.Name + "-kubeconfig", Labels: map[string]string{clusterv1.ClusterNameLabel: b.cluster.Name}},
		Type:       clusterv1.ClusterSecretType, Data: map[string][]byte{"value": []byte("x")},
	})
	_, m := b.addMachine(controlPlane, nil)
	b.condition(b.capstan, "BootAllowed", metav1.ConditionTrue, "BootAllowed")
	b.Eventually(func() *hostpb.Machine {
		b.get(m)
		machine, _ := fake.Machine(m.Spec.ID)
		return machine
	}).ShouldNot(BeNil())
	b.get(b.capstan)
	b.Expect(b.capstan.Status.Initialization.Provisioned).To(BeNil(), "the API server does not answer yet")
	b.Expect(changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = "10.77.0.0/24" })).
		To(MatchError(ContainSubstring("machines and certificates have addresses of it")))
	b.running(m)
	fake.Answer(b.capstan.Spec.ID)
	b.waitProvisioned()
}

// IC-12: the deletion waits for the host of the load balancer.
func TestDeletionWaitsForTheHost_IC12(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.waitProvisioned()
	b.fake.Stop()
	b.condition(b.host, "Connected", metav1.ConditionFalse, "Unreachable")
	b.delete(b.capstan)
	b.Expect(b.condition(b.capstan, "Deleting", metav1.ConditionTrue, "DeletionBlocked")).To(ContainSubstring(b.host.Name))
	b.fake.Start(t)
	b.gone(b.capstan)
	b.Expect(b.fake.Network(b.capstan.Spec.ID)).To(BeNil())
}

// IC-12: the deletion of a cluster waits for its machines.
func TestDeletionWaitsForMachines_IC12(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.delete(b.capstan)
	b.Expect(b.condition(b.capstan, "Deleting", metav1.ConditionTrue, "DeletionBlocked")).To(ContainSubstring("1 CapstanMachines"))
	b.Expect(b.fake.Calls("DeleteNetwork")).To(BeZero())
	b.delete(m)
	b.gone(b.capstan)
}

// ALL-13: a Cluster was removed by force. The removal of the last machine is still an event for the CapstanCluster, so its
// deletion completes.
func TestDeletionAfterTheClusterIsGone(t *testing.T) {
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.delete(b.cluster)
	b.gone(b.cluster)
	b.delete(b.capstan)
	b.condition(b.capstan, "Deleting", metav1.ConditionTrue, "DeletionBlocked")
	b.delete(m)
	b.gone(m)
	b.gone(b.capstan)
	b.Expect(b.has(b.fake)()).To(neither)
}

// IC-12: an object with an id that never had a Cluster, for example a copy, owns nothing on any host.
func TestDeletionWithAnIDAndNoOwner(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.get(b.capstan)
	copied := &infrav1.CapstanCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("copy"), Finalizers: []string{infrav1.ClusterFinalizer}},
		Spec:       infrav1.CapstanClusterSpec{ID: b.capstan.Spec.ID},
	}
	b.create(copied)
	b.delete(copied)
	b.gone(copied)
	b.Expect(b.has(b.fake)()).To(Equal([]bool{true, true}), "the load balancer and network of the original")
}

// ALL-08
func TestPausedCluster_ALL08(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	_, b.fake = b.addHost(nil)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} })
	b.condition(b.capstan, "Paused", metav1.ConditionTrue, "Paused")
	b.Expect(b.capstan.Finalizers).To(BeEmpty())
	b.Expect(b.fake.Calls("EnsureNetwork")).To(BeZero())
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Annotations = nil })
	b.waitProvisioned()
	update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
	b.condition(b.capstan, "Paused", metav1.ConditionTrue, "Paused")
	b.deletePaused(b.capstan)
	b.Consistently(func() int { return b.fake.Calls("DeleteNetwork") }).Should(BeZero())
	update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = nil })
	b.gone(b.capstan)
}

// A tool can apply the manifest of a live CapstanCluster again without a change or a conflict. The manifest can also replace the
// object: the fields of the controller remain, because machines, certificates and hosts depend on them.
func TestManifestOfALiveCluster_IC10(t *testing.T) {
	t.Parallel()
	t.Run("one box", func(t *testing.T) { manifestOfALiveCluster(newBox(t).provisioned()) })
	t.Run("several hosts", func(t *testing.T) {
		b := newNamespace(t)
		b.rack(1)
		b.addCluster(nil, nil)
		manifestOfALiveCluster(b.provisioned())
		b.Expect(b.capstan.Spec.Network.Overlay.VNI).NotTo(BeZero())
		b.Expect(b.capstan.Spec.LoadBalancer.Port).NotTo(BeZero())
	})
}

func manifestOfALiveCluster(b *box) {
	b.t.Helper()
	manifest := func() *unstructured.Unstructured {
		u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"loadBalancer": map[string]any{"mode": "Managed"}}}}
		u.SetGroupVersionKind(infrav1.GroupVersion.WithKind("CapstanCluster"))
		u.SetNamespace(b.namespace)
		u.SetName(b.capstan.Name)
		return u
	}
	b.get(b.capstan)
	before := b.capstan.DeepCopy()
	b.Expect(before.Spec.LoadBalancerHosts).NotTo(BeEmpty())
	generation := int64(0)
	for range 3 {
		u := manifest()
		b.Expect(env.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner("gitops"))).To(Succeed())
		b.Expect(generation).To(BeElementOf(int64(0), u.GetGeneration()), "applied again, the object changed")
		generation = u.GetGeneration()
	}
	b.Eventually(func() error {
		b.get(b.capstan)
		u := manifest()
		u.SetResourceVersion(b.capstan.ResourceVersion) // as kubectl replace does
		return env.Client.Update(ctx, u)
	}).Should(Succeed())
	b.get(b.capstan)
	b.Expect(b.capstan.Spec.LoadBalancer.Mode).To(Equal(infrav1.LoadBalancerManaged))
	b.capstan.Spec.LoadBalancer.Mode = before.Spec.LoadBalancer.Mode
	b.Expect(b.capstan.Spec).To(Equal(before.Spec))
	b.Expect(b.capstan.Finalizers).To(Equal(before.Finalizers))
	b.Expect(b.capstan.OwnerReferences).To(Equal(before.OwnerReferences))
	b.Expect(b.capstan.Labels).To(Equal(before.Labels))
	b.Expect(b.capstan.Annotations).To(Equal(before.Annotations))
}

// A namespace can write a machine network that contains the whole pool of networks. It takes no network from the clusters that share no
// host with it (ALL-18). A cluster that can be on the same host chooses another network.
func TestLargeNetworkOfOthers_ALL18(t *testing.T) {
	t.Parallel()
	large := func(b *box, network netip.Prefix, running metav1.ConditionStatus) *infrav1.CapstanCluster {
		c := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("large")}}
		c.Spec.Network.MachineCIDR = network.String()
		b.create(c)
		before := c.DeepCopy()
		conditions.Set(c, metav1.Condition{Type: infrav1.BootAllowedCondition, Status: running, Reason: infrav1.BootAllowedReason})
		b.Expect(env.Client.Status().Patch(ctx, c, client.MergeFrom(before))).To(Succeed())
		return c
	}
	other := newNamespace(t)
	all := large(other, networkPool, metav1.ConditionTrue)
	b := newBox(t).provisioned()
	claimed := large(b, networkPool, metav1.ConditionFalse)
	half := netip.PrefixFrom(networkPool.Addr(), networkPool.Bits()+1)
	own := large(b, half, metav1.ConditionTrue)
	b.addCluster(nil, nil)
	b.waitProvisioned()
	b.Expect(half.Contains(netip.MustParsePrefix(b.capstan.Spec.Network.MachineCIDR).Addr())).To(BeFalse())
	other.delete(all)
	b.delete(claimed)
	b.delete(own)
}

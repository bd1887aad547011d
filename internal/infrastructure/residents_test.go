package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// writesOn creates objects by hand that name a host on which they have nothing.
func (b *box) writesOn(host *infrav1.CapstanHost) {
	b.t.Helper()
	b.create(&infrav1.CapstanMachine{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: "by-hand"},
		Spec:       infrav1.CapstanMachineSpec{ID: unique("by-hand"), HostName: host.Name},
	})
	b.create(&infrav1.CapstanCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: "by-hand"},
		Spec: infrav1.CapstanClusterSpec{
			ID: unique("by-hand"), LoadBalancer: infrav1.LoadBalancerSpec{HostName: host.Name},
			LoadBalancerHosts: []infrav1.LoadBalancerHost{{Name: host.Name, ID: "any"}},
		},
	})
	b.create(&infrav1.CapstanVolume{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: "by-hand"},
		Spec: infrav1.CapstanVolumeSpec{
			ID: unique("by-hand"), HostName: host.Name, HostID: "any", ClusterName: "c", Owner: "MachineDeployment/db", VolumeName: "data", SizeGiB: 1,
		},
	})
}

// ALL-18: objects that a namespace has written by hand keep no host that does not admit the namespace: it is drained, rebooted and
// deleted without them. What the host really has is drained and keeps the host, also after its namespace is not admitted any more.
func TestObjectsThatNameTheHostOfOthers_ALL18(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.BootId = "boot-1" })
	tenant := newNamespace(t)
	tenant.writesOn(b.host)
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.admits(b.host, "somebody-else")
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.RebootRequestedAt = metav1.Now() })
	b.Expect(b.condition(b.host, infrav1.HostDrainedCondition, metav1.ConditionFalse, infrav1.HostDrainingReason)).To(HavePrefix("1 machines are left"))
	b.condition(b.host, infrav1.HostRebootedCondition, metav1.ConditionFalse, infrav1.HostRebootDrainingReason)
	b.delete(m)
	b.gone(m)
	b.Eventually(func() int { return b.fake.Calls("Reboot") }).Should(BeNumerically(">", 0))
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.BootId = "boot-2" })
	b.condition(b.host, infrav1.HostRebootedCondition, metav1.ConditionTrue, infrav1.HostRebootedReason)

	b.delete(b.host)
	b.Expect(b.condition(b.host, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.HostDeletingInUseReason)).
		To(ContainSubstring("0 CapstanMachines and the load balancers of 1 CapstanClusters"), "its cluster is on the host")
	b.delete(b.capstan)
	b.gone(b.capstan)
	b.gone(b.host)
}

// A volume of a namespace that is not admitted any more keeps its host. Objects without anything on the host do so only while the
// host is not connected, or their namespace is admitted.
func TestVolumeKeepsTheHostOfOthers_ALL18(t *testing.T) {
	b := newBox(t).provisioned()
	tenant, owner := newNamespace(t), unique("owner")
	v := b.leftVolume(b.addDeployment(1))
	b.delete(b.capstan)
	b.gone(b.capstan)
	label := func(value string) {
		update(b, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant.namespace}}, func(n *corev1.Namespace) {
			metav1.SetMetaDataLabel(&n.ObjectMeta, "owner", value)
		})
	}
	label(owner)
	update(b, b.host, func(h *infrav1.CapstanHost) {
		h.Spec.AllowedNamespaces = &infrav1.AllowedNamespaces{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"owner": owner}}}
		h.Spec.Drain = ptr.To(true)
	})
	b.condition(b.host, infrav1.HostDrainedCondition, metav1.ConditionTrue, infrav1.HostDrainedReason)
	b.delete(b.host)
	inUse := func() string {
		return b.condition(b.host, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.HostDeletingInUseReason)
	}
	b.Expect(inUse()).To(ContainSubstring("1 CapstanVolumes"))

	b.fake.Stop()
	b.condition(b.host, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
	tenant.writesOn(b.host)
	b.fake.Start(t)
	b.Eventually(inUse).Should(ContainSubstring("1 CapstanMachines and the load balancers of 1 CapstanClusters"))
	b.unchanged(b.host) // From here on, the label is the only event.
	label("another")
	b.Eventually(inUse).Should(ContainSubstring("2 CapstanVolumes"), "the host has some volume")
	b.delete(v)
	b.gone(v)
	b.gone(b.host)
}

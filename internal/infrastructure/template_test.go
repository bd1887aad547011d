package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

func (b *box) template(change func(*infrav1.CapstanMachineTemplate)) *infrav1.CapstanMachineTemplate {
	t := &infrav1.CapstanMachineTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("t")},
		Spec:       infrav1.CapstanMachineTemplateSpec{Template: infrav1.CapstanMachineTemplateResource{Spec: infrav1.CapstanMachineSpec{Image: "host"}}},
	}
	if change != nil {
		change(t)
	}
	return t
}

// IM-07: templates have the fields that autoscalers need to scale from zero.
func TestTemplateCapacity_IM07(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	_, fake := b.addHost(nil)
	sized := b.template(func(t *infrav1.CapstanMachineTemplate) {
		t.Spec.Template.Spec.CPUs, t.Spec.Template.Spec.Memory = 2, ptr.To(resource.MustParse("4Gi"))
		t.Spec.Template.Spec.Disk.Size = ptr.To(resource.MustParse("50Gi"))
	})
	whole := b.template(nil)
	paused := b.template(func(t *infrav1.CapstanMachineTemplate) {
		t.Annotations = map[string]string{clusterv1.PausedAnnotation: ""}
	})
	b.create(sized)
	b.create(whole)
	b.create(paused)
	capacity := func(t *infrav1.CapstanMachineTemplate) func() string {
		return func() string {
			b.get(t)
			return t.Status.Capacity.Cpu().String() + " " + t.Status.Capacity.Memory().String() + " " + t.Status.Capacity.StorageEphemeral().String() + " " + t.Status.NodeInfo.Architecture
		}
	}
	b.Eventually(capacity(sized)).Should(Equal("2 4Gi 50Gi amd64"))
	b.Eventually(capacity(whole)).Should(Equal("4 2Gi 20Gi amd64"))
	fake.SetInfo(func(i *hostpb.HostInfo) { i.Cpus = 8 })
	b.Eventually(capacity(whole)).Should(Equal("8 2Gi 20Gi amd64"))
	b.addHost(func(h *infrav1.CapstanHost) { h.Labels = map[string]string{"small": ""} })
	b.Eventually(capacity(whole)).Should(Equal("4 2Gi 20Gi amd64"), "at least what the smallest host has")
	b.Expect(capacity(paused)()).To(Equal("0 0 0 "), "ALL-08")
	b.Expect(whole.Status.Capacity).To(HaveKey(corev1.ResourceMemory))
	b.unchanged(sized, whole)
}

// IM-07: a template of a Cluster describes machines on the hosts that its CapstanCluster selects.
func TestTemplateOfACluster_IM07(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.addHost(nil)
	_, large := b.addHost(func(h *infrav1.CapstanHost) { h.Labels = map[string]string{"size": "large"} })
	large.SetInfo(func(i *hostpb.HostInfo) { i.Cpus = 8 })
	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		c.Spec.HostSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"size": "large"}}
	})
	machine := b.template(nil)
	b.create(machine)
	b.own(machine, b.cluster, "Cluster")
	cpus := func() int64 { b.get(machine); return machine.Status.Capacity.Cpu().Value() }
	b.Eventually(cpus).Should(BeEquivalentTo(8))
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.HostSelector = nil })
	b.Eventually(cpus).Should(BeEquivalentTo(4), "the smallest of all hosts")

	// ALL-08: nothing changes while the Cluster is paused.
	update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
	b.condition(b.capstan, clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	update(b, b.capstan, func(c *infrav1.CapstanCluster) {
		c.Spec.HostSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"size": "large"}}
	})
	b.Consistently(cpus).Should(BeEquivalentTo(4))
	update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = nil })
	b.Eventually(cpus).Should(BeEquivalentTo(8))
}

// ALL-10, MP-10: templates cannot be changed, except in a dry run of the topology controller.
func TestTemplatesAreImmutable_ALL10(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	machine := b.template(func(t *infrav1.CapstanMachineTemplate) { t.Spec.Template.Spec.HostName = "a" })
	cluster := &infrav1.CapstanClusterTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("t")}}
	cluster.Spec.Template.Spec.LoadBalancer.Port = 6443
	pool := &infrav1.CapstanMachinePoolTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("t")}}
	pool.Spec.Template.Spec.MachineTemplate.Spec.CPUs = 1
	b.create(machine)
	b.create(cluster)
	b.create(pool)
	for name, change := range map[string]func(annotations map[string]string, opts ...client.PatchOption) error{
		"CapstanMachineTemplate": func(annotations map[string]string, opts ...client.PatchOption) error {
			b.get(machine)
			changed := machine.DeepCopy()
			changed.Annotations, changed.Spec.Template.Spec.CPUs = annotations, 7
			return env.Client.Patch(ctx, changed, client.MergeFrom(machine), opts...)
		},
		"hostName of a CapstanMachineTemplate": func(annotations map[string]string, opts ...client.PatchOption) error {
			b.get(machine)
			changed := machine.DeepCopy()
			changed.Annotations, changed.Spec.Template.Spec.HostName = annotations, "b"
			return env.Client.Patch(ctx, changed, client.MergeFrom(machine), opts...)
		},
		"labels of the machines of a CapstanMachineTemplate": func(annotations map[string]string, opts ...client.PatchOption) error {
			b.get(machine)
			changed := machine.DeepCopy()
			changed.Annotations, changed.Spec.Template.ObjectMeta.Labels = annotations, map[string]string{"a": "b"}
			return env.Client.Patch(ctx, changed, client.MergeFrom(machine), opts...)
		},
		"CapstanClusterTemplate": func(annotations map[string]string, opts ...client.PatchOption) error {
			b.get(cluster)
			changed := cluster.DeepCopy()
			changed.Annotations, changed.Spec.Template.Spec.LoadBalancer.Port = annotations, 7443
			return env.Client.Patch(ctx, changed, client.MergeFrom(cluster), opts...)
		},
		"CapstanMachinePoolTemplate": func(annotations map[string]string, opts ...client.PatchOption) error {
			b.get(pool)
			changed := pool.DeepCopy()
			changed.Annotations, changed.Spec.Template.Spec.MachineTemplate.Spec.CPUs = annotations, 7
			return env.Client.Patch(ctx, changed, client.MergeFrom(pool), opts...)
		},
	} {
		topology := map[string]string{clusterv1.TopologyDryRunAnnotation: ""}
		b.Expect(change(nil)).To(MatchError(ContainSubstring("a template cannot be changed")), name)
		b.Expect(change(nil, client.DryRunAll)).To(MatchError(ContainSubstring("a template cannot be changed")), name)
		b.Expect(change(topology)).To(MatchError(ContainSubstring("a template cannot be changed")), name)
		b.Expect(change(topology, client.DryRunAll)).To(Succeed(), name)
	}
	update(b, machine, func(t *infrav1.CapstanMachineTemplate) { t.Labels = map[string]string{"a": "b"} })
}

// IC-05, IM-07: a template cannot contain fields that must be unique for each object.
func TestInvalidTemplates(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	for want, change := range map[string]func(*infrav1.CapstanMachineTemplate){
		"spec.template.spec.id":         func(t *infrav1.CapstanMachineTemplate) { t.Spec.Template.Spec.ID = "12345678" },
		"spec.template.spec.providerID": func(t *infrav1.CapstanMachineTemplate) { t.Spec.Template.Spec.ProviderID = "capstan://x" },
		"spec.template.spec.network.addresses": func(t *infrav1.CapstanMachineTemplate) {
			t.Spec.Template.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: "10.200.0.2", Prefix: 21}}
		},
		"spec.template.metadata.labels": func(t *infrav1.CapstanMachineTemplate) {
			t.Spec.Template.ObjectMeta.Labels = map[string]string{"not a label": ""}
		},
	} {
		b.Expect(env.Client.Create(ctx, b.template(change))).To(MatchError(ContainSubstring(want)))
	}
	for want, change := range map[string]func(*infrav1.CapstanClusterSpec){
		"spec.template.spec.id": func(s *infrav1.CapstanClusterSpec) { s.ID = "12345678" },
		"spec.template.spec.network: Invalid value: \"10.200.0.0/30\"": func(s *infrav1.CapstanClusterSpec) { s.Network.MachineCIDR = "10.200.0.0/30" },
	} {
		c := &infrav1.CapstanClusterTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("t")}}
		c.Spec.Template.Spec.LoadBalancer.Port = 6443
		change(&c.Spec.Template.Spec)
		b.Expect(env.Client.Create(ctx, c)).To(MatchError(ContainSubstring(want)))
	}
}

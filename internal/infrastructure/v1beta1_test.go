package infrastructure_test

import (
	"slices"
	"strings"
	"sync"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1beta1 "capstan.dev/capstan/api/infrastructure/v1beta1"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

// TestV1Beta1 (ALL-09, ALL-10, ALL-16, IC-02, IC-03, IC-04, IC-05, IM-04, MP-10): a client of v1beta1 reads the status fields of that
// contract, and its writes keep all fields of v1beta2.
func TestV1Beta1(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	key := metav1.ObjectMeta{Namespace: b.namespace, Name: unique("old")}
	now := metav1.Now().Rfc3339Copy()
	condition := func(kind, reason string) metav1.Condition {
		return metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: "why", LastTransitionTime: now, ObservedGeneration: 1}
	}

	cluster := &infrav1beta1.CapstanCluster{ObjectMeta: key, Spec: infrav1.CapstanClusterSpec{Network: infrav1.ClusterNetworkSpec{MachineCIDR: "10.211.8.0/24"}}}
	b.create(cluster)
	hub := &infrav1.CapstanCluster{ObjectMeta: key}
	b.Expect(testenv.ChangeStatus(ctx, env.Client, hub, func(c *infrav1.CapstanCluster) {
		c.Status.Initialization.Provisioned = ptr.To(true)
		c.Status.FailureDomains = []clusterv1.FailureDomain{
			{Name: "a", ControlPlane: ptr.To(true), Attributes: map[string]string{"row": "1"}}, {Name: "b", ControlPlane: ptr.To(false)},
		}
		c.Status.Conditions = []metav1.Condition{condition("Ready", infrav1.NoHostsReason)}
	})).To(Succeed())
	b.get(cluster)
	b.Expect(cluster.Status.Ready).To(HaveValue(BeTrue()), "IC-02")
	b.Expect(cluster.Status.FailureDomains).To(Equal(clusterv1beta1.FailureDomains{
		"a": {ControlPlane: true, Attributes: map[string]string{"row": "1"}}, "b": {},
	}), "IC-04")
	b.Expect(cluster.Status.Conditions).To(HaveLen(1), "ALL-09")
	b.Expect(cluster.Status.Conditions[0].Severity).To(Equal(clusterv1beta1.ConditionSeverityWarning), "ALL-09")
	b.Expect(cluster.Status.FailureReason).To(BeNil(), "IC-03: a host can come")

	before := hub.DeepCopy()
	b.Expect(testenv.Change(ctx, env.Client, cluster, func(c *infrav1beta1.CapstanCluster) {
		c.Labels, c.Spec.LoadBalancer.Port = map[string]string{"written": "v1beta1"}, 7443
	})).To(Succeed())
	b.get(hub)
	b.Expect(hub.Labels).To(HaveKeyWithValue("written", "v1beta1"))
	b.Expect(hub.Spec.LoadBalancer.Port).To(Equal(int32(7443)))
	b.Expect(hub.Status).To(Equal(before.Status))
	b.Expect(hub.Annotations).To(Equal(before.Annotations))
	err := testenv.Change(ctx, env.Client, cluster, func(c *infrav1beta1.CapstanCluster) { c.Spec.Network.MachineCIDR = "10.211.8.1/24" })
	b.Expect(err).To(MatchError(ContainSubstring("without host bits")), "CEL rules also apply in v1beta1")

	machine := &infrav1beta1.CapstanMachine{ObjectMeta: key}
	b.create(machine)
	b.Expect(testenv.ChangeStatus(ctx, env.Client, &infrav1.CapstanMachine{ObjectMeta: key}, func(m *infrav1.CapstanMachine) {
		m.Status.Initialization.Provisioned = ptr.To(true)
		m.Status.Conditions = []metav1.Condition{condition(infrav1.MachineRunningCondition, infrav1.MachineLostReason)}
	})).To(Succeed())
	b.get(machine)
	b.Expect(machine.Status.Ready).To(HaveValue(BeTrue()), "IM-04")
	b.Expect(machine.Status.FailureReason).To(HaveValue(Equal(infrav1.MachineLostReason)), "ALL-16")
	b.Expect(machine.Status.FailureMessage).To(HaveValue(Equal("why")), "ALL-16")

	template := &infrav1beta1.CapstanMachineTemplate{ObjectMeta: key}
	template.Spec.Template.Spec.Image = "host"
	b.create(template)
	err = testenv.Change(ctx, env.Client, template, func(t *infrav1beta1.CapstanMachineTemplate) { t.Spec.Template.Spec.CPUs = 3 })
	b.Expect(err).To(MatchError(ContainSubstring("a template cannot be changed")), "ALL-10: webhooks also apply in v1beta1")

	labels := clusterv1.ObjectMeta{Labels: map[string]string{"row": "IC-05"}}
	clusters := &infrav1beta1.CapstanClusterTemplate{ObjectMeta: key}
	clusters.Spec.Template = infrav1.CapstanClusterTemplateResource{ObjectMeta: labels, Spec: infrav1.CapstanClusterSpec{Network: hub.Spec.Network}}
	wantClusters := clusters.Spec.DeepCopy()
	b.create(clusters)
	clustersHub := &infrav1.CapstanClusterTemplate{ObjectMeta: key}
	b.get(clustersHub)
	b.Expect(clustersHub.Spec).To(Equal(*wantClusters), "IC-05")
	pools := &infrav1beta1.CapstanMachinePoolTemplate{ObjectMeta: key}
	pools.Spec.Template = infrav1.CapstanMachinePoolTemplateResource{ObjectMeta: labels, Spec: infrav1.CapstanMachinePoolSpec{DeletePolicy: "Newest"}}
	wantPools := pools.Spec.DeepCopy()
	b.create(pools)
	poolsHub := &infrav1.CapstanMachinePoolTemplate{ObjectMeta: key}
	b.get(poolsHub)
	b.Expect(poolsHub.Spec).To(Equal(*wantPools), "MP-10")
}

// TestDeprecation (ALL-14): the API server warns clients of v1beta1, and no others.
func TestDeprecation(t *testing.T) {
	b := newNamespace(t)
	warnings := &warnings{}
	config := rest.CopyConfig(env.Config)
	config.WarningHandler = warnings
	c, err := client.New(config, client.Options{Scheme: env.Scheme})
	b.Expect(err).NotTo(HaveOccurred())
	b.Expect(c.List(ctx, &infrav1.CapstanMachinePoolList{}, client.InNamespace(b.namespace))).To(Succeed())
	b.Expect(warnings.text()).To(BeEmpty())
	b.Expect(c.List(ctx, &infrav1beta1.CapstanMachinePoolList{}, client.InNamespace(b.namespace))).To(Succeed())
	b.Expect(warnings.text()).To(ContainSubstring("CapstanMachinePool is deprecated: use v1beta2"))
}

type warnings struct {
	mu  sync.Mutex
	all []string
}

func (w *warnings) HandleWarningHeader(_ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, text)
}

func (w *warnings) text() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Join(slices.Clone(w.all), "\n")
}

package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
)

// TestLateWrite writes a status late, as after a slow answer of the API server. A later reconcile has read the object from
// before this write and changed nothing. The write itself must cause a reconcile. Otherwise the status stays wrong until the
// next resync.
func TestLateWrite(t *testing.T) {
	b := newBox(t).provisioned()
	_, machine := b.addMachine(nil, nil)
	b.running(machine)
	for _, tc := range []struct {
		name      string
		object    settable
		condition string
	}{
		{"CapstanMachine", machine, infrav1.MachineRunningCondition},
		{"CapstanCluster", b.capstan, clusterv1.ReadyCondition},
		{"CapstanHost", b.host, clusterv1.ReadyCondition},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := NewWithT(t)
			var before *metav1.Condition
			g.Eventually(func() *metav1.Condition {
				b.get(tc.object)
				before = conditions.Get(tc.object, tc.condition)
				return before
			}, expect.Patience).Should(HaveField("Status", metav1.ConditionTrue))
			stored := tc.object.DeepCopyObject().(client.Object)
			conditions.Set(tc.object, metav1.Condition{Type: tc.condition, Status: metav1.ConditionUnknown, Reason: "HostUnreachable", Message: "late"})
			g.Expect(env.Client.Status().Patch(ctx, tc.object, client.MergeFrom(stored))).To(Succeed())
			g.Eventually(func() *metav1.Condition {
				b.get(tc.object)
				return conditions.Get(tc.object, tc.condition)
			}, expect.Patience).Should(HaveField("Status", metav1.ConditionTrue))
		})
	}
}

// settable is an object with conditions.
type settable interface {
	client.Object
	conditions.Getter
	conditions.Setter
}

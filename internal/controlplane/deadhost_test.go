package controlplane

import (
	"context"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// TestDeadHost (CP-10): the host of a Machine is lost, so its infrastructure cannot be removed. The member of the Machine leaves
// etcd, and another Machine replaces it. The replicas include the lost Machine, and a condition contains the cause.
func TestDeadHost(t *testing.T) {
	w, cp, _ := connected(t, nil)
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	w.fewest = 3
	lost := machinesOf(t, w.cluster)[0]
	infra := &infrav1.CapstanMachine{ObjectMeta: w.cluster.Meta(lost.Name)}
	w.dead[lost.Name], w.careful[lost.Name] = true, true
	w.until("a condition reports the failure", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.EtcdClusterHealthyCondition, metav1.ConditionFalse, lost.Name)
	})
	unhealthy(w, &lost)
	w.until("its member is asked to leave", func() bool { m := w.member(lost.Name); return m != nil && m.Spec.Leave })
	w.cluster.Change(infra, func() { infra.Finalizers = []string{"test/host-is-dead"} })
	if err := env.Client.Delete(context.Background(), infra); err != nil {
		t.Fatal(err)
	}
	w.stubborn[lost.Name] = true
	w.careful = map[string]bool{}
	w.until("another Machine is created", func() bool {
		return len(w.made) == 4 && w.voting() == 3 && w.cluster.Get(cp) == nil && ptr.Deref(cp.Status.Replicas, 0) == 4 &&
			testcluster.Has(cp, clusterv1.ScalingDownCondition, metav1.ConditionTrue, "Machine "+lost.Name+" has left the cluster, and its CapstanMachine "+lost.Name+" is still there")
	})

	before := namesOfMachines(t, w)
	otherTemplate(w, cp, "other")
	w.until("a rollout replaces all other Machines", func() bool {
		still := slices.DeleteFunc(namesOfMachines(t, w), func(name string) bool { return !slices.Contains(before, name) })
		return strings.Join(still, " ") == lost.Name && w.voting() == 3
	})
	if w.fewest < 2 {
		t.Errorf("the fewest voting members were %d", w.fewest)
	}
	w.cluster.Change(infra, func() { infra.Finalizers = nil })
	w.stubborn = map[string]bool{}
	w.until("the host is back, and the Machine is removed", w.settled(cp, 3))
}

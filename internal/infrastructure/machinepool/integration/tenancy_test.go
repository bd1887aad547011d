package integration

import (
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hollow"
	"capstan.dev/capstan/internal/testenv"
)

// MP-11: the manager changes only objects in its namespace and with its label. The machines of a pool have the label of the pool, so
// that the same manager reconciles them. Not parallel: all tests share the manager.
func TestTenancy(t *testing.T) {
	quick := hollow.Behaviour{StartDelay: 20 * time.Millisecond, BootDelay: 50 * time.Millisecond}
	ours, theirs := newWorldWith(t, quick), newWorldWith(t, quick)
	defer provider.restart(t)

	provider.restart(t, "--namespace="+ours.namespace)
	theirs.addPool(1, nil)
	ours.addPool(1, nil)
	ours.settled(1)
	theirs.untouched()

	provider.restart(t, "--watch-filter=blue")
	ours.scale(2)
	theirs.label(theirs.hosts[0])
	theirs.untouched()
	theirs.label(theirs.pool)
	theirs.settled(1)
	for _, m := range theirs.capstanMachines() {
		theirs.Expect(m.Labels).To(HaveKeyWithValue(clusterv1.WatchLabel, "blue"))
	}
	ours.Expect(ours.capstanMachines()).To(HaveLen(1))

	provider.restart(t)
	ours.settled(2)
}

func (w *world) untouched() {
	w.t.Helper()
	w.Consistently(func(g Gomega) {
		w.get(w.pool)
		g.Expect(w.pool.Finalizers).To(BeEmpty())
		g.Expect(w.pool.Status.Conditions).To(BeEmpty())
		g.Expect(w.capstanMachines()).To(BeEmpty())
	}).Should(Succeed())
}

func (w *world) label(o client.Object) {
	w.t.Helper()
	w.get(o)
	before := o.DeepCopyObject().(client.Object)
	metav1.SetMetaDataLabel(o.(metav1.ObjectMetaAccessor).GetObjectMeta().(*metav1.ObjectMeta), clusterv1.WatchLabel, "blue")
	w.Expect(env.Client.Patch(ctx, o, client.MergeFrom(before))).To(Succeed())
}

// MP-11: bootstrap data of another namespace is never used, even with the same name.
func TestBootstrapDataOfAnotherNamespace(t *testing.T) {
	w := newWorld(t)
	other := &world{WithT: w.WithT, t: t, namespace: env.Namespace(t)}
	w.addPool(1, func(mp *clusterv1.MachinePool, _ *infrav1.CapstanMachinePool) {
		name := unique("data")
		other.addSecret(name)
		mp.Spec.Template.Spec.Bootstrap.DataSecretName = &name
	})
	w.Eventually(w.describe).Should(ContainSubstring("Cannot read Secret"))
	w.Consistently(w.describe).ShouldNot(ContainSubstring("capstan://"))
	w.addSecret(*w.mp.Spec.Template.Spec.Bootstrap.DataSecretName)
	w.settled(1)
}

// MP-12: `clusterctl describe cluster` shows the pool and each of its machines.
func TestClusterctlDescribe(t *testing.T) {
	w := newWorld(t)
	w.addPool(2, nil)
	w.settled(2)
	cmd := exec.Command(filepath.Join(testenv.Root(), "bin", "clusterctl"), "describe", "cluster", w.cluster.Name,
		"--namespace", w.namespace, "--kubeconfig", kubeconfigFile, "--grouping=false", "--echo")
	out, err := cmd.CombinedOutput()
	w.Expect(err).NotTo(HaveOccurred(), string(out))
	for _, want := range append(w.machineNames(), "MachinePool "+w.namespace+"/"+w.mp.Name, "CapstanMachinePool "+w.namespace+"/"+w.pool.Name) {
		w.Expect(string(out)).To(ContainSubstring(want))
	}
}

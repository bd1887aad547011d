package integration

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/internal/host/hollow"
)

// The manager is killed during creation, scaling and updates, as soon as a step of them is seen. Each change completes, and no machine is
// created or deleted twice. Not parallel: all tests share the manager.
func TestManagerIsKilled(t *testing.T) {
	w := newWorldWith(t, hollow.Behaviour{StartDelay: 50 * time.Millisecond, BootDelay: 100 * time.Millisecond, Jitter: 0.9})
	w.addPool(6, nil)
	killed := func(seen func() bool) {
		t.Helper()
		w.Eventually(seen).WithPolling(10 * time.Millisecond).Should(BeTrue())
		provider.restart(t)
	}
	killed(func() bool { return len(w.capstanMachines()) > 0 })
	w.settled(6)

	stop, former := w.watchBudget(), map[string]bool{}
	for _, m := range w.capstanMachines() {
		former[m.Name] = true
	}
	w.update(func(mp *clusterv1.MachinePool) { mp.Spec.Template.Spec.Version = oldVersion })
	for replaced := range 3 {
		killed(func() bool { return w.stay(former) < 6-replaced })
	}
	w.settled(6)
	fewest, most := stop()
	w.Expect(fewest).To(BeNumerically(">=", 6))
	w.Expect(most).To(BeNumerically("<=", 7))

	w.scale(2)
	killed(func() bool { return w.stay(nil) < 6 })
	w.settled(2)
	w.Expect(env.Client.Delete(ctx, w.mp)).To(Succeed())
	killed(func() bool { return w.stay(nil) < 2 })
	w.gone(w.pool)
	w.Expect(w.capstanMachines()).To(BeEmpty())
}

// stay returns how many of some CapstanMachines exist and are not being deleted; nil: of all.
func (w *world) stay(of map[string]bool) (n int) {
	for _, m := range w.capstanMachines() {
		if m.DeletionTimestamp.IsZero() && (of == nil || of[m.Name]) {
			n++
		}
	}
	return n
}

// Two managers act as the leader for one pool at the same time. In the end, the pool has the desired number of machines, and no two
// have the same address.
func TestTwoManagersLead(t *testing.T) {
	w := newWorld(t)
	w.addPool(0, nil)
	other := newProcess(kubeconfigFile)
	other.args = append(other.args, "--webhook-port=0", "--namespace="+w.namespace)
	w.Expect(other.start()).To(Succeed())
	t.Cleanup(other.kill)
	for _, n := range []int32{12, 4, 9} {
		w.scale(n)
		w.settled(int(n))
		holders := map[string]string{}
		for _, m := range w.capstanMachines() {
			address := m.Spec.Network.Addresses[0].Address
			w.Expect(holders).NotTo(HaveKey(address), "%s has it, too", m.Name)
			holders[address] = m.Name
			w.Expect(m.Status.Addresses).To(ContainElement(HaveField("Address", address)))
		}
	}
}

package integration

import (
	"context"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// watchBudget watches the pool until stop is called. It records the smallest number of available machines and the largest number
// of machines over all states.
func (w *world) watchBudget() (stop func() (fewest, most int)) {
	w.t.Helper()
	machines, capstans := &clusterv1.MachineList{}, &infrav1.CapstanMachineList{}
	w.Expect(env.Client.List(ctx, machines, client.InNamespace(w.namespace))).To(Succeed())
	w.Expect(env.Client.List(ctx, capstans, client.InNamespace(w.namespace))).To(Succeed())
	ctx, cancel := context.WithCancel(ctx)
	available, present := map[string]bool{}, map[string]bool{}
	for i := range machines.Items {
		available[machines.Items[i].Name] = isAvailable(&machines.Items[i])
	}
	for i := range capstans.Items {
		present[capstans.Items[i].Name] = true
	}
	ofMachines, ofCapstans := w.watch(ctx, machines), w.watch(ctx, capstans)
	fewest, most := count(available), count(present)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ofMachines != nil || ofCapstans != nil {
			select {
			case e, ok := <-ofMachines:
				if !ok {
					ofMachines = nil
				} else if m, isMachine := e.Object.(*clusterv1.Machine); isMachine {
					available[m.Name] = e.Type != watch.Deleted && isAvailable(m)
				}
			case e, ok := <-ofCapstans:
				if !ok {
					ofCapstans = nil
				} else if m, isMachine := e.Object.(*infrav1.CapstanMachine); isMachine {
					present[m.Name] = e.Type != watch.Deleted
				}
			}
			fewest, most = min(fewest, count(available)), max(most, count(present))
		}
	}()
	return func() (int, int) {
		cancel()
		<-done
		return fewest, most
	}
}

// watch continues a list. The channel is closed when ctx ends.
func (w *world) watch(ctx context.Context, list client.ObjectList) <-chan watch.Event {
	w.t.Helper()
	c, err := client.NewWithWatch(env.Config, client.Options{Scheme: env.Scheme})
	w.Expect(err).NotTo(HaveOccurred())
	watcher, err := c.Watch(ctx, list, client.InNamespace(w.namespace), &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.GetResourceVersion()}})
	w.Expect(err).NotTo(HaveOccurred())
	context.AfterFunc(ctx, watcher.Stop)
	return watcher.ResultChan()
}

func isAvailable(m *clusterv1.Machine) bool {
	return m.DeletionTimestamp.IsZero() && conditions.IsTrue(m, clusterv1.MachineNodeReadyCondition)
}

func count(set map[string]bool) (n int) {
	for _, in := range set {
		if in {
			n++
		}
	}
	return n
}

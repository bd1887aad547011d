package controlplane

import (
	"context"
	"sync"
	"testing"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/testcluster"
)

// delayed is a cache that has stood still: reads give what was there when it was frozen, writes go through.
type delayed struct {
	client.Client
	mu       sync.Mutex
	machines *clusterv1.MachineList
	objects  map[client.ObjectKey]client.Object
}

func (d *delayed) freeze(t *testing.T, w *world, cp *controlplanev1.CapstanControlPlane) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.machines = &clusterv1.MachineList{}
	if err := d.Client.List(context.Background(), d.machines, client.InNamespace(w.cluster.Namespace), client.HasLabels{clusterv1.MachineControlPlaneLabel}); err != nil {
		t.Fatal(err)
	}
	if err := w.cluster.Get(cp); err != nil {
		t.Fatal(err)
	}
	d.objects = map[client.ObjectKey]client.Object{client.ObjectKeyFromObject(cp): cp.DeepCopy()}
}

func (d *delayed) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if machines, ok := list.(*clusterv1.MachineList); ok && d.machines != nil {
		d.machines.DeepCopyInto(machines)
		return nil
	}
	return d.Client.List(ctx, list, opts...)
}

func (d *delayed) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if cp, ok := obj.(*controlplanev1.CapstanControlPlane); ok && d.objects[key] != nil {
		d.objects[key].(*controlplanev1.CapstanControlPlane).DeepCopyInto(cp)
		return nil
	}
	return d.Client.Get(ctx, key, obj, opts...)
}

// straight is a way to the workload cluster without a manager.
type straight struct{ clustercache.ClusterCache }

func (straight) GetUncachedClient(context.Context, client.ObjectKey) (client.Client, error) {
	return env.Client, nil
}

// TestStaleCache: a cache that stands still causes no second create, no second delete and no second leave.
// The manager's own reconciler is kept away by pausing; one with a frozen cache runs in its place, again and
// again.
func TestStaleCache(t *testing.T) {
	w, cp, _ := connected(t, nil)
	w.until("one", w.settled(cp, 1))
	w.cluster.Change(cp, func() { cp.Annotations[clusterv1.PausedAnnotation] = "" })
	becomes(t, w.cluster, cp, "the manager keeps away", func() bool { return has(cp, clusterv1.PausedCondition, "True", "") })

	cache := &delayed{Client: env.Client}
	r := &Reconciler{Client: cache, LiveClient: &unpaused{env.Client}, SecretClient: env.Client, ClusterCache: straight{}, prober: newProber()}
	run := func(times int) {
		t.Helper()
		for range times {
			w.lookAfterEtcd()
			if _, err := r.Reconcile(context.Background(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(cp)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	frozen := func(replicas int32) {
		t.Helper()
		w.cluster.Change(cp, func() { cp.Spec.Replicas = ptr.To(replicas) })
		cache.freeze(t, w, cp)
		for _, o := range cache.objects {
			o.SetAnnotations(map[string]string{controlplanev1.InitializedAnnotation: "true"})
		}
	}

	frozen(3)
	run(5)
	if n := len(machinesOf(t, w.cluster)); n != 3 {
		t.Fatalf("%d Machines were made instead of 3", n)
	}
	configs := &bootstrapv1.CapstanConfigList{}
	if err := env.Client.List(context.Background(), configs, client.InNamespace(w.cluster.Namespace)); err != nil || len(configs.Items) != 3 {
		t.Errorf("%d CapstanConfigs, %v", len(configs.Items), err)
	}
	testcluster.Eventually(t, "all vote", func() bool {
		w.step()
		return w.voting() == 3
	})

	deleting := func() (n int) {
		for _, m := range machinesOf(t, w.cluster) {
			if !m.DeletionTimestamp.IsZero() {
				n++
			}
		}
		return n
	}
	frozen(1)
	run(5)
	if n := deleting(); n != 1 {
		t.Fatalf("%d Machines were deleted instead of 1", n)
	}

	// The spec that the cache has is not the one that is stored: nothing is done.
	testcluster.Eventually(t, "one is gone", func() bool {
		cache.machines, cache.objects = nil, map[client.ObjectKey]client.Object{}
		frozen(1)
		w.step()
		run(1)
		return len(machinesOf(t, w.cluster)) == 2
	})
	frozen(1)
	w.cluster.Change(cp, func() { cp.Spec.Replicas = ptr.To[int32](3) })
	before := deleting()
	run(5)
	if n := deleting(); n != before || len(machinesOf(t, w.cluster)) != 2 {
		t.Errorf("acted on a spec that has changed: %d deleted, before %d", n, before)
	}
}

// unpaused reads control planes without the annotation that keeps the manager away.
type unpaused struct{ client.Client }

func (u *unpaused) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	if err := u.Client.Get(ctx, key, obj, opts...); err != nil {
		return err
	}
	if cp, ok := obj.(*controlplanev1.CapstanControlPlane); ok {
		delete(cp.Annotations, clusterv1.PausedAnnotation)
	}
	return nil
}

package controlplane

import (
	"context"
	"slices"
	"sync"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// frozenCache is a client with a stale cache: reads return the objects from the time of the freeze, writes reach the API server.
type frozenCache struct {
	client.Client
	mu       sync.Mutex
	machines *clusterv1.MachineList
	objects  map[client.ObjectKey]client.Object
	deletes  []string
}

func (d *frozenCache) freeze(t *testing.T, w *simulation, cp *controlplanev1.CapstanControlPlane) {
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

func (d *frozenCache) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if machines, ok := list.(*clusterv1.MachineList); ok && d.machines != nil {
		d.machines.DeepCopyInto(machines)
		return nil
	}
	return d.Client.List(ctx, list, opts...)
}

func (d *frozenCache) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if cp, ok := obj.(*controlplanev1.CapstanControlPlane); ok && d.objects[key] != nil {
		d.objects[key].(*controlplanev1.CapstanControlPlane).DeepCopyInto(cp)
		return nil
	}
	return d.Client.Get(ctx, key, obj, opts...)
}

// Delete notes which Machines are deleted.
func (d *frozenCache) Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error {
	if _, ok := obj.(*clusterv1.Machine); ok {
		d.deletes = append(d.deletes, obj.GetName())
	}
	return d.Client.Delete(ctx, obj, opts...)
}

// directClusterCache connects to the workload cluster without a manager. It records which members of etcd are asked to leave.
type directClusterCache struct {
	clustercache.ClusterCache
	client.Client
	leaves []string
}

func (s *directClusterCache) GetUncachedClient(context.Context, client.ObjectKey) (client.Client, error) {
	return s, nil
}

func (s *directClusterCache) Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
	if m, ok := obj.(*etcdv1.EtcdMember); ok && m.Spec.Leave {
		s.leaves = append(s.leaves, m.Name)
	}
	return s.Client.Patch(ctx, obj, patch, opts...)
}

// staleControlPlane is a paused control plane, so the manager does not reconcile it. A reconciler with a frozen cache runs instead.
type staleControlPlane struct {
	*simulation
	cp         *controlplanev1.CapstanControlPlane
	cache      *frozenCache
	workload   *directClusterCache
	reconciler *Reconciler
}

func newStaleControlPlane(t *testing.T) *staleControlPlane {
	w, cp, _ := connected(t, nil)
	w.until("one", w.settled(cp, 1))
	w.cluster.Change(cp, func() { cp.Annotations[clusterv1.PausedAnnotation] = "" })
	w.cluster.Becomes(t, cp, "the manager keeps away", func() bool { return testcluster.Has(cp, clusterv1.PausedCondition, "True", "") })
	s := &staleControlPlane{simulation: w, cp: cp, cache: &frozenCache{Client: env.Client}, workload: &directClusterCache{Client: env.Client}}
	s.reconciler = newReconciler(s.cache, nil, reconciling.Options{LiveClient: &unpaused{env.Client}, SecretCachingClient: env.Client, ClusterCache: s.workload})
	s.frozen(1)
	s.run(1)
	s.beat() // The reconciler has just read all Leases.
	return s
}

// frozen changes the replicas of the spec and then freezes the cache with the current objects.
func (s *staleControlPlane) frozen(replicas int32) {
	s.t.Helper()
	s.cache.machines, s.cache.objects = nil, nil
	s.cluster.Change(s.cp, func() { s.cp.Spec.Replicas = &replicas })
	s.cache.freeze(s.t, s.simulation, s.cp)
	for _, o := range s.cache.objects {
		delete(o.GetAnnotations(), clusterv1.PausedAnnotation)
	}
}

func (s *staleControlPlane) run(times int) {
	s.t.Helper()
	for range times {
		s.lookAfterEtcd(s.members())
		if _, err := s.reconciler.Reconcile(context.Background(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(s.cp)}); err != nil {
			s.t.Fatal(err)
		}
	}
}

// thaw makes steps with a current cache until a condition holds.
func (s *staleControlPlane) thaw(what string, replicas int32, holds func() bool) {
	s.t.Helper()
	expect.True(s.t, what, func() bool {
		s.step()
		s.frozen(replicas)
		s.run(1)
		return holds()
	})
}

// beat renews every Lease.
func (s *staleControlPlane) beat() {
	s.t.Helper()
	list := &coordinationv1.LeaseList{}
	if err := env.Client.List(context.Background(), list, client.InNamespace(metav1.NamespaceSystem), client.HasLabels{"test"}); err != nil {
		s.t.Fatal(err)
	}
	for i := range list.Items {
		before := list.Items[i].DeepCopy()
		list.Items[i].Spec.RenewTime = ptr.To(metav1.NowMicro())
		if err := env.Client.Patch(context.Background(), &list.Items[i], client.MergeFrom(before)); err != nil {
			s.t.Fatal(err)
		}
	}
}

func (s *staleControlPlane) deleting() (names []string) {
	for _, m := range machinesOf(s.t, s.cluster) {
		if !m.DeletionTimestamp.IsZero() {
			names = append(names, m.Name)
		}
	}
	return names
}

// TestStaleCache: repeated reconciles with a stale cache cause no second create, no second delete and no second leave.
func TestStaleCache(t *testing.T) {
	s := newStaleControlPlane(t)
	s.staleCreate()
	s.staleRemediation()
	s.staleDelete()
	s.staleSpec()
	s.stalePropagation()
}

func (s *staleControlPlane) staleCreate() {
	s.t.Helper()
	s.frozen(3)
	s.run(5)
	if n := len(machinesOf(s.t, s.cluster)); n != 3 {
		s.t.Fatalf("%d Machines were created, want 3", n)
	}
	configs := &bootstrapv1.CapstanConfigList{}
	if err := env.Client.List(context.Background(), configs, client.InNamespace(s.cluster.Namespace)); err != nil || len(configs.Items) != 3 {
		s.t.Errorf("%d CapstanConfigs, %v", len(configs.Items), err)
	}
	expect.True(s.t, "all vote", func() bool {
		s.step()
		return s.voting() == 3
	})
}

// staleRemediation: a Machine that a MachineHealthCheck has marked is deleted once and replaced once.
func (s *staleControlPlane) staleRemediation() {
	s.t.Helper()
	dead := machinesOf(s.t, s.cluster)[0]
	s.dead[dead.Name] = true
	s.lookAfterEtcd(s.members())
	unhealthy(s.simulation, &dead)
	s.cache.deletes = nil
	s.frozen(3)
	s.run(5)
	if want := []string{dead.Name}; !slices.Equal(s.cache.deletes, want) || !slices.Equal(s.deleting(), want) {
		s.t.Fatalf("%v are being deleted, by %v; want %v", s.deleting(), s.cache.deletes, want)
	}
	s.thaw("the Machine is replaced", 3, func() bool { return s.member(dead.Name) == nil && s.voting() == 3 })
	if len(s.made) != 4 || len(s.cache.deletes) != 1 || !slices.Equal(s.workload.leaves, []string{dead.Name}) {
		s.t.Errorf("created %v, deleted %v, left %v", s.made, s.cache.deletes, s.workload.leaves)
	}
}

// staleDelete: one Machine is deleted once and leaves etcd once, also if the cache still contains it after its removal.
func (s *staleControlPlane) staleDelete() {
	s.t.Helper()
	s.cache.deletes, s.workload.leaves = nil, nil
	s.frozen(1)
	s.run(5)
	goes := s.deleting()
	if len(goes) != 1 || !slices.Equal(s.cache.deletes, goes) {
		s.t.Fatalf("%v are being deleted, by %v", goes, s.cache.deletes)
	}
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: s.cluster.Namespace, Name: goes[0]}}
	expect.True(s.t, "it waits for the hook", func() bool {
		s.step()
		return s.cluster.Get(m) == nil && model.WaitsForHook(m)
	})
	left := func(when string) {
		s.t.Helper()
		if !slices.Equal(s.workload.leaves, goes) || !slices.Equal(s.cache.deletes, goes) || s.voting() != 2 {
			s.t.Fatalf("%s: %v were asked to leave, %v deleted, %d vote; want %v", when, s.workload.leaves, s.cache.deletes, s.voting(), goes)
		}
	}
	s.careful[goes[0]] = true // The agent does not remove the member yet.
	s.frozen(1)
	s.run(5)
	if !slices.Equal(s.workload.leaves, goes) || s.voting() != 3 {
		s.t.Fatalf("%v were asked to leave, %d vote; want %v", s.workload.leaves, s.voting(), goes)
	}
	delete(s.careful, goes[0])
	s.run(5)
	left("it has left")
	expect.True(s.t, "the object is removed", func() bool {
		s.step()
		return len(machinesOf(s.t, s.cluster)) == 2
	})
	s.run(5)
	left("it is gone")
}

// staleSpec: if the stored spec differs from the spec in the cache, the reconciler changes nothing.
func (s *staleControlPlane) staleSpec() {
	s.t.Helper()
	s.cache.deletes = nil
	s.frozen(1)
	s.cluster.Change(s.cp, func() { s.cp.Spec.Replicas = ptr.To[int32](3) })
	s.run(5)
	if len(s.cache.deletes) != 0 || len(s.deleting()) != 0 || len(machinesOf(s.t, s.cluster)) != 2 {
		s.t.Errorf("the reconciler followed an outdated spec: deleted %v", s.cache.deletes)
	}
}

// stalePropagation: a change of the template does not bring back the version that a Machine had before its update in place.
func (s *staleControlPlane) stalePropagation() {
	s.t.Helper()
	stale := machinesOf(s.t, s.cluster)[0]
	live := stale.DeepCopy()
	s.cluster.Change(live, func() {
		metav1.SetMetaDataAnnotation(&live.ObjectMeta, controlplanev1.UpdateFromAnnotation, live.Spec.Version)
		live.Spec.Version = "v1.36.4"
	})
	now := &scope{ControlPlane: &model.ControlPlane{Object: s.cp.DeepCopy(), Cluster: s.cluster.Cluster}}
	now.Object.Spec.MachineTemplate.ObjectMeta.Labels = map[string]string{"new": "label"}
	for _, known := range []*clusterv1.Machine{&stale, live.DeepCopy()} {
		if err := s.reconciler.propagation.propagateTo(context.Background(), now, &model.Instance{Machine: known}); err != nil {
			s.t.Fatal(err)
		}
		current := known.Spec.Version == "v1.36.4"
		if err := s.cluster.Get(live); err != nil || live.Spec.Version != "v1.36.4" || (live.Labels["new"] == "label") != current {
			s.t.Errorf("with the version %s in the cache, the Machine has version %s and labels %v: %v", known.Spec.Version, live.Spec.Version, live.Labels, err)
		}
	}
}

// unpaused is a client that reads control planes without the annotation of a pause.
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

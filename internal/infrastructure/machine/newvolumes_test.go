package machine

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/reconciling"
)

// volumeCache is a client whose cache shows the given volumes.
type volumeCache struct {
	client.Client
	shown []infrav1.CapstanVolume
}

func (c *volumeCache) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if volumes, ok := list.(*infrav1.CapstanVolumeList); ok {
		volumes.Items = slices.Clone(c.shown)
		return nil
	}
	return c.Client.List(ctx, list, opts...)
}

func (c *volumeCache) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	o.SetUID(types.UID(o.GetName()))
	return c.Client.Create(ctx, o, opts...)
}

// unlocked is the API server. A list takes the longer the more objects a namespace has, so the test fails if the lock is held.
type unlocked struct {
	client.Client
	t    *testing.T
	lock *sync.Mutex
}

func (c unlocked) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if !c.lock.TryLock() {
		c.t.Errorf("%T is read from the API server while all placements wait", list)
	} else {
		c.lock.Unlock()
	}
	return c.Client.List(ctx, list, opts...)
}

// newVolumePlacer returns a reconciler with one host that has 100 GiB, its cache, and a function that places a machine with a new volume.
func newVolumePlacer(t *testing.T) (*Reconciler, *volumeCache, func(name string, gib int32) (*scope, error)) {
	t.Helper()
	r, cluster, machine := newPlacer(t, 1, func(h *fakehost.Host) { h.SetInfo(func(i *hostpb.HostInfo) { i.DiskBytes = 100 << 30 }) })
	cache := &volumeCache{Client: r.Client}
	r.Client, r.LiveClient = cache, unlocked{r.LiveClient, t, &r.placing}
	return r, cache, func(name string, gib int32) (*scope, error) {
		s := machine(name, "1Gi")
		s.capstan.UID = types.UID(name)
		s.capstan.Spec.Volumes = []infrav1.MachineVolume{{Name: "data", Path: "/data", SizeGiB: gib}}
		end, err := r.readVolumes(t.Context(), s)
		if err != nil {
			return s, err
		}
		defer end()
		return s, r.choose(t.Context(), s, cluster, nil)
	}
}

// The space of a volume is promised once, although the cache shows neither the volumes that this process has created nor those of an earlier
// leader. The API server is not asked for volumes while a host is chosen.
func TestNewVolumesWithAStaleCache(t *testing.T) {
	r, cache, place := newVolumePlacer(t)
	refused := func(name string, gib int32) {
		t.Helper()
		s, err := place(name, gib)
		if !errors.Is(err, reconciling.ErrWaiting) || conditions.GetReason(s.capstan, infrav1.HostAssignedCondition) != infrav1.NoHostReason {
			t.Errorf("machine %s: %v, %v", name, err, s.capstan.Status.Conditions)
		}
	}
	placed := func(name string, gib int32) infrav1.CapstanVolume {
		t.Helper()
		if _, err := place(name, gib); err != nil {
			t.Fatal(err)
		}
		v := infrav1.CapstanVolume{}
		if err := r.Client.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: "data-" + name}, &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	earlier := infrav1.CapstanVolume{
		ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "earlier"}, Spec: infrav1.CapstanVolumeSpec{ID: "earlier", HostName: "host-000", SizeGiB: 30},
	}
	if err := r.Client.Create(t.Context(), &earlier); err != nil {
		t.Fatal(err)
	}
	deleted := infrav1.CapstanVolume{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "deleted"}}
	if err := r.Client.Create(t.Context(), &deleted); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if s, err := place("one", 60); !errors.Is(err, reconciling.ErrWaiting) || s.again != followPause {
			t.Fatalf("the cache does not show the volume of an earlier leader: %v, again %s", err, s.again)
		}
	}
	if err := r.Client.Delete(t.Context(), &deleted); err != nil {
		t.Fatal(err)
	}
	cache.shown = []infrav1.CapstanVolume{earlier}
	refused("large", 80)
	one := placed("one", 60)
	refused("two", 60)
	cache.shown = []infrav1.CapstanVolume{earlier, one}
	refused("two", 60) // The volume counts once: the event about it comes after the cache.
	r.ofVolume(t.Context(), &one)
	refused("two", 60)
	cache.shown = []infrav1.CapstanVolume{earlier} // Somebody has deleted it.
	placed("two", 60)
	r.drop(client.ObjectKey{Namespace: "ns", Name: "two"})
	placed("three", 60)
}

// The machines of one namespace choose their volumes one after another, and none of them waits with a worker.
func TestVolumeTurns(t *testing.T) {
	r, _, place := newVolumePlacer(t)
	end, _ := r.volumeTurns.TakeTimed("ns")
	if s, err := place("one", 1); !errors.Is(err, reconciling.ErrWaiting) || s.again <= 0 {
		t.Errorf("a second machine chooses volumes: %v, again %s", err, s.again)
	}
	end()
	for _, name := range []string{"one", "two"} {
		if _, err := place(name, 1); err != nil {
			t.Error(err)
		}
	}
}

// A volume that is free, and one that its host has made, is an event for the machines that wait for a host.
func TestOfVolume(t *testing.T) {
	r, now := &Reconciler{}, metav1.Now()
	waiting, its := client.ObjectKey{Namespace: "ns", Name: "waiting"}, client.ObjectKey{Namespace: "ns", Name: "m"}
	r.unplaced.Store(waiting, nil)
	for name, tc := range map[string]struct {
		spec    infrav1.CapstanVolumeSpec
		deleted *metav1.Time
		want    []client.ObjectKey
	}{
		"free":          {want: []client.ObjectKey{waiting}},
		"new":           {spec: infrav1.CapstanVolumeSpec{MachineName: "m"}},
		"made":          {spec: infrav1.CapstanVolumeSpec{MachineName: "m", HostID: "h"}, want: []client.ObjectKey{waiting}},
		"being deleted": {spec: infrav1.CapstanVolumeSpec{MachineName: "m", HostID: "h"}, deleted: &now, want: []client.ObjectKey{its}},
	} {
		var want []reconcile.Request
		for _, key := range tc.want {
			want = append(want, reconcile.Request{NamespacedName: key})
		}
		v := &infrav1.CapstanVolume{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "v", DeletionTimestamp: tc.deleted}, Spec: tc.spec}
		if got := r.ofVolume(t.Context(), v); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

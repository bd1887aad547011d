package machine

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// BenchmarkPlacement measures the choice of a host and an address for one machine of a cluster with 25 machines, in fleets with 50
// machines on each host and two clusters for each host, all in one namespace. The reconciler reads the cache of a manager.
func BenchmarkPlacement(b *testing.B) {
	for _, hosts := range []int{10, 100} {
		b.Run(fmt.Sprintf("hosts=%d", hosts), func(b *testing.B) {
			r, cluster, machine := newPlacer(b, hosts)
			r.Client = fleetCache(b, r.Client, hosts)
			cluster.Spec.HostSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"hollow": "true"}}
			s := machine("new", "1Gi")
			b.ReportAllocs()
			before := processorTime(b)
			for b.Loop() {
				if err := r.choose(b.Context(), s, cluster, nil); err != nil {
					b.Fatal(err)
				}
				r.forget(s.capstan)
				s.capstan.Spec.HostName, s.capstan.Spec.Network.Addresses = "", nil
			}
			b.ReportMetric(float64(processorTime(b)-before)/float64(b.N), "cpu-ns/op")
		})
	}
}

// processorTime is that of this process. On a busy box it is comparable, and the time of the clock is not.
func processorTime(b *testing.B) int64 {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return used.Utime.Nano() + used.Stime.Nano()
}

// filled is an informer whose objects the benchmark has put into its store.
type filled struct{ toolscache.SharedIndexInformer }

func (filled) Run(stop <-chan struct{})           { <-stop }
func (filled) RunWithContext(ctx context.Context) { <-ctx.Done() }
func (filled) HasSynced() bool                    { return true }

// cached reads from the cache of a manager.
type cached struct {
	client.Client
	cache cache.Cache
}

func (c cached) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	return c.cache.Get(ctx, key, obj, opts...)
}

func (c cached) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	return c.cache.List(ctx, list, opts...)
}

// fleetCache returns a client with a cache of a fleet that does not change.
func fleetCache(b *testing.B, c client.Client, hosts int) client.Client {
	b.Helper()
	hostList := &infrav1.CapstanHostList{}
	if err := c.List(b.Context(), hostList); err != nil {
		b.Fatal(err)
	}
	machines, infra := &clusterv1.MachineList{}, &infrav1.CapstanMachineList{}
	for i := range hosts * 50 {
		meta := metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("m-", i), Labels: map[string]string{clusterv1.ClusterNameLabel: "c"}}
		if cluster := i % (2 * hosts); cluster > 0 {
			meta.Labels[clusterv1.ClusterNameLabel] = fmt.Sprint("c-", cluster)
		}
		machines.Items = append(machines.Items, clusterv1.Machine{ObjectMeta: meta})
		infra.Items = append(infra.Items, infrav1.CapstanMachine{ObjectMeta: meta, Spec: infrav1.CapstanMachineSpec{HostName: fmt.Sprintf("host-%03d", i%hosts)}})
	}
	for i := range hostList.Items {
		hostList.Items[i].Labels = map[string]string{"hollow": "true"}
	}
	informers := map[string]toolscache.SharedIndexInformer{}
	out, err := cache.New(&rest.Config{}, cache.Options{
		Scheme: c.Scheme(), Mapper: mapper(c.Scheme()),
		NewInformer: func(lw toolscache.ListerWatcher, obj runtime.Object, _ time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
			informer := filled{toolscache.NewSharedIndexInformer(lw, obj, 0, indexers)}
			informers[fmt.Sprintf("%T", obj)] = informer
			return informer
		},
	})
	if err != nil {
		b.Fatal(err)
	}
	for _, kind := range []client.Object{&infrav1.CapstanMachine{}, &clusterv1.Machine{}} {
		if err := reconciling.IndexByCluster(b.Context(), out, kind); err != nil {
			b.Fatal(err)
		}
	}
	if err := out.IndexField(b.Context(), &infrav1.CapstanMachine{}, addressIndex, addressesOf); err != nil {
		b.Fatal(err)
	}
	if _, err := out.GetInformer(b.Context(), &infrav1.CapstanHost{}, cache.BlockUntilSynced(false)); err != nil {
		b.Fatal(err)
	}
	for _, list := range []client.ObjectList{hostList, machines, infra} {
		if err := apimeta.EachListItem(list, func(o runtime.Object) error {
			return informers[fmt.Sprintf("%T", o)].GetIndexer().Add(o)
		}); err != nil {
			b.Fatal(err)
		}
	}
	go func() { _ = out.Start(b.Context()) }()
	if err := wait.PollUntilContextTimeout(b.Context(), 10*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		return out.List(ctx, &infrav1.CapstanHostList{}) == nil, nil
	}); err != nil {
		b.Fatal(err)
	}
	return cached{c, out}
}

func mapper(scheme *runtime.Scheme) apimeta.RESTMapper {
	m := apimeta.NewDefaultRESTMapper(scheme.PrioritizedVersionsAllGroups())
	m.Add(infrav1.GroupVersion.WithKind("CapstanHost"), apimeta.RESTScopeRoot)
	m.Add(infrav1.GroupVersion.WithKind("CapstanMachine"), apimeta.RESTScopeNamespace)
	m.Add(clusterv1.GroupVersion.WithKind("Machine"), apimeta.RESTScopeNamespace)
	return m
}

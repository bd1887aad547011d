package capstanhost

import (
	"context"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/keymutex"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/internal/reconciling"
)

// drained returns an Available Machine with an owner.
func drained(name string, change ...func(*clusterv1.Machine)) clusterv1.Machine {
	m := clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{}}}
	m.OwnerReferences = []metav1.OwnerReference{{Kind: "MachineSet", Name: "set", Controller: ptr.To(true)}}
	m.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{Kind: "CapstanMachine", Name: name}
	m.Status.Conditions = []metav1.Condition{{Type: clusterv1.AvailableCondition, Status: metav1.ConditionTrue}}
	for _, f := range change {
		f(&m)
	}
	return m
}

func TestPlanDrain(t *testing.T) {
	controlPlane := func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineControlPlaneLabel] = "" }
	leaving := func(m *clusterv1.Machine) { m.DeletionTimestamp = ptr.To(metav1.NewTime(time.Unix(1, 0))) }
	broken := func(m *clusterv1.Machine) { m.Status.Conditions = nil }
	alone := func(m *clusterv1.Machine) { m.OwnerReferences = nil }
	foreign := func(m *clusterv1.Machine) { m.Spec.InfrastructureRef.Kind = "OtherMachine" }
	paused := func(m *clusterv1.Machine) { m.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} }
	for name, tc := range map[string]struct {
		machines              []clusterv1.Machine
		controlPlane, workers int32
		change                func(*clusterv1.Cluster)
		want, why             string
	}{
		"one of each group":                       {machines: []clusterv1.Machine{drained("a"), drained("b"), drained("c", controlPlane), drained("d", controlPlane)}, controlPlane: 2, workers: 2, want: "c a"},
		"one at a time":                           {machines: []clusterv1.Machine{drained("a", leaving), drained("b")}, workers: 1, why: "Machine a is being deleted"},
		"a replacement is missing":                {machines: []clusterv1.Machine{drained("a"), drained("b")}, workers: 3, why: "2 of 3 Machines exist"},
		"a replacement starts":                    {machines: []clusterv1.Machine{drained("a"), drained("elsewhere", broken)}, workers: 2, why: "Machine elsewhere is not Available"},
		"the broken one first":                    {machines: []clusterv1.Machine{drained("a"), drained("b", broken)}, workers: 2, want: "b"},
		"two broken ones":                         {machines: []clusterv1.Machine{drained("a", broken), drained("b", broken)}, workers: 2, why: "Machine b is not Available"},
		"the control plane waits, workers do not": {machines: []clusterv1.Machine{drained("a"), drained("c", controlPlane), drained("d", controlPlane, leaving)}, controlPlane: 1, workers: 1, want: "a", why: "Machine d is being deleted"},
		"nobody replaces it":                      {machines: []clusterv1.Machine{drained("a", alone)}, workers: 1, why: "has no owner"},
		"it is paused":                            {machines: []clusterv1.Machine{drained("a", paused)}, workers: 1, why: "is paused"},
		"another infrastructure":                  {machines: []clusterv1.Machine{drained("a", foreign)}, workers: 1, why: "CapstanMachine a has no Machine"},
		"elsewhere":                               {machines: []clusterv1.Machine{drained("elsewhere")}, workers: 1},
		"a paused cluster":                        {machines: []clusterv1.Machine{drained("a")}, change: func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) }, why: "is paused"},
		"a cluster that is deleted":               {machines: []clusterv1.Machine{drained("a")}, change: func(c *clusterv1.Cluster) { c.DeletionTimestamp = ptr.To(metav1.Now()) }},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "demo", Namespace: "default"}}
			cluster.Status.ControlPlane = &clusterv1.ClusterControlPlaneStatus{DesiredReplicas: &tc.controlPlane}
			cluster.Status.Workers = &clusterv1.WorkersStatus{DesiredReplicas: &tc.workers}
			if tc.change != nil {
				tc.change(cluster)
			}
			names := map[string]bool{}
			for _, m := range tc.machines {
				names[m.Name] = m.Name != "elsewhere"
			}
			maps.DeleteFunc(names, func(_ string, here bool) bool { return !here })
			next, delays := planDrain(cluster, tc.machines, names)
			var got []string
			for _, m := range next {
				got = append(got, m.Name)
			}
			why := strings.Join(delays, "; ")
			if strings.Join(got, " ") != tc.want || (why == "") != (tc.why == "") || !strings.Contains(why, tc.why) {
				t.Errorf("%q, because %q; want %q, because %q", got, why, tc.want, tc.why)
			}
		})
	}
}

// Drains of several hosts delete one Machine of a group at a time, also if they decide at the same time.
func TestDrainsOfSeveralHosts(t *testing.T) {
	scheme := kruntime.NewScheme()
	if err := clusterv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	const hosts = 8
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "demo", Namespace: "default"}}
	cluster.Status.Workers = &clusterv1.WorkersStatus{DesiredReplicas: ptr.To[int32](hosts)}
	b := fake.NewClientBuilder().WithScheme(scheme).WithObjects(cluster)
	for i := range hosts {
		m := drained(fmt.Sprint(i))
		m.Labels[clusterv1.ClusterNameLabel], m.Finalizers = cluster.Name, []string{"stays"}
		b.WithObjects(&m)
	}
	c := b.WithInterceptorFuncs(interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			err := c.List(ctx, list, opts...)
			runtime.Gosched() // Without an order of the decisions, another one lists the same Machines now.
			return err
		},
	}).Build()
	r := &Reconciler{Options: reconciling.Options{LiveClient: reconciling.Live(c)}, Client: c, draining: keymutex.NewHashed(drainLocks)}
	var started, all sync.WaitGroup
	started.Add(hosts)
	for i := range hosts {
		all.Go(func() {
			started.Done()
			started.Wait()
			if _, err := r.drainCluster(t.Context(), client.ObjectKeyFromObject(cluster), map[string]bool{fmt.Sprint(i): true}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	machines := &clusterv1.MachineList{}
	if err := c.List(t.Context(), machines); err != nil {
		t.Fatal(err)
	}
	var leaving []string
	for _, m := range machines.Items {
		if !m.DeletionTimestamp.IsZero() {
			leaving = append(leaving, m.Name)
		}
	}
	if len(leaving) != 1 {
		t.Errorf("expected one Machine that is being deleted, found %v", leaving)
	}
}

// A drain does not wait for the requests of a drain of another cluster.
func TestDrainsOfSeveralClusters(t *testing.T) {
	scheme := kruntime.NewScheme()
	if err := clusterv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	slow := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "slow", Namespace: "default"}}
	other := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "other", Namespace: "default"}}
	r := &Reconciler{draining: keymutex.NewHashed(drainLocks)}
	decided := 0
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(slow, other).WithInterceptorFuncs(interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			decided++
			if decided == 1 { // With one lock for all clusters, this call does not end.
				if _, err := r.drainCluster(ctx, client.ObjectKeyFromObject(other), nil); err != nil {
					t.Error(err)
				}
			}
			return c.List(ctx, list, opts...)
		},
	}).Build()
	r.Client, r.LiveClient = c, reconciling.Live(c)
	if _, err := r.drainCluster(t.Context(), client.ObjectKeyFromObject(slow), nil); err != nil || decided != 2 {
		t.Errorf("expected the decisions on 2 clusters, found %d: %v", decided, err)
	}
}

package machinepool

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// An event counts the machines that were created. A ResourceQuota, for example, can refuse some or all of them.
func TestEventOfCreatedMachines(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		quota int32
		want  []string
	}{
		{"all", 3, []string{"Created 3 machines"}},
		{"some", 2, []string{"Created 2 machines"}},
		{"none", 0, nil},
	} {
		var left atomic.Int32
		left.Store(tc.quota)
		c := fake.NewClientBuilder().WithScheme(scheme).WithInterceptorFuncs(interceptor.Funcs{
			Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
				if left.Add(-1) < 0 {
					return errors.New("exceeded quota")
				}
				return c.Create(ctx, obj, opts...)
			},
		}).Build()
		recorder := events.NewFakeRecorder(10)
		r := &Reconciler{Options: reconciling.Options{WatchNamespace: "ns"}, Client: c, recorder: recorder}
		pool := &infrav1.CapstanMachinePool{}
		pool.Namespace, pool.Name = "ns", "pool"
		err := r.createMembers(t.Context(), &scope{pool: pool, machinePool: &clusterv1.MachinePool{}}, make([]string, 3))
		if (err == nil) != (tc.quota == 3) {
			t.Errorf("%s: %v", tc.name, err)
		}
		var got []string
		for range len(recorder.Events) {
			got = append(got, <-recorder.Events)
		}
		if !slices.EqualFunc(got, tc.want, strings.Contains) {
			t.Errorf("%s: expected events %q, found %q", tc.name, tc.want, got)
		}
	}
}

// TestNoAnswer: an API server that does not answer is an error of the reconcile, with its quick retries. It is no refused step.
func TestNoAnswer(t *testing.T) {
	busy := apierrors.NewTooManyRequests("busy", 1)
	r := &Reconciler{Options: reconciling.Options{LiveClient: fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return busy
		},
	}).Build()}}
	s := &scope{cluster: &clusterv1.Cluster{}, machinePool: &clusterv1.MachinePool{}, pool: &infrav1.CapstanMachinePool{}}
	s.cluster.Status.Initialization.InfrastructureProvisioned = ptr.To(true)
	s.want = desired{replicas: 1, secret: "data"}
	if again, err := r.follow(t.Context(), s); !errors.Is(err, busy) || again != 0 || s.trouble != nil {
		t.Errorf("got %s, %v, and the trouble %v", again, err, s.trouble)
	}
}

// TestRefusedSteps: a step that the API server refuses holds the others back neither in a pool nor during its deletion.
func TestRefusedSteps(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clusterv1.AddToScheme, infrav1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	pool, mp := &infrav1.CapstanMachinePool{}, &clusterv1.MachinePool{}
	pool.Namespace, pool.Name, mp.Namespace, mp.Name, mp.UID = "ns", "pool", "ns", "pool", "u"
	mp.Spec.ClusterName = "c"
	ofPool := func(labels map[string]string, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: labels, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(mp, clusterv1.GroupVersion.WithKind("MachinePool"))}}
	}
	updated := &infrav1.CapstanMachine{ObjectMeta: ofPool(map[string]string{infrav1.MachinePoolLabel: "pool"}, "a")}
	updated.Annotations = map[string]string{clusterv1.UpdateInProgressAnnotation: "", infrav1.MachineDrainAnnotation: ""}
	orphan := &clusterv1.Machine{ObjectMeta: ofPool(map[string]string{clusterv1.ClusterNameLabel: "c", clusterv1.MachinePoolNameLabel: "pool"}, "b")}
	orphan.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: infrav1.MachineKind, Name: "b"}
	refused := errors.New("exceeded quota")
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(updated, orphan).WithInterceptorFuncs(interceptor.Funcs{
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error { return refused },
		Delete: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.DeleteOption) error {
			if _, machine := obj.(*clusterv1.Machine); machine {
				return refused
			}
			return c.Delete(ctx, obj, opts...)
		},
	}).Build()
	r := &Reconciler{Options: reconciling.Options{WatchNamespace: "ns", LiveClient: reconciling.Live(c)}, Client: c, recorder: events.NewFakeRecorder(10)}
	r.Workload = func(context.Context, *clusterv1.Cluster) (client.Client, error) { return nil, refused }
	s := &scope{pool: pool, machinePool: mp, observed: observed{members: []member{{capstan: updated}}}}
	steps := &actions{machines: []clusterv1.Machine{*orphan}, plan: plan{create: []string{""}}, updates: updatePlan{uncordon: []string{"a"}, finish: []string{"a"}}}
	if err := r.carryOut(t.Context(), s, steps); len(split(err)) != 3 {
		t.Errorf("expected the errors of a deletion, a creation and an uncordon, found %v", err)
	}
	got := &infrav1.CapstanMachine{}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(updated), got); err != nil || (member{capstan: got}).isUpdating() {
		t.Errorf("the update is not finished after other steps were refused: %v, %v", err, got.Annotations)
	}
	if err := r.reconcileDelete(t.Context(), s); len(split(err)) != 1 {
		t.Errorf("expected the error of the deletion of the Machine, found %v", err)
	}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(updated), got); !apierrors.IsNotFound(err) {
		t.Errorf("the machine of a pool that is deleted remains after the deletion of another one was refused: %v", err)
	}
}

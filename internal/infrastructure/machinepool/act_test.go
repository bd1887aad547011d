package machinepool

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
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

package reconciling_test

import (
	"context"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/internal/reconciling"
)

// indexer adds indexes to a fake client.
type indexer struct{ *fake.ClientBuilder }

// IndexField implements client.FieldIndexer.
func (i indexer) IndexField(_ context.Context, kind client.Object, field string, extract client.IndexerFunc) error {
	i.WithIndex(kind, field, extract)
	return nil
}

// A cache with indexes and a client of the API server select the same objects.
func TestOfCluster(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := clusterv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	machine := func(namespace, name string, labels map[string]string) *clusterv1.Machine {
		return &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels}}
	}
	member := map[string]string{clusterv1.ClusterNameLabel: "c", clusterv1.MachineControlPlaneLabel: ""}
	objects := []client.Object{
		machine("ns", "member", member), machine("ns", "worker", map[string]string{clusterv1.ClusterNameLabel: "c"}),
		machine("ns", "pool-worker", map[string]string{clusterv1.ClusterNameLabel: "c", clusterv1.MachinePoolNameLabel: "p"}),
		machine("ns", "other-cluster", map[string]string{clusterv1.ClusterNameLabel: "d", clusterv1.MachineControlPlaneLabel: ""}),
		machine("ns", "no-labels", nil), machine("other", "other-namespace", member),
	}
	builder := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...)
	if err := reconciling.IndexByCluster(t.Context(), indexer{builder}, &clusterv1.Machine{}); err != nil {
		t.Fatal(err)
	}
	key := client.ObjectKey{Namespace: "ns", Name: "c"}
	for reader, c := range map[string]client.Client{
		"cache": builder.Build(), "live": reconciling.Live(fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build()),
	} {
		for want, options := range map[string][]client.ListOption{
			"member pool-worker worker": {reconciling.OfCluster(key)},
			"member":                    {reconciling.ControlPlaneOf(key)},
			"pool-worker":               {reconciling.OfCluster(key), client.MatchingLabels{clusterv1.MachinePoolNameLabel: "p"}},
			"":                          {reconciling.OfCluster(client.ObjectKey{Namespace: "ns"})},
		} {
			list := &clusterv1.MachineList{}
			if err := c.List(t.Context(), list, options...); err != nil {
				t.Fatal(reader, err)
			}
			var names []string
			for _, m := range list.Items {
				names = append(names, m.Name)
			}
			if got := strings.Join(names, " "); got != want {
				t.Errorf("%s: Machines %q, want %q", reader, got, want)
			}
		}
	}
}

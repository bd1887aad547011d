package controlplane

import (
	"context"
	"testing"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/source"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv/testevents"
)

// TestFailedReads_ALL13: an event whose read fails is lost, so the log shows it.
func TestFailedReads_ALL13(t *testing.T) {
	member := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{
		Labels:          map[string]string{clusterv1.ClusterNameLabel: "c", clusterv1.MachineControlPlaneLabel: ""},
		Annotations:     map[string]string{clusterv1.UpdateInProgressAnnotation: ""},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: "c"}},
	}}
	ofInfrastructure := func(mapper func(*infrastructure, context.Context, client.Object) []ctrl.Request) testevents.Mapper {
		return func(ctx context.Context, c client.Client) []ctrl.Request {
			return mapper(&infrastructure{clients: &clients{Client: c}}, ctx, member)
		}
	}
	testevents.LogFailedReads(t, map[string]testevents.Mapper{
		"a labelled object": func(ctx context.Context, c client.Client) []ctrl.Request {
			return (&Reconciler{clients: &clients{Client: c}}).labelledToControlPlane(ctx, member)
		},
		"an infrastructure cluster": ofInfrastructure((*infrastructure).infraClusterToControlPlane),
		"a template":                ofInfrastructure((*infrastructure).templateToControlPlanes),
		"an infrastructure machine": ofInfrastructure((*infrastructure).updatingToControlPlane),
	})
}

// kindWatches counts the watches that are added to a controller.
type kindWatches struct {
	controller.Controller
	added int
}

func (c *kindWatches) Watch(source.Source) error {
	c.added++
	return nil
}

// TestOneKindInAllRoles: a tenant can name the kind of an infrastructure cluster as its template. Each role of the kind has its own watch,
// so the events of other control planes stay.
func TestOneKindInAllRoles(t *testing.T) {
	c, r, log := &kindWatches{}, &infrastructure{}, logr.Discard()
	r.watchWith(c, struct{ cache.Cache }{}, env.Scheme, &log)
	obj := foreign("OtherCluster", "team", "demo", nil)
	for i, role := range []*roleWatch{r.templates, r.clusters, r.machines} {
		for range 2 {
			if err := role.start(t.Context(), obj); err != nil || c.added != i+1 {
				t.Errorf("role %d: %d watches, %v", i, c.added, err)
			}
		}
	}
}

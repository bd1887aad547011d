package controlplane

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

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

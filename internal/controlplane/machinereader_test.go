package controlplane

import (
	"context"
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// TestPartsOf: without an infrastructure machine, a Machine has none. One that cannot be read is an error: the Machine may be outdated.
func TestPartsOf(t *testing.T) {
	missing, silent := apierrors.NewNotFound(schema.GroupResource{Resource: "any"}, "m"), errors.New("no answer")
	machine := &clusterv1.Machine{Spec: clusterv1.MachineSpec{
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: infrav1.MachineKind, Name: "m"},
	}}
	for name, answer := range map[string]error{"missing": missing, "silent": silent, "there": nil} {
		get := func(_ context.Context, _ client.WithWatch, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
			switch obj.(type) {
			case *metav1.PartialObjectMetadata: // of the CustomResourceDefinition
				obj.SetLabels(map[string]string{clusterv1.GroupVersion.String(): infrav1.GroupVersion.Version})
				return nil
			case *unstructured.Unstructured:
				return answer
			}
			return missing
		}
		c := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{Get: get}).Build()
		parts, err := (&machineReader{clients: &clients{Client: c}}).partsOf(t.Context(), machine)
		if errors.Is(err, silent) != (name == "silent") || (parts.infraMachine != nil) != (name == "there") || parts.config != nil {
			t.Errorf("%s: %+v, %v", name, parts, err)
		}
	}
}

package controlplane

import (
	"slices"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// TestPatchOfSuccessor: a late patch about a deleted object does not change another object that has got its name.
func TestPatchOfSuccessor(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	controlPlane := &controlplanev1.CapstanControlPlane{}
	controlPlane.Spec.Version = "v1.36.3"
	controlPlane.Spec.MachineTemplate.Spec.InfrastructureRef.APIGroup = infrav1.GroupVersion.Group
	controlPlane.Spec.MachineTemplate.Spec.InfrastructureRef.Kind = "CapstanMachineTemplate"
	controlPlane.Spec.MachineTemplate.Spec.InfrastructureRef.Name = "demo"
	for kind, obj := range map[string]reconciling.Object{
		"CapstanControlPlane": controlPlane, "CapstanConfig": &bootstrapv1.CapstanConfig{}, "CapstanMachine": &infrav1.CapstanMachine{}, "CapstanCluster": &infrav1.CapstanCluster{},
	} {
		t.Run(kind, func(t *testing.T) {
			create := func(finalizers ...string) reconciling.Object {
				t.Helper()
				out := obj.DeepCopyObject().(reconciling.Object)
				out.SetNamespace(cluster.Namespace)
				out.SetName("successor")
				out.SetFinalizers(finalizers)
				if err := env.Client.Create(t.Context(), out); err != nil {
					t.Fatal(err)
				}
				return out
			}
			former := create()
			if err := env.Client.Delete(t.Context(), former); err != nil {
				t.Fatal(err)
			}
			write := func(change func(reconciling.Object)) error {
				late := former.DeepCopyObject().(reconciling.Object)
				late.SetFinalizers([]string{"test/a"})
				patch := reconciling.NewPatch(late, env.Client)
				change(late)
				return patch.Write(t.Context(), late)
			}
			condition := []metav1.Condition{{Type: "A", Status: metav1.ConditionTrue, Reason: "A", LastTransitionTime: metav1.Now()}}
			metadata := func(o reconciling.Object) { o.SetFinalizers(nil) }
			status := map[string]func(reconciling.Object){
				"the observed generation": func(o reconciling.Object) { o.SetGeneration(7) }, "conditions": func(o reconciling.Object) { o.SetConditions(condition) },
			}
			if err := write(metadata); err != nil {
				t.Errorf("without a successor: %v", err)
			}
			successor := create("test/a")
			if err := write(metadata); !apierrors.IsInvalid(err) {
				t.Errorf("the finalizers: %v", err)
			}
			for what, change := range status {
				if err := write(change); err != nil { // As for an object that does not exist.
					t.Errorf("%s: %v", what, err)
				}
			}
			now := successor.DeepCopyObject().(reconciling.Object)
			if err := env.Client.Get(t.Context(), client.ObjectKeyFromObject(now), now); err != nil || !slices.Equal(now.GetFinalizers(), []string{"test/a"}) || now.GetResourceVersion() != successor.GetResourceVersion() {
				t.Errorf("%v, finalizers %v", err, now.GetFinalizers())
			}
			patch := reconciling.NewPatch(now, env.Client)
			now.SetFinalizers(nil)
			now.SetLabels(map[string]string{"a": "b"})
			now.SetConditions(condition)
			if err := patch.Write(t.Context(), now); err != nil {
				t.Errorf("the patch of the successor itself: %v", err)
			}
		})
	}
}

package machine

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// IM-05: a machine boots when its Cluster is provisioned or its CapstanCluster allows the boot, and with --strict-contract only with the
// Cluster.
func TestHasInfrastructure_IM05(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		strict, cluster, capstan, allowed, want bool
		kind                                    string
	}{
		"nothing yet":                      {kind: "CapstanCluster"},
		"the CapstanCluster":               {kind: "CapstanCluster", capstan: true, want: true},
		"the boot is allowed":              {kind: "CapstanCluster", allowed: true, want: true},
		"the CapstanCluster is not enough": {kind: "CapstanCluster", capstan: true, allowed: true, strict: true},
		"the Cluster":                      {kind: "CapstanCluster", cluster: true, strict: true, want: true},
		"another kind":                     {kind: "OtherCluster", capstan: true},
	} {
		t.Run(name, func(t *testing.T) {
			capstan := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
			capstan.Status.Initialization.Provisioned = ptr.To(c.capstan)
			if c.allowed {
				capstan.Status.Conditions = []metav1.Condition{{Type: infrav1.BootAllowedCondition, Status: metav1.ConditionTrue}}
			}
			cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
			cluster.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{Kind: c.kind, Name: "c"}
			cluster.Status.Initialization.InfrastructureProvisioned = ptr.To(c.cluster)
			r := &Reconciler{Options: reconciling.Options{StrictContract: c.strict}, Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(capstan).Build()}
			if got, err := r.hasInfrastructure(t.Context(), &scope{cluster: cluster}); err != nil || got != c.want {
				t.Errorf("got %v, %v; want %v", got, err, c.want)
			}
			cluster.Spec.InfrastructureRef.Name = "gone"
			if got, err := r.hasInfrastructure(t.Context(), &scope{cluster: cluster}); err != nil || got != c.cluster {
				t.Errorf("without a CapstanCluster: got %v, %v", got, err)
			}
		})
	}
}

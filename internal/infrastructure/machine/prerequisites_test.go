package machine

import (
	"errors"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
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

// IM-05: the message names the field for which the machine waits.
func TestMissingInfrastructure_IM05(t *testing.T) {
	const cluster = "infrastructureProvisioned of Cluster c"
	for name, tc := range map[string]struct {
		strict     bool
		kind, want string
	}{
		"by default":           {kind: "CapstanCluster", want: "its condition BootAllowed"},
		"with strict-contract": {kind: "CapstanCluster", strict: true, want: cluster},
		"another kind":         {kind: "OtherCluster", want: cluster},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scope{cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "c"}}, capstan: &infrav1.CapstanMachine{}}
			s.cluster.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{Kind: tc.kind, Name: "i"}
			scheme := runtime.NewScheme()
			if err := infrav1.AddToScheme(scheme); err != nil {
				t.Fatal(err)
			}
			r := &Reconciler{Options: reconciling.Options{StrictContract: tc.strict}, Client: fake.NewClientBuilder().WithScheme(scheme).Build()}
			if err := r.waitForPrerequisites(t.Context(), s); !errors.Is(err, reconciling.ErrWaiting) {
				t.Error(err)
			}
			message := conditions.GetMessage(s.capstan, infrav1.MachineRunningCondition)
			if !strings.Contains(message, tc.want) || strings.Contains(message, "BootAllowed") != (tc.want != cluster) {
				t.Errorf("message %q, want %q", message, tc.want)
			}
		})
	}
}

// IM-02, IM-05: only the machine of a pool follows the decisions in its annotations. Those of other machines come from templates of users.
func TestRecordedDecisions_IM02(t *testing.T) {
	for name, tc := range map[string]struct {
		labels                  map[string]string
		machine                 clusterv1.MachineSpec
		version, domain, secret string
	}{
		"of a pool":                        {map[string]string{clusterv1.MachinePoolNameLabel: "p"}, clusterv1.MachineSpec{}, "v1.36.4", "pool", "pool"},
		"of a pool, with a Node":           {map[string]string{clusterv1.MachinePoolNameLabel: "p"}, clusterv1.MachineSpec{Version: "v1.36.3"}, "v1.36.4", "pool", "pool"},
		"of a control plane":               {nil, clusterv1.MachineSpec{Version: "v1.36.3", FailureDomain: "own", Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To("own")}}, "v1.36.3", "own", "own"},
		"of another owner, without values": {},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scope{machine: &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Labels: tc.labels}, Spec: tc.machine}, capstan: &infrav1.CapstanMachine{}}
			s.capstan.Annotations = map[string]string{
				infrav1.MachineVersionAnnotation: "v1.36.4", infrav1.MachineFailureDomainAnnotation: "pool", infrav1.MachineBootstrapSecretAnnotation: "pool",
			}
			secret, err := (&Reconciler{}).dataSecretName(t.Context(), s)
			if version, domain := kubernetesVersion(s), wantedFailureDomain(s); err != nil || version != tc.version || domain != tc.domain || secret != tc.secret {
				t.Errorf("version %q, failure domain %q, Secret %q, %v; want %q, %q, %q", version, domain, secret, err, tc.version, tc.domain, tc.secret)
			}
		})
	}
}
